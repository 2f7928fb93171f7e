"""CSV, where every cell is text and stays as it is written, and Parquet. Both in bounded memory."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crosstune.data.lines import Lines, Record, bad_encoding
from crosstune.errors import DataError, Finding, Place

NAMELESS = "Unnamed: 0"  # pandas writes a frame's index as a first column without a name, and reads it back under this


def read_csv(path: Path) -> Iterator[Record | Finding]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 131,072 characters
    lines, bad = Lines(path), {}

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
                          'Put cells with quotes, commas or line breaks in quotes, and double the quotes '
                          'inside: "a ""b"" c".',
                          (number,), 1, Place(str(path), before))  # fmt: skip
            continue
        if not cells:
            number -= 1
            continue
        if bad and (line := next((n for n in range(before, reader.line_num + 1) if n in bad), 0)):
            yield bad_encoding(path, line, number, *bad.pop(line))
        elif len(cells) != len(header):
            yield Finding("csv-cells", "error", f"line {before} has {len(cells)} cells, the header {len(header)}",
                          "Put cells that hold a delimiter or a line break in "
                          "quotes.", (number,), 1, Place(str(path), before))  # fmt: skip
        else:
            yield Record(number, before, dict(zip(header, cells, strict=True)))
    yield from lines.notes()


def _csv_header(path: Path, reader: Any) -> list[str]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{path} line 1: {error}", "Mend the header: one name a column.") from None
    names = [name.strip() for name in header]
    if len(names) > 1 and not names[0]:
        names[0] = NAMELESS
    for name in names:
        if names.count(name) > 1 or "\udc80" <= max(name, default="") <= "\udcff":
            what = ("is there twice" if name else "has no name") if names.count(name) > 1 else "is not UTF-8"
            raise DataError(
                f"{path}: in the header, column {name.encode('utf-8', 'replace').decode()!r} {what}",
                "Give each column a name of its own.",
            )
    return names


def _delimiter(path: Path, header: str) -> str:
    """A tab, semicolon or bar where the header has one and no comma."""
    if path.suffix.lower() == ".tsv":
        return "\t"
    return next((mark for mark in "\t;|" if mark in header and "," not in header), ",")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    if first:
        yield first
    yield from rest


def read_parquet(path: Path) -> Iterator[Record | Finding]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with path.open("rb") as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, None, without_nulls(value))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} can't be read after row {number}: {str(error).splitlines()[0]}", "Write the file anew."
        ) from None


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """Arrow gives every object of a column the keys of all others, as nulls: below the top level, nulls are no keys."""
    return {key: _pruned(value) if type(value) in (dict, list) else value for key, value in record.items()}


def _pruned(value: Any) -> Any:
    if type(value) is dict:
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    if type(value) is list:
        return [_pruned(inner) for inner in value]
    return value
