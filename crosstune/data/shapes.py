"""One record (a mapping of columns to values) → `Row`, or the findings that say why not.

The shape is told row by row from the columns that hold something; `ShapeReader` counts, so that the file's majority
can be said at the end. Knows nothing of files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from crosstune.data.one_object import refuse_one_object
from crosstune.data.rows import NOTHING, Row, Shape, Turn, unknown_column
from crosstune.data.turns import Fault, kind_of, missing, read_turn, surrogate_path
from crosstune.errors import DataError, Finding, Place
from crosstune.recipe.sections import Data

Record = dict[str, Any]
CONVERSATIONS = ("messages", "conversations", "conversation")
# Other names of a prompt and its completion, tried when the columns of the recipe aren't there.
PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("query", "response"),
    ("instruction", "response"), ("instruction", "completion"), ("input", "output"), ("prompt", "answer"),
)  # fmt: skip
MOST_NUMBERS = 20  # row numbers kept for a finding about many rows
_CACHED_KEYS = 512


def _columns_by_name(found: Sequence[str]) -> str:
    """How the columns would be named, with those that differ from a usual name in capitals only."""
    same = {name.lower(): name for name in found}
    for prompt, completion in PAIRS:
        if prompt in same and completion in same:
            return f"data.prompt={same[prompt]} data.completion={same[completion]}"
    return f"data.text={same['text']}" if "text" in same else "data.text=…, or data.prompt=… and data.completion=…"


class ShapeReader:
    """Reads the records of one source. `parse_strings`: conversations may be JSON text (a CSV cell can't be a list)."""

    def __init__(self, data: Data, name: str, *, parse_strings: bool) -> None:
        self.data, self.name, self.parse_strings = data, name, parse_strings
        self.kinds: Counter[str] = Counter()  # as said: "messages", "sharegpt", "prompt (question → answer)"
        self.shapes: Counter[Shape] = Counter()
        self.numbers: dict[Shape, list[int]] = {}
        self.fields: dict[str, str] = {}
        self._known: dict[tuple[str, ...], tuple[str, ...] | None] = {}
        self._makers: dict[str, Callable[[int, Record, tuple[str, ...], Place], Row]] = {
            "messages": self._conversation, "sharegpt": self._conversation, "alpaca": self._alpaca,
            "prompt": self._pair, "text": self._text,
        }  # fmt: skip

    def read(self, number: int, line: int | None, record: Any, *, suspect: bool = False) -> Row | list[Finding]:
        """`suspect`: the record may hold half of a surrogate pair."""
        where = Place(self.name, line)
        try:
            if type(record) is not dict:
                raise Fault("wrong-type", "", f"the row is {kind_of(record)}, an object is expected",
                            'Write each row as an object such as {"messages": […]}.')  # fmt: skip
            if suspect and (path := surrogate_path(record)) is not None:
                raise Fault("lone-surrogate", path, f"{path or 'a key'} holds half of a surrogate pair, which "
                                                    "is no character",
                            r"Write the whole pair (\ud83e\udd8a) or the character itself, or remove it.")  # fmt: skip
            keys = tuple(record)
            layout = self._known.get(keys)
            if layout is None or record[layout[1]] is None:
                layout = self._layout(record)
                if layout is None:
                    raise Fault("unknown-shape", "", "the row has no known shape; its columns: "
                                                     f"{', '.join(keys) or 'none'}",
                                "Give it messages, prompt and completion, instruction and output, or "
                                "text.")  # fmt: skip
                if len(self._known) < _CACHED_KEYS:
                    self._known[keys] = layout
            row = self._makers[layout[0]](number, record, layout, where)
        except Fault as fault:
            place = Place(self.name, line, field=fault.path)
            return [Finding(fault.code, "error", f"row {number}: {fault.message}", fault.fix, (number,), 1, place)]
        self.kinds[self._kind_said(layout)] += 1
        self.shapes[row.shape] += 1
        numbers = self.numbers.setdefault(row.shape, [])
        if len(numbers) < MOST_NUMBERS:
            numbers.append(number)
        return row

    def check_columns(self, records: Sequence[Any]) -> None:
        """Raise `DataError` when a column that the recipe names, or any shape at all, is in none of these records."""
        found = list(dict.fromkeys(key for record in records if type(record) is dict for key in record))
        if not found:
            return
        data = self.data
        for option, name, shape in (("text", data.text, "text"), ("prompt", data.prompt, "prompt"),
                                    ("completion", data.completion, "prompt")):  # fmt: skip
            asked = data.shape == shape or (data.shape == "auto" and name != option)
            if asked and name not in found:
                raise unknown_column(name, found, option=f"data.{option}", source=self.name)
        if len(records) == 1 and not any(key in CONVERSATIONS for key in found):
            refuse_one_object(self.name, records[0])
        if all(self._layout(record) is None for record in records if type(record) is dict):
            shape = "no known shape" if data.shape == "auto" else f"no row of shape {data.shape}"
            raise DataError(
                f"{self.name}: {shape}; columns found: {', '.join(found)}",
                f"Name the columns ({_columns_by_name(found)}), or use one of the shapes "
                "messages, conversations (ShareGPT), instruction and output (Alpaca), prompt and completion, text.",
            )

    def finish(self) -> Iterator[Finding]:
        """What the source was told to be, and the rows that are of another shape than most."""
        if not self.shapes:
            return
        said = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        yield Finding("shape", "note", f"{self.name}: shape told from the columns: {said}",
                      "If that is wrong, set data.shape.", (), self.shapes.total(), Place(self.name))  # fmt: skip
        (most, majority), *others = self.shapes.most_common()
        for shape, count in others:
            numbers = tuple(self.numbers[shape])
            yield Finding("other-shape", "warning",
                          f"{count} row(s) of shape {shape} in a file of {majority} rows of shape {most}: "
                          f"first {numbers[0]}",
                          "Check that these rows belong here; they are read as what they are.",
                          numbers, count, Place(self.name))  # fmt: skip

    @property
    def shape(self) -> str:
        """Shape of most rows read so far; "" before any."""
        return self.shapes.most_common(1)[0][0] if self.shapes else ""

    # --- which columns hold what: (kind, main column, …) -----------------------------------------------------------

    def _layout(self, record: Record) -> tuple[str, ...] | None:
        filled = {key for key, value in record.items() if value is not None}
        return self._told(filled) or self._told(set(record)) or self._half(set(record))

    def _told(self, has: set[str]) -> tuple[str, ...] | None:
        data = self.data
        if data.shape == "auto":
            if data.text != "text" and data.text in has:
                return ("text", data.text)
            if (data.prompt, data.completion) != ("prompt", "completion") and {data.prompt, data.completion} <= has:
                return ("prompt", data.prompt, data.completion)
        if data.shape in ("auto", "messages", "sharegpt"):
            for name in CONVERSATIONS:
                if name in has:
                    return ("messages" if name == "messages" else "sharegpt", name)
        if data.shape in ("auto", "alpaca") and {"instruction", "output"} <= has:
            return ("alpaca", "output", "instruction")
        if data.shape in ("auto", "prompt") and {data.prompt, data.completion} <= has:
            return ("prompt", data.prompt, data.completion)
        if data.shape in ("auto", "text") and data.text in has:
            return ("text", data.text)
        if data.shape == "auto":
            for prompt, completion in PAIRS:
                if prompt in has and completion in has:
                    return ("prompt", prompt, completion)
        return None

    def _half(self, has: set[str]) -> tuple[str, ...] | None:
        """A row that lacks one of its two columns is told by the other; its maker says what is missing."""
        data = self.data
        if data.shape in ("auto", "prompt"):
            for name in (data.prompt, data.completion):
                if name in has:
                    return ("prompt", name)
        if data.shape in ("auto", "alpaca"):
            for name in ("instruction", "output"):
                if name in has:
                    return ("alpaca", name)
        return None

    def _kind_said(self, layout: tuple[str, ...]) -> str:
        if layout[0] in ("prompt", "text") and layout[1:] not in (("prompt", "completion"), ("text",)):
            return f"{layout[0]} ({' → '.join(layout[1:])})"
        return layout[0]

    # --- one maker a kind ------------------------------------------------------------------------------------------

    def _conversation(self, number: int, record: Record, layout: tuple[str, ...], where: Place) -> Row:
        name = layout[1]
        turns = self._turns(record[name], name)
        taken = {name}
        system = record.get("system")
        if layout[0] == "sharegpt" and type(system) is str:  # ShareGPT files may hold the system text in its own column
            taken.add("system")
            if system.strip() and not (turns and turns[0].role == "system"):
                turns = (Turn("system", system), *turns)
        self.fields[name] = "turns"
        return Row(number, "messages", turns=turns, columns=_rest(record, taken), where=where)

    def _alpaca(self, number: int, record: Record, layout: tuple[str, ...], where: Place) -> Row:
        instruction, output = self._string(record, "instruction"), self._string(record, "output")
        more = self._string(record, "input") if record.get("input") is not None else ""
        turns: list[Turn] = []
        if record.get("system") is not None and (system := self._string(record, "system")).strip():
            turns.append(Turn("system", system))
        for place, pair in enumerate(record.get("history") or ()):
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(type(text) is str for text in pair)):
                raise Fault("wrong-type", f"history[{place}]", f"history[{place}] is {kind_of(pair)}, a pair "
                                                               "of texts is expected",
                            'Write the history as [["question", "answer"], …].')  # fmt: skip
            turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
        turns += [Turn("user", f"{instruction}\n{more}" if more.strip() else instruction), Turn("assistant", output)]
        taken = {"instruction", "input", "output", "system", "history"}
        self.fields.update({"instruction": "turns", "output": "turns"})
        return Row(number, "messages", turns=tuple(turns), columns=_rest(record, taken), where=where)

    def _pair(self, number: int, record: Record, layout: tuple[str, ...], where: Place) -> Row:
        if len(layout) == 2:
            lacking = self.data.completion if layout[1] == self.data.prompt else self.data.prompt
            raise missing(lacking)
        _, prompt, completion = layout
        columns = _rest(record, {prompt, completion})
        if isinstance(record[prompt], list) and isinstance(record[completion], list):
            before = [Turn(t.role, t.content, t.extra, learn=False) for t in self._turns(record[prompt], prompt)]
            turns = (*before, *self._turns(record[completion], completion))
            self.fields.update({prompt: "turns", completion: "turns"})
            return Row(number, "messages", turns=turns, columns=columns, where=where)
        asked, answer = self._string(record, prompt), self._string(record, completion)
        if prompt not in self.fields:
            self.fields.update({prompt: "prompt", completion: "completion"})
        return Row(number, "prompt", prompt=asked, completion=answer, columns=columns, where=where)

    def _text(self, number: int, record: Record, layout: tuple[str, ...], where: Place) -> Row:
        text = self._string(record, layout[1])
        self.fields.setdefault(layout[1], "text")
        return Row(number, "text", text=text, columns=_rest(record, {layout[1]}), where=where)

    # --- values ----------------------------------------------------------------------------------------------------

    def _string(self, record: Record, name: str) -> str:
        value = record.get(name)
        if type(value) is str:
            return value
        if value is None:
            raise missing(name)
        raise Fault("wrong-type", name, f"{name} is {kind_of(value)}, text is expected", "Write it as text, in quotes.")

    def _turns(self, value: Any, path: str) -> tuple[Turn, ...]:
        if type(value) is str and self.parse_strings:
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise Fault("wrong-type", path, f"{path} is text that isn't JSON, a list of messages is expected",
                            'Write it as [{"role": "user", "content": "…"}, …].') from None  # fmt: skip
        if not isinstance(value, list | tuple):
            fix = f"Remove the quotes around the list: {path} is JSON inside JSON." if type(value) is str else (
                'Write it as [{"role": "user", "content": "…"}, …].')  # fmt: skip
            raise Fault("wrong-type", path, f"{path} is {kind_of(value)}, a list of messages is expected", fix)
        return tuple([read_turn(message, path, place) for place, message in enumerate(value)])


def _rest(record: Record, taken: set[str]) -> Mapping[str, Any]:
    if len(record) <= len(taken) and record.keys() <= taken:
        return NOTHING
    return {key: value for key, value in record.items() if key not in taken} or NOTHING
