"""`ChatTemplate`: turns → text through the tokenizer's Jinja template, and where each assistant turn lies in that text.

A turn is found by rendering what stands before it with an open assistant turn, as inference does; no marks in the
template are needed, and where it has `{% generation %}` marks they are used. What can't be found is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from crosstune.data.control import MARK, MARKED, special_pattern
from crosstune.data.rows import Row, Turn
from crosstune.data.turn_ends import TurnEnds, last_special, read_ends
from crosstune.errors import DataError, Finding, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBE = [Turn("assistant" if i % 2 else "user", MARK.format(i)) for i in range(4)]
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
        self._names = dict(tokenizer.special_tokens_map)
        self._as_parts = False  # models that see pictures take a content as a list of parts
        self._as_parts = self._wants_parts()
        closed, opened = self._probe(_PROBE[:1], False), self._probe(_PROBE[:1], True)
        self.opens = closed != opened  # False: add_generation_prompt makes no difference
        self.ends = self._read_ends()
        self.tail = self.ends.tail
        self.end = last_special(self.ends.last or self.ends.mid, self.special)  # "": no control token ends a turn
        self._note_opening(opened)
        if not self.ends.last:
            self.findings.append(
                Finding("no-end-of-turn", "warning",
                        "the chat template ends the last assistant turn with no control token",
                        "Use a template that ends assistant turns with a stop token: else the model doesn't learn to "
                        "stop.")
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
        """From where inference opens the turn (or its content begins) to the text that closes it."""
        turn, last = turns[place], place == len(turns) - 1
        before = self.render(turns[:place], opened=True, settings=settings) if place else ""
        start = len(before) if before and text.startswith(before) and (self.opens or self.tail) else None
        content_end = _end_of_content(text, start, turn.content)
        if start is None or content_end is None:
            if place and start is None and self.opens:
                self.unlike.append(row.number)
            content, content_end = self._content(text, turns, place, settings)
            if start is None and content is not None:
                # A blank after the prompt is the model's to say ("[/INST] yes"), a header is not.
                blank = before and text.startswith(before) and not text[len(before) : content].strip()
                start = len(before) if blank and len(before) <= content else content
        if start is None:
            return None
        if content_end is not None and content_end >= start:
            closing = self.ends.last if last else self.ends.mid
            at = content_end + len(text[content_end:]) - len(text[content_end:].lstrip())
            for place_of_end in (content_end, at):
                if closing and text.startswith(closing, place_of_end):
                    return Region(start, place_of_end + len(closing))
        if last:
            return self._trimmed(text, start, len(text))
        upto = self.render(turns[: place + 1], opened=False, settings=settings)
        if text.startswith(upto) and len(upto) > start:
            return self._trimmed(text, start, len(upto))
        bare = not self.ends.mid and not turn.extra and content_end is not None and content_end > start
        return Region(start, content_end) if bare and content_end else None

    def _content(
        self, text: str, turns: Sequence[Turn], place: int, settings: Mapping[str, Any]
    ) -> tuple[int | None, int | None]:
        """Where the content of a turn begins and ends: put a mark in its place, and see what stands around it."""
        mark = MARK.format(10**9)
        probe = [*turns[:place], Turn("assistant", mark, turns[place].extra), *turns[place + 1 :]]
        head, found, rest = self.render(probe, opened=False, settings=settings).partition(mark)
        if not found or mark in rest:
            return None, None
        start = len(head) if text.startswith(head) else None
        end = len(text) - len(rest) if text.endswith(rest) else None
        return start, end

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
        for closing in (self.ends.last, self.ends.mid):
            if closing and text.startswith(closing, end):
                end += len(closing)
                break
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

    def _wants_parts(self) -> bool:
        """Whether a text must be given as a list of parts; raises `ModelError` if the template writes it in no form."""
        try:
            if _PROBE[1].content in self._render(_PROBE[:2], False, {}, marks=False)[0]:
                return False
        except DataError:
            pass
        self._as_parts = True
        try:
            if _PROBE[1].content in self._render(_PROBE[:2], False, {}, marks=False)[0]:
                return True
        except DataError:
            pass
        self._as_parts = False
        if _PROBE[1].content in self._probe(_PROBE[:2], False):
            return False
        raise ModelError(
            f"the chat template of {self.tokenizer.name_or_path!r} leaves the assistant's answer out",
            "Set model.chat_template to a template that writes each message's content.",
        )

    def _read_ends(self) -> TurnEnds:
        """Two turns rendered with marks for contents, and cut at the marks."""
        turns = _PROBE
        try:
            text = self._render(turns, False, {}, marks=False)[0]
        except DataError:  # a template for one turn only
            turns = _PROBE[:2]
            text = self._probe(turns, False)
        parts = MARKED.split(text)[::2]
        if len(parts) != len(turns) + 1:
            return TurnEnds()
        if len(turns) == 2:
            parts += parts[1:]
        before, question, mid, question_2, last = parts
        return read_ends(
            (before, question, mid, question_2, last), self.special, opens=self.opens, eos=str(self.tokenizer.eos_token)
        )

    def _note_opening(self, opened: str) -> None:
        if self.opens:
            return
        if self.tail:
            self.findings.append(
                Finding("template-always-opens-turn", "warning",
                        "the chat template opens an assistant turn whatever add_generation_prompt says; "
                        f"{self.tail!r} is cut from each row",
                        "Put {% if add_generation_prompt %} around the last header of the template.")
            )  # fmt: skip
            return
        closed = self._probe(_PROBE[:2], False)
        if closed.partition(_PROBE[1].content)[0].removeprefix(opened).strip():
            # else a turn needs no header: "[INST] Why? [/INST] Because."
            self.findings.append(
                Finding("template-never-opens-turn", "warning",
                        "the chat template ignores add_generation_prompt: at inference no assistant turn is opened",
                        "Add {% if add_generation_prompt %} and the assistant's header at the end of the template.")
            )  # fmt: skip

    def _given(self, content: str) -> Any:
        return [{"type": "text", "text": content}] if self._as_parts else content

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
                conversations=[[{"role": t.role, "content": self._given(t.content), **t.extra} for t in turns]],
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


def _end_of_content(text: str, start: int | None, content: str) -> int | None:
    """Where the content ends if it begins at `start`, as it is or trimmed; None if it doesn't, or is empty."""
    if start is not None:
        for body in (content, content.strip()):
            if body and text.startswith(body, start):
                return start + len(body)
    return None


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
