"""Bytes on disk → records with their line: JSONL, JSON arrays, CSV and Parquet.

A fault of one line (encoding, syntax, cells) is a `Finding` and reading goes on; a file that is something else altogether
raises `DataError`. JSONL, CSV and Parquet are read in bounded memory; a JSON array is read whole.
"""

from __future__ import annotations

import csv
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from crosstune.errors import DataError, Finding, Place

Kind = Literal["jsonl", "json", "csv", "parquet"]
SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
BOM = b"\xef\xbb\xbf"
_MAGIC = (
    (b"\x1f\x8b", "gzip-compressed", "Unpack it: gunzip."), (b"PK\x03\x04", "a zip archive (or a spreadsheet)", "Unpack it, or save the sheet as CSV."),
    (b"BZh", "bzip2-compressed", "Unpack it: bunzip2."), (b"\xfd7zXZ", "xz-compressed", "Unpack it: unxz."),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "Unpack it: unzstd."), (b"\x89PNG", "a PNG image", "Give a file of rows."),
    (b"\xff\xd8\xff", "a JPEG image", "Give a file of rows."), (b"%PDF", "a PDF document", "Give a file of rows."),
    (b"ARROW1", "an Arrow IPC file", "Save it as Parquet, or load it with datasets and pass the Dataset."),
    (b"SQLite format 3", "an SQLite database", "Export the table as CSV."), (b"GGUF", "a GGUF model", "Give it as the model, not as the data."),
)  # fmt: skip
_SPACE = re.compile(r"[ \t\n\r]*")
_MOST_DIGITS = "Integers of more than 4,300 digits are refused; write the number as text."


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a file. `suspect`: it may hold half of a surrogate pair."""

    number: int
    line: int | None
    value: Any
    suspect: bool = False


def file_kind(path: Path) -> Kind:
    """Told from the first bytes and the name; raises `DataError` for anything that holds no rows."""
    if not path.exists():
        folder = path.parent
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
        hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise DataError(f"the data file {str(path)!r} does not exist", f"Check data.path.{hint}")
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)[:5]
        raise DataError(f"{str(path)!r} is a directory, a file is expected",
                        f"Name one file: {', '.join(inside)}." if inside else "Name a JSONL, JSON, CSV or Parquet file.")  # fmt: skip
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}", "Check the file and its permissions.") from None
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, what, fix in _MAGIC:
        if head.startswith(magic):
            raise DataError(f"{path} is {what}, not rows", fix)
    if (wide := _wide_encoding(head)) is not None:
        raise DataError(f"{path} is encoded as {wide}; UTF-8 is expected", f"Convert it: iconv -f {wide} -t UTF-8.")
    if b"\0" in head:
        raise DataError(
            f"{path} is a binary file (byte {head.index(0)} is zero), not rows",
            "Name a JSONL, JSON, CSV or Parquet file.",
        )
    kind = SUFFIXES.get(path.suffix.lower())
    if kind == "parquet" and head:
        raise DataError(f"{path} is no Parquet file: it doesn't begin with 'PAR1'", "Save it anew, or mend its name.")
    start = head.removeprefix(BOM).lstrip()[:1]
    if kind is None and start not in (b"{", b"["):
        known = ", ".join(SUFFIXES)
        raise DataError(
            f"{path}: rows can't be told from its name or its first bytes", f"Name it by its kind: {known}."
        )
    return "json" if kind in (None, "jsonl") and start == b"[" else kind or "jsonl"


def read_records(path: Path, kind: Kind) -> Iterator[Record | Finding]:
    """Every record of a file and every fault, in order."""
    reader = {"jsonl": _jsonl, "json": _json_array, "csv": _csv, "parquet": _parquet}[kind]
    found = False
    try:
        for item in reader(path):
            found = True
            yield item
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}", "Check the file and its disk.") from None
    if not found:
        yield Finding(
            "empty-file", "error", f"{path} holds no rows", "Give a file with at least one row.", where=Place(str(path))
        )


def _wide_encoding(head: bytes) -> str | None:
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    text = head[: len(head) // 2 * 2]
    for name, zeros, letters in (("UTF-16LE", text[1::2], text[0::2]), ("UTF-16BE", text[0::2], text[1::2])):
        if len(text) >= 8 and zeros.count(0) > 0.9 * len(zeros) and letters.count(0) < 0.1 * len(letters):
            return name
    return None


@dataclass
class _Lines:
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
            yield Finding("crlf", "note", f"{self.path} has Windows line ends ({self.crlf} lines); they are read as plain ones",
                          "Nothing needs doing.", count=self.crlf, where=where)  # fmt: skip


def _bad_encoding(path: Path, line: int, row: int, start: int, error: UnicodeDecodeError) -> Finding:
    byte = start + error.start
    return Finding("encoding", "error", f"byte 0x{error.object[error.start]:02x} at offset {byte} (line {line}) is not UTF-8",
                   "Save the file as UTF-8: iconv -f WINDOWS-1252 -t UTF-8, for one.", (row,), 1,
                   Place(str(path), line, byte=byte))  # fmt: skip


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


def _jsonl(path: Path) -> Iterator[Record | Finding]:
    decoder, lines = json.JSONDecoder(), _Lines(path)
    held: Finding | None = (
        None  # the first line, when it is not a whole object: the second line decides what that means
    )
    first = True
    for number, start, raw in lines:
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            first = False
            yield _bad_encoding(path, number, number, start, error)
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
                   f"line {first.where.line} is not a complete object: the file looks pretty-printed, and one object per line is expected",
                   "Write one object a line (jq -c . FILE), or a JSON array in square brackets.",
                   first.rows, 1, first.where)  # fmt: skip


def _json_array(path: Path) -> Iterator[Record | Finding]:
    raw = path.read_bytes()
    start = 3 if raw.startswith(BOM) else 0
    try:
        text = raw[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        yield _bad_encoding(path, raw.count(b"\n", 0, start + error.start) + 1, 1, start, error)
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


def _csv(path: Path) -> Iterator[Record | Finding]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 131,072 characters
    lines, bad = _Lines(path), {}

    def decoded() -> Iterator[str]:
        for number, start, raw in lines:
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                bad[number] = (start, error)
                text = raw.decode("utf-8", "surrogateescape")
            yield text.replace("\r\n", "\n")

    source = decoded()
    header_line = next(source, "")
    reader = csv.reader(_chain(header_line, source), delimiter=_delimiter(path, header_line), strict=True)
    header = _csv_header(path, reader)
    number = 0
    while True:
        before = reader.line_num + 1
        number += 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield Finding("csv-syntax", "error", f"line {before}: {error}",
                          'Put cells with quotes, commas or line breaks in quotes, and double the quotes inside: "a ""b"" c".',
                          (number,), 1, Place(str(path), before))  # fmt: skip
            continue
        if not cells:
            number -= 1
            continue
        if bad and (line := next((n for n in range(before, reader.line_num + 1) if n in bad), 0)):
            yield _bad_encoding(path, line, number, *bad.pop(line))
        elif len(cells) != len(header):
            yield Finding("csv-cells", "error", f"line {before} has {len(cells)} cells, the header {len(header)}",
                          "Put cells that hold a delimiter or a line break in quotes.", (number,), 1, Place(str(path), before))  # fmt: skip
        else:
            yield Record(number, before, dict(zip(header, cells, strict=True)))
    yield from lines.notes()


def _csv_header(path: Path, reader: Any) -> list[str]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{path} line 1: {error}", "Mend the header: one name a column.") from None
    names = [name.strip() for name in header]
    for name in names:
        if (
            names.count(name) > 1
            or (not name and names[0] == name != names[-1])
            or "\udc80" <= max(name, default="") <= "\udcff"
        ):
            what = "is there twice" if name else "has no name"
            what = what if names.count(name) > 1 or not name else "is not UTF-8"
            raise DataError(
                f"{path}: in the header, column {name.encode('utf-8', 'replace').decode()!r} {what}",
                "Give each column a name of its own.",
            )
    return names


def _delimiter(path: Path, header: str) -> str:
    """A tab or semicolon where the header has one and no comma."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    return next((mark for mark in "\t;" if mark in header and "," not in header), ",")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from rest


def _parquet(path: Path) -> Iterator[Record | Finding]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with _opened(path) as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, None, without_nulls(value))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} can't be read after row {number}: {str(error).splitlines()[0]}", "Write the file anew."
        ) from None


def _opened(path: Path) -> IO[bytes]:
    return path.open("rb")


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives every object of a column the keys of all others, as nulls: below the top level, nulls are no keys."""
    return {key: _pruned(value) if type(value) in (dict, list) else value for key, value in record.items()}


def _pruned(value: Any) -> Any:
    if type(value) is dict:
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    if type(value) is list:
        return [_pruned(inner) for inner in value]
    return value
