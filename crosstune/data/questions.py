"""What a row asks and what it answers: the prompt that inference is given, the answer, and other answers in its place.

Taken from the encoded row, so a generated answer starts from exactly the ids that training saw. The answer is the row's
last run of targets; earlier assistant turns belong to the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from crosstune.data.render import Renderer
from crosstune.data.rows import Row, Rows
from crosstune.data.tokens import Encoder, Tokens
from crosstune.errors import DataError
from crosstune.recipe.sections import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_LABELS = 200


@dataclass(frozen=True)
class Question:
    """One row as a question. `prompt` and `answer` are ids; the answer is without the stop token that ends it."""

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]


def question(tokens: Tokens, position: int) -> Question:
    """The question of the row at `position`. A row without a target has an empty answer."""
    ids, learn = tokens.row(position)
    start, end = last_run(learn)
    answer = ids[start:end]
    stops = np.flatnonzero(np.isin(answer, tokens.stop_ids))
    return Question(ids[:start], answer[: stops[0]] if len(stops) else answer)


def last_run(learn: NDArray[np.bool_]) -> tuple[int, int]:
    """Start and end of the last run of True; (length, length) if there is none."""
    where = np.flatnonzero(learn)
    if not len(where):
        return len(learn), len(learn)
    end = int(where[-1]) + 1
    gaps = np.flatnonzero(~learn[:end])
    return (int(gaps[-1]) + 1 if len(gaps) else 0), end


def refuse_promptless(tokens: Tokens, metric: str) -> None:
    """Generating and choosing need something to answer: refuse rows of which everything is learned."""
    for position in range(len(tokens)):
        prompt = question(tokens, position).prompt
        if len(prompt) < 2:
            raise DataError(
                f"row {tokens.numbers[position]} has no prompt, and the metric {metric} needs answers to prompts",
                "Use rows of shape prompt or messages, or set data.answer_after for plain texts.",
            )


@dataclass(frozen=True)
class Choices:
    """Labels as answers. `right` (rows,): the right label's position in `names`; −1 where the row answers otherwise."""

    names: tuple[str, ...]
    right: NDArray[np.int64]
    ids: tuple[tuple[NDArray[np.int32], ...], ...]  # row → label → ids of the label as answer, end token included

    @property
    def others(self) -> list[int]:
        """Positions of rows that answer with none of the labels."""
        return np.flatnonzero(self.right < 0).tolist()


def read_labels(rows: Rows, asked: str | Sequence[str] | None) -> tuple[tuple[str, ...], list[str]]:
    """The labels, and the right one of each row. `asked`: a list of labels, or the column that holds the right one.

    Without either, the labels are all different answers of the data.
    """
    if isinstance(asked, str):
        found = [str(value).strip() for value in rows.column(asked, option="evaluate.labels")]
    else:
        found = [answer_text(row) for row in rows.rows]
    names = (
        tuple(dict.fromkeys(asked)) if asked is not None and not isinstance(asked, str) else tuple(sorted(set(found)))
    )
    if len(names) < 2:
        raise DataError(
            f"a choice needs two labels or more (found: {', '.join(names) or 'none'})", "Set evaluate.labels."
        )
    if len(names) > MOST_LABELS:
        raise DataError(
            f"{len(names)} different answers are too many labels (at most {MOST_LABELS})",
            "List the labels in evaluate.labels, name their column there, or use a metric of generated text.",
        )
    return names, found


def make_choices(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data, asked: str | Sequence[str] | None
) -> Choices:
    """Every row with each label put in place of its answer, rendered and encoded as a row of training would be."""
    names, found = read_labels(rows, asked)
    place = {name: position for position, name in enumerate(names)}
    right = np.array([place.get(label, -1) for label in found], dtype=np.int64)
    if (right < 0).all():
        raise DataError(
            f"no row's answer is one of the labels {', '.join(names[:5])} (first answer: {found[0]!r})",
            "Make evaluate.labels the answers exactly as the rows have them.",
        )
    renderer, encoder = Renderer(tokenizer, data), Encoder(tokenizer)
    ids = []
    for row in rows.rows:
        variants = encoder.rows([renderer.spans(with_answer(row, name)) for name in names])
        ids.append(tuple(_answer_ids(*variant) for variant in variants))
    return Choices(names, right, tuple(ids))


def _answer_ids(ids: list[int], learn: list[bool]) -> NDArray[np.int32]:
    start, end = last_run(np.array(learn, dtype=bool))
    return np.array(ids[start:end], dtype=np.int32)


def answer_text(row: Row) -> str:
    """The row's answer as text: its completion, or its last assistant turn."""
    if row.shape == "prompt":
        return row.completion.strip()
    place = _answer_turn(row)
    return row.turns[place].content.strip() if place is not None else row.text.strip()


def prompt_text(row: Row) -> str:
    """What stands before the answer, as text to compare rows by."""
    if row.shape == "prompt":
        return row.prompt
    place = _answer_turn(row)
    return "\n".join(turn.content for turn in row.turns[:place]) if place is not None else row.text


def with_answer(row: Row, answer: str) -> Row:
    """The same row with another answer. Blanks before a completion stay: they belong to the prompt's style."""
    if row.shape == "prompt":
        blanks = row.completion[: len(row.completion) - len(row.completion.lstrip())]
        return replace(row, completion=blanks + answer)
    place = _answer_turn(row)
    if place is None:
        raise DataError(f"row {row.number} has no assistant turn", "Choices need rows of shape prompt or messages.")
    turns = (*row.turns[:place], replace(row.turns[place], content=answer), *row.turns[place + 1 :])
    return replace(row, turns=turns)


def _answer_turn(row: Row) -> int | None:
    places = [place for place, turn in enumerate(row.turns) if turn.role == "assistant" and turn.learn]
    return places[-1] if places else None


def with_examples(row: Row, shots: Sequence[Row]) -> Row:
    """The row after examples that are only read: earlier turns, or text before the prompt. Its targets stay."""
    if not shots:
        return row
    if row.shape == "messages":
        system = tuple(turn for turn in row.turns[:1] if turn.role == "system")
        before = (replace(turn, learn=False) for shot in shots for turn in shot.turns if turn.role != "system")
        return replace(row, turns=(*system, *before, *row.turns[len(system) :]))
    before_text = "".join(shot.prompt + shot.completion + "\n\n" for shot in shots)
    return replace(row, prompt=before_text + row.prompt)


def pick_examples(train: Sequence[int], count: int, *, seed: int, number: int) -> list[int]:
    """`count` of the positions in `train`, drawn for the row with this number: the same in every run and order."""
    rng = np.random.default_rng([seed % 2**32, number])
    return [int(train[i]) for i in rng.permutation(len(train))[:count]]
