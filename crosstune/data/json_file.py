"""JSONL, line by line in bounded memory, and JSON arrays, which are read whole. Each bad line is a finding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstune.data.lines import BOM, Lines, Record, bad_encoding
from crosstune.errors import Finding, Place

_SPACE = re.compile(r"[ \t\n\r]*")
_MOST_DIGITS = "Integers of more than 4,300 digits are refused; write the number as text."


def _bad_json(
    path: Path, line: int, row: int, column: int, what: str, fix: str = "Mend the JSON at that place."
) -> Finding:
    return Finding(
        "json-syntax", "error", f"line {line} column {column}: {what}", fix, (row,), 1, Place(str(path), line, column)
    )


def _decode_json(decoder: json.JSONDecoder, text: str) -> tuple[Any, tuple[int, str, str] | None]:
    """The value, or where and what is wrong and its fix."""
    try:
        return decoder.decode(text), None
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text[error.pos :].strip() == ",":
            return None, (error.pos, "a comma after the object", "Remove the comma: in JSONL each line is one object.")
        return None, (error.pos, error.msg, "Mend the JSON at that place.")
    except RecursionError:
        return None, (0, "the JSON is nested too deeply", "Flatten the row.")
    except ValueError:  # int() refuses more than 4,300 digits
        return None, (0, "an integer is too long", _MOST_DIGITS)


def read_jsonl(path: Path) -> Iterator[Record | Finding]:
    decoder, lines = json.JSONDecoder(), Lines(path)
    held: Finding | None = (
        None  # the first line, when it is not a whole object: the second line decides what that means
    )
    first = True
    for number, start, raw in lines:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            first = False
            yield bad_encoding(path, number, number, start, error)
            continue
        value, problem = _decode_json(decoder, text)
        if problem is not None:
            if not text.strip():
                continue
            if held is not None:
                yield _pretty_printed(path, held)
                return
            at, what, fix = problem
            finding = _bad_json(path, number, number, at + 1, what, fix)
            if first and at >= len(text.rstrip()):
                held = finding
            else:
                yield finding
        else:
            if held is not None:
                if type(value) is not dict:
                    yield _pretty_printed(path, held)
                    return
                yield held
                held = None
            yield Record(number, number, value, "\\ud" in text or "\\uD" in text)
        first = False
    if held is not None:
        yield held
    yield from lines.notes()


def _pretty_printed(path: Path, first: Finding) -> Finding:
    return Finding("json-syntax", "error",
                   f"line {first.where.line} is not a complete object: the file looks pretty-printed, and one "
                   "object per line is expected",
                   "Write one object a line (jq -c . FILE), or a JSON array in square brackets.",
                   first.rows, 1, first.where)  # fmt: skip


def read_json_array(path: Path) -> Iterator[Record | Finding]:
    raw = path.read_bytes()
    start = 3 if raw.startswith(BOM) else 0
    try:
        text = raw[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        yield bad_encoding(path, raw.count(b"\n", 0, start + error.start) + 1, 1, start, error)
        return
    del raw
    decoder = json.JSONDecoder()
    suspect = "\\ud" in text or "\\uD" in text
    line, counted, number = 1, 0, 0

    def place(position: int) -> tuple[int, int]:
        return line + text.count("\n", counted, position), position - text.rfind("\n", 0, position)

    position = _after_space(text, _after_space(text, 0) + 1)
    while True:
        if text[position : position + 1] == "]":
            rest = _after_space(text, position + 1)
            if rest < len(text):
                yield _bad_json(path, *_swap(place(rest), number), "text after the end of the array", "Remove it.")
            return
        number += 1
        line, counted = place(position)[0], position
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield _bad_json(path, *_swap(place(error.pos), number), error.msg)
            return
        except RecursionError:
            yield _bad_json(path, line, number, 1, "the JSON is nested too deeply", "Flatten the row.")
            return
        except ValueError:
            yield _bad_json(path, line, number, 1, "an integer is too long", _MOST_DIGITS)
            return
        yield Record(number, line, value, suspect)
        position = _after_space(text, position)
        if text[position : position + 1] == ",":
            comma = position
            position = _after_space(text, position + 1)
            if text[position : position + 1] == "]":
                yield _bad_json(path, *_swap(place(comma), number), "a comma before the closing bracket", "Remove it.")
                return
        elif text[position : position + 1] != "]":
            yield _bad_json(path, *_swap(place(position), number), "a comma or the closing bracket is expected")
            return


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _swap(place: tuple[int, int], row: int) -> tuple[int, int, int]:
    return place[0], max(row, 1), place[1]
