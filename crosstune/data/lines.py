"""The lines of a file, with number and byte offset, and `Record`: one object that was read from some of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.errors import Finding, Place

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a file. `suspect`: it may hold half of a surrogate pair."""

    number: int
    line: int | None
    value: Any
    suspect: bool = False


@dataclass
class Lines:
    """The lines of a file with their number and byte offset; remembers a BOM and Windows line ends."""

    path: Path
    bom: bool = False
    crlf: int = 0

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                start = offset
                offset += len(raw)
                if number == 1 and raw.startswith(BOM):
                    self.bom, raw, start = True, raw[3:], 3
                if raw.endswith(b"\r\n"):
                    self.crlf += 1
                yield number, start, raw

    def notes(self) -> Iterator[Finding]:
        where = Place(str(self.path))
        if self.bom:
            yield Finding("bom", "note", f"{self.path} begins with a byte order mark; it is left out",
                          "Save the file as UTF-8 without BOM.", where=where)  # fmt: skip
        if self.crlf:
            yield Finding("crlf", "note", f"{self.path} has Windows line ends ({self.crlf} lines); they are "
                                          "read as plain ones",
                          "Nothing needs doing.", count=self.crlf, where=where)  # fmt: skip


def bad_encoding(path: Path, line: int, row: int, start: int, error: UnicodeDecodeError) -> Finding:
    byte = start + error.start
    return Finding("encoding", "error", f"byte 0x{error.object[error.start]:02x} at offset {byte} (line "
                                        f"{line}) is not UTF-8",
                   "Save the file as UTF-8: iconv -f WINDOWS-1252 -t UTF-8, for one.", (row,), 1,
                   Place(str(path), line, byte=byte))  # fmt: skip
