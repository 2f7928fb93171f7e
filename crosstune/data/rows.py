"""`Row` and `Turn`: what one data row is once it has been read, whatever file and shape it came in.

Knows nothing of files, templates or tokenizers. Numbers are counted from 1 and never change after reading.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from crosstune.errors import DataError, Finding, Place

Shape = Literal["text", "prompt", "messages"]  # Alpaca and ShareGPT rows become messages
NOTHING: Mapping[str, Any] = {}  # shared, never written to
NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `extra` (tool_calls, name, …) is kept exactly as it was read; `learn` False: never a target."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    learn: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One data row. In a JSONL file `number` is also the line; in a CSV file the header isn't counted."""

    number: int
    shape: Shape
    text: str = ""
    prompt: str = ""
    completion: str = ""
    turns: tuple[Turn, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=lambda: NOTHING)  # every other field: label, group, tools …
    where: Place = NOWHERE


@dataclass(frozen=True)
class Rows:
    """All good rows of a source, in order, with the faults of the others."""

    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    shape: str  # "messages", "prompt", "text": that of most rows
    name: str  # file name, hub id or "data frame"
    fields: Mapping[str, str] = field(default_factory=dict)  # data column → Row field: {"question": "prompt"}

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def hashes(self) -> tuple[bytes, ...]:
        """Content of each row (what is trained on, not the other columns), as 16 bytes."""
        return tuple(content_key(row) for row in self.rows)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over numbers, contents and columns: changes when one character of the data does."""
        digest = hashlib.sha256()
        for row, key in zip(self.rows, self.hashes, strict=True):
            digest.update(row.number.to_bytes(8, "little") + key)
            if row.columns:
                digest.update(json.dumps(row.columns, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        """All columns found, those that hold the content included."""
        names = dict.fromkeys(self.fields)
        for row in self.rows:
            if row.columns:
                names.update(dict.fromkeys(row.columns))
        return tuple(names)

    def column(self, name: str, *, option: str) -> list[Any]:
        """The value of `name` in each row, None where a row lacks it. `option` is named if no row has it."""
        if name not in self.column_names:
            raise unknown_column(name, self.column_names, option=option, source=self.name)
        place = self.fields.get(name, "")
        if place in ("text", "prompt", "completion"):
            return [{"text": row.text, "prompt": row.prompt, "completion": row.completion}[place] for row in self.rows]
        return [row.columns.get(name) for row in self.rows]

    def without(self, numbers: Iterable[int]) -> Rows:
        """The same rows less those with these numbers; the others keep theirs."""
        gone = set(numbers)
        return replace(self, rows=tuple(row for row in self.rows if row.number not in gone))


def unknown_column(name: str, found: Iterable[str], *, option: str, source: str) -> DataError:
    """The error for a column that no row has, with the columns found and the nearest."""
    found = list(found)
    near = difflib.get_close_matches(name, found, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(
        f"{source} has no column {name!r} ({option}); columns found: {', '.join(found) or 'none'}",
        f"Set {option} to one of the columns found.{hint}",
    )


def content_parts(row: Row) -> list[str]:
    """The texts that make up a row's content, each after a word that says what it is."""
    if row.shape == "messages":
        parts = []
        for turn in row.turns:
            parts += [turn.role, turn.content]
            if turn.extra:
                parts.append(json.dumps(turn.extra, sort_keys=True, default=str))
        return parts
    return ["text", row.text] if row.shape == "text" else ["prompt", row.prompt, "completion", row.completion]


def content_key(row: Row) -> bytes:
    """16 bytes that are equal for rows of equal content."""
    return _digest(content_parts(row))


def normal_key(row: Row) -> bytes:
    """16 bytes that are equal for rows which differ only in Unicode form, case and white space."""
    return _digest([normal_text(part) for part in content_parts(row)])


def normal_text(text: str) -> str:
    """NFC, case folded, runs of white space made one blank, ends trimmed."""
    return " ".join(unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold()).split())


def _digest(parts: list[str]) -> bytes:
    joined = "\x1e".join(parts) if not any("\x1e" in part for part in parts) else json.dumps(parts)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).digest()
