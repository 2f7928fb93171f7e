"""What lanes say of rows they never saw, beyond the loss: answers they write, labels they choose.

An exam is set once (prompts, right answers, labels) and taken by the lanes in their slots, or by the bare base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.questions import (
    Choices,
    make_choices,
    pick_examples,
    question,
    refuse_promptless,
    with_examples,
)  # fmt: skip
from crosstune.data.rows import Rows
from crosstune.data.tokens import Tokens, tokenize
from crosstune.errors import RecipeError
from crosstune.metrics import Metric, find_metrics
from crosstune.model.base import Base
from crosstune.recipe.sections import Data, Evaluate
from crosstune.splits.fold_units import Fold
from crosstune.train.choice import score_labels
from crosstune.train.generate import Prompt, Sampling, generate_lanes, longest_answer


@dataclass(frozen=True)
class Marks:
    """What one lane (or the base) said of `rows` (positions): answers as text, and label probabilities (n, labels)."""

    rows: NDArray[np.int64]
    answers: tuple[str, ...] | None
    stopped: NDArray[np.bool_] | None
    chances: NDArray[np.float64] | None


@dataclass(frozen=True)
class Exam:
    """What is asked of held-out rows. `wanted`: each row's own answer as text."""

    metrics: tuple[Metric, ...]
    prompts: tuple[Prompt, ...]
    wanted: tuple[str, ...]
    sampling: Sampling
    choices: Choices | None
    by_token: bool
    pad_id: int
    stop_ids: tuple[int, ...]
    tokenizer: Any

    @property
    def writes(self) -> bool:
        """Some metric needs written answers."""
        return any(metric.kind == "text" for metric in self.metrics)

    def take(
        self, base: Base, rows_K: Sequence[Sequence[int]], *, tick: Callable[[int], None] | None = None
    ) -> list[Marks]:
        """Lane k's marks on `rows_K[k]`, all lanes together; K is 1 for a bare base."""
        rows = [np.array(sorted(rows), dtype=np.int64) for rows in rows_K]
        prompts_K = [[self.prompts[row] for row in rows_k] for rows_k in rows]
        answers = chances = None
        if self.writes:
            answers = generate_lanes(
                base, prompts_K, self.sampling, pad_id=self.pad_id, stop_ids=self.stop_ids, tick=tick
            )
        if self.choices is not None:
            chosen = [[prompt for prompt in prompts if self.choices.right[prompt.row] >= 0] for prompts in prompts_K]
            chances = score_labels(base, chosen, self.choices, pad_id=self.pad_id, tick=None if answers else tick)
        marks = []
        for lane, rows_k in enumerate(rows):
            texts = stopped = label_chances = None
            if answers is not None:
                texts = tuple(
                    self.tokenizer.decode(list(answer.ids), skip_special_tokens=True).strip()
                    for answer in answers[lane]
                )
                stopped = np.array([answer.stopped for answer in answers[lane]], dtype=bool)
            if chances is not None and self.choices is not None:
                label_chances = np.full((len(rows_k), len(self.choices.names)), np.nan)
                place = np.searchsorted(rows_k, chances[lane].rows)
                label_chances[place] = chances[lane].chances(by_token=self.by_token)
            marks.append(Marks(rows_k, texts, stopped, label_chances))
        return marks

    def scores(self, marks: Marks) -> dict[str, float]:
        """Metric → score of these marks."""
        found = {}
        for metric in self.metrics:
            if metric.kind == "text":
                assert marks.answers is not None
                found[metric.name] = metric.of_texts(marks.answers, [self.wanted[row] for row in marks.rows])
            elif metric.kind == "choice":
                assert marks.chances is not None and self.choices is not None
                right = self.choices.right[marks.rows]
                found[metric.name] = metric.of_chances(right[right >= 0], marks.chances[right >= 0])
        return found

    def columns(self, marks: Marks, numbers: NDArray[np.int64]) -> dict[str, Any]:
        """Marks as columns of a table: row, answer, wanted, stopped; label, chance 0, chance 1, …"""
        columns: dict[str, Any] = {"row": numbers[marks.rows]}
        if marks.answers is not None:
            columns |= {"answer": list(marks.answers), "wanted": [self.wanted[row] for row in marks.rows]}
            columns["stopped"] = marks.stopped
        if marks.chances is not None and self.choices is not None:
            columns["label"] = self.choices.right[marks.rows]
            columns |= {f"chance {c}": marks.chances[:, c] for c in range(len(self.choices.names))}
        return columns


def set_exam(evaluate: Evaluate, rows: Rows, tokens: Tokens, tokenizer: Any, data: Data) -> Exam | None:
    """The exam that the recipe's metrics ask for; None where the loss is all. Raises before anything is trained."""
    metrics = find_metrics(evaluate.metrics)
    beyond = [metric for metric in metrics if metric.kind != "loss"]
    if not beyond:
        return None
    refuse_promptless(tokens, beyond[0].name)
    questions = [question(tokens, position) for position in range(len(tokens))]
    prompts = tuple(Prompt(i, int(tokens.numbers[i]), q.prompt) for i, q in enumerate(questions))
    wanted = tuple(_text(tokenizer, q.answer.tolist()) for q in questions)
    longest = longest_answer([len(q.answer) for q in questions], evaluate.max_new_tokens)
    sampling = Sampling(longest, evaluate.temperature, evaluate.top_p, evaluate.seed)
    choices = None
    if any(metric.kind == "choice" for metric in beyond):
        choices = make_choices(rows, tokenizer, data, evaluate.labels)
    return Exam(
        tuple(beyond), prompts, wanted, sampling, choices, evaluate.by_token, tokens.pad_id, tokens.stop_ids, tokenizer
    )


def refuse_undefined(exam: Exam, name: str, folds: Sequence[Fold]) -> None:
    """Refuse to choose among trials by a choice metric that has no value on some fold, whatever a lane answers."""
    metric = next((metric for metric in exam.metrics if metric.name == name and metric.kind == "choice"), None)
    if metric is None or exam.choices is None:
        return
    count = len(exam.choices.names)
    for fold in folds:
        right = exam.choices.right[list(fold.held_out)]
        right = right[right >= 0]
        if math.isnan(metric.of_chances(right, np.full((len(right), count), 1 / count))):
            held = ", ".join(exam.choices.names[label] for label in np.unique(right)) or "no label"
            raise RecipeError(
                f"sweep.metric: {name} has no value on fold {fold.index}, whose {len(fold.held_out)} held-out row(s) "
                f"have {held} only",
                "Set folds.kind: stratified and folds.by, choose fewer folds, or rank by log_loss or accuracy.",
            )


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Ids as text without control tokens and blanks around it."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def few_shot_rows(
    rows: Rows, tokens: Tokens, folds: Sequence[Fold], tokenizer: Any, data: Data, *, shots: int, seed: int
) -> Tokens:
    """All rows encoded with `shots` examples from the training side of the fold that holds them out.

    Where examples make a row longer than rows may be, it gets half as many, and so on down to none.
    """
    home = {row: fold.train for fold in reversed(folds) for row in fold.held_out}

    def encode(counts: Mapping[int, int]) -> Tokens:
        made = [
            with_examples(
                row, [rows.rows[i] for i in pick_examples(home.get(at, ()), counts[at], seed=seed, number=row.number)]
            )
            for at, row in enumerate(rows.rows)
        ]
        return tokenize(replace(rows, rows=tuple(made)), tokenizer, data, cache=None, limit=tokens.max_tokens)

    counts = dict.fromkeys(range(len(rows)), shots)
    shown = encode(counts)
    while (short := np.flatnonzero(shown.targets < tokens.targets)).size and any(counts[int(at)] for at in short):
        counts |= {int(at): counts[int(at)] // 2 for at in short}
        shown = encode(counts)
    return shown


def few_shot_exam(exam: Exam, shown: Tokens) -> Exam:
    """The same exam with prompts that begin with examples (`few_shot_rows`)."""
    ids = [question(shown, position).prompt for position in range(len(shown))]
    prompts = tuple(replace(prompt, ids=longer) for prompt, longer in zip(exam.prompts, ids, strict=True))
    return replace(exam, prompts=prompts)
