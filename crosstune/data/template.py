"""`ChatTemplate`: turns → text through the tokenizer's Jinja template, and where each assistant turn lies in that text.

A turn is found by rendering what stands before it with an open assistant turn, as inference does; no marks in the
template are needed, and where it has `{% generation %}` marks they are used. What can't be found is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from crosstune.data.rows import Row, Turn
from crosstune.errors import DataError, Finding, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Noncharacters of Unicode: text can't hold them by accident, templates don't trim them, JSON filters leave them alone.
MARK = "\ufdd0{}\ufdd1"
MARKED = re.compile("\ufdd0(\\d+)\ufdd1")
_PROBE = MARK.format(0)
# Templates may write today's date into the system turn (Llama 3.2 does). One date for all, or a run that goes on
# tomorrow would train on other tokens than today. Llama 3.1's own template falls back to this date.
DATE = datetime(2024, 7, 26)
# `strftime_now` can't be passed in (transformers turns functions into text), so a macro stands before the template.
_FIXED_DATE = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(
        f"|replace('{code}', '{DATE.strftime(code)}')"
        for code in ("%d", "%b", "%B", "%m", "%Y", "%y", "%A", "%a", "%H", "%M", "%S")
    )
    + " }}{% endmacro %}{{ '' }}"
)


class RowError(DataError):
    """One row can't be rendered; `code` and `row` say what its finding would."""

    def __init__(self, problem: str, fix: str, code: str, row: int) -> None:
        super().__init__(problem, fix)
        self.args = (problem, fix, code, row)
        self.code, self.row = code, row

    def finding(self) -> Finding:
        """The same as a finding."""
        return Finding(self.code, "error", self.problem, self.fix, (self.row,), 1)


@dataclass(frozen=True, slots=True)
class Region:
    """Characters [start, end) of a rendered conversation that the model is to say itself."""

    start: int
    end: int


class ChatTemplate:
    """A tokenizer's chat template, probed once with invented turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template, and the rows are conversations",
                "Set model.chat_template to a file with one, use the instruct model, or write the rows as "
                "prompt and completion.",
            )
        self.tokenizer = tokenizer
        self.special = special_pattern(tokenizer)
        self.findings: list[Finding] = []
        self.unlike: list[int] = []  # numbers of rows whose turns the template opens otherwise than it writes them
        self.tail = ""  # what the template writes after the last turn although no open turn was asked for
        self._names = dict(tokenizer.special_tokens_map)
        user, answer = Turn("user", "Why?"), Turn("assistant", _PROBE)
        closed, opened = self._probe([user, answer], False), self._probe([user], True)
        self.opens = opened != self._probe([user], False)  # False: add_generation_prompt makes no difference
        after = closed.partition(_PROBE)[2]
        stop = self.special.search(after) if self.special else None
        self.end = stop.group() if stop and not after[: stop.start()].strip() else ""  # "": no token ends a turn
        if not self.opens:
            self._note_fixed_opening(
                closed.partition(_PROBE)[0], opened, after[stop.end() :] if stop and self.end else after
            )
        if not self.end:
            self.findings.append(
                Finding("no-end-of-turn", "warning", "no control token ends an assistant turn in the chat template",
                        "Use a template that ends assistant turns with a stop token: else the model doesn't "
                        "learn to stop.")
            )  # fmt: skip
        self.marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()))
        if "strftime_now" in tokenizer.get_chat_template():
            self.findings.append(
                Finding("template-date", "note", f"the chat template writes the date; {DATE:%d %b %Y} is used "
                                                 "for all rows",
                        "Nothing needs doing; pass date_string in a column chat_template_kwargs for another.")
            )  # fmt: skip

    def render(self, turns: Sequence[Turn], *, opened: bool, settings: Mapping[str, Any] | None = None) -> str:
        """The conversation as text; `opened` asks for the header of the next assistant turn at its end."""
        return self._render(turns, opened, settings or {}, marks=False)[0].removesuffix("" if opened else self.tail)

    def regions(self, row: Row, turns: Sequence[Turn], settings: Mapping[str, Any]) -> tuple[str, list[Region]]:
        """The rendered row (`turns` stand for `row.turns`), and one region for each assistant turn to be learned."""
        learned = [place for place, turn in enumerate(turns) if turn.role == "assistant" and turn.learn]
        if self.marked:
            text, marks = self._render(turns, False, settings, marks=True)
            text = text.removesuffix(self.tail)
            speaking = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
            if len(marks) == len(speaking):
                by_place = dict(zip(speaking, marks, strict=True))
                return text, [self._with_end(text, *by_place[place]) for place in learned]
        text = self.render(turns, opened=False, settings=settings)
        regions: list[Region] = []
        for place in learned:
            region = self._find(row, text, turns, place, settings)
            if region is None or (regions and region.start < regions[-1].end):
                raise RowError(
                    f"row {row.number}: turn {place + 1} can't be found in what the chat template writes",
                    "Use a chat template that writes each turn the same way whatever follows it, or marks "
                    "assistant turns "
                    "with {% generation %}.",
                    "template-not-prefix", row.number,
                )  # fmt: skip
            regions.append(region)
        return text, regions

    # --- one turn --------------------------------------------------------------------------------------------------

    def _find(
        self, row: Row, text: str, turns: Sequence[Turn], place: int, settings: Mapping[str, Any]
    ) -> Region | None:
        turn, last = turns[place], place == len(turns) - 1
        start = self._start(row, text, turns, place, settings)
        if start is None:
            return None
        if self.end and not turn.extra and self.end not in turn.content:
            end = text.find(self.end, start)  # the quick way, right as long as the content can't hold that token
            return Region(start, end + len(self.end)) if end >= 0 else None
        if last:
            return self._trimmed(text, start, len(text))
        upto = self.render(turns[: place + 1], opened=False, settings=settings)
        if not (text.startswith(upto) and len(upto) > start):
            return None
        return self._trimmed(text, start, len(upto))

    def _start(self, row: Row, text: str, turns: Sequence[Turn], place: int, settings: Mapping[str, Any]) -> int | None:
        before = self.render(turns[:place], opened=True, settings=settings) if place else ""
        if place and text.startswith(before) and self.opens:
            return len(before)
        if place and self.opens:
            self.unlike.append(row.number)
        # The template never opens a turn, opens it otherwise than it writes it, or the turn comes first: put a mark in
        # place of the content, and see where it appears.
        mark = MARK.format(10**9)
        probe = [*turns[:place], Turn("assistant", mark, turns[place].extra), *turns[place + 1 :]]
        marked = self.render(probe, opened=False, settings=settings)
        start = marked.find(mark)
        if start < 0 or marked.count(mark) != 1 or not text.startswith(marked[:start]):
            return None
        blank = place and text.startswith(before) and len(before) <= start and not text[len(before) : start].strip()
        return len(before) if blank else start  # a blank after the prompt is the model's to say, a header is not

    def _trimmed(self, text: str, start: int, end: int) -> Region:
        """Without what stands after the last control token, if that is only white space."""
        if self.special is not None:
            for stop in reversed(list(self.special.finditer(text, start, end))):
                if not text[stop.end() : end].strip():
                    return Region(start, stop.end())
                break
        return Region(start, end)

    def _with_end(self, text: str, start: int, end: int) -> Region:
        """Marks of a template may leave the end-of-turn token out: a model that never learns it never stops."""
        if self.end and not text.endswith(self.end, start, end) and text.startswith(self.end, end):
            end += len(self.end)
        return self._trimmed(text, start, end)

    # --- Jinja -----------------------------------------------------------------------------------------------------

    def _probe(self, turns: Sequence[Turn], opened: bool) -> str:
        try:
            return self._render(turns, opened, {}, marks=False)[0]
        except DataError as error:
            raise ModelError(
                f"the chat template of {self.tokenizer.name_or_path!r} can't render a question and its answer: "
                f"{error.problem}",
                "Set model.chat_template to a working template.",
            ) from None

    def _note_fixed_opening(self, head: str, opened: str, rest: str) -> None:
        if rest.strip() and head.endswith(rest):
            self.tail = rest
            self.findings.append(
                Finding("template-always-opens-turn", "warning",
                        "the chat template opens an assistant turn whatever add_generation_prompt says; "
                        f"{rest!r} is cut from each row",
                        "Put {% if add_generation_prompt %} around the last header of the template.")
            )  # fmt: skip
        elif head.removeprefix(opened).strip():  # else a turn needs no header: "[INST] Why? [/INST] Because."
            self.findings.append(
                Finding("template-never-opens-turn", "warning",
                        "the chat template ignores add_generation_prompt: at inference no assistant turn is opened",
                        "Add {% if add_generation_prompt %} and the assistant's header at the end of the template.")
            )  # fmt: skip

    def _dated(self, template: str) -> str:
        return _FIXED_DATE + template if "strftime_now" in template else template

    def _render(
        self, turns: Sequence[Turn], opened: bool, settings: Mapping[str, Any], *, marks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        settings = {**self._names, **settings}
        tools = settings.pop("tools", None)
        try:
            rendered: Any = render_jinja_template(
                conversations=[[{"role": t.role, "content": t.content, **t.extra} for t in turns]],
                tools=tools,
                chat_template=self._dated(self.tokenizer.get_chat_template(tools=tools)),
                add_generation_prompt=opened,
                return_assistant_tokens_mask=marks,
                **settings,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"the chat template refuses it: {error}", "Change the row or the template.") from None
        texts, places = rendered
        return texts[0], list(places[0]) if marks else []


def settings_of(row: Row) -> dict[str, Any]:
    """What a row gives the template besides its turns: columns `tools` and `chat_template_kwargs`, as in TRL."""
    settings: dict[str, Any] = {}
    more, tools = row.columns.get("chat_template_kwargs"), row.columns.get("tools")
    if isinstance(more, Mapping):
        settings.update(more)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            tools = None
    if isinstance(tools, list) and tools and all(isinstance(tool, Mapping) for tool in tools):
        settings["tools"] = tools
    return settings


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Matches the text of any control token of the tokenizer, the longest first."""
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | set(
        tokenizer.all_special_tokens
    )
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed; keys of mappings stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change) for inner in value]
    return value
