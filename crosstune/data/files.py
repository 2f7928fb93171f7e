"""Bytes on disk → records with their line: JSONL, JSON arrays, CSV and Parquet.

A fault of one line (encoding, syntax, cells) is a `Finding` and reading goes on; a file that is something else
altogether raises `DataError`. JSONL, CSV and Parquet are read in bounded memory; a JSON array is read whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from crosstune.data.json_file import read_json_array, read_jsonl
from crosstune.data.lines import BOM, Record
from crosstune.data.table_file import read_csv, read_parquet
from crosstune.errors import DataError, Finding, Place

Kind = Literal["jsonl", "json", "csv", "parquet"]
SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_MAGIC = (
    (b"\x1f\x8b", "gzip-compressed", "Unpack it: gunzip."),
    (b"PK\x03\x04", "a zip archive (or a spreadsheet)", "Unpack it, or save the sheet as CSV."),
    (b"BZh", "bzip2-compressed", "Unpack it: bunzip2."), (b"\xfd7zXZ", "xz-compressed", "Unpack it: unxz."),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed", "Unpack it: unzstd."), (b"\x89PNG", "a PNG image", "Give a file of rows."),
    (b"\xff\xd8\xff", "a JPEG image", "Give a file of rows."), (b"%PDF", "a PDF document", "Give a file of rows."),
    (b"ARROW1", "an Arrow IPC file", "Save it as Parquet, or load it with datasets and pass the Dataset."),
    (b"SQLite format 3", "an SQLite database", "Export the table as CSV."),
    (b"GGUF", "a GGUF model", "Give it as the model, not as the data."),
)  # fmt: skip


def file_kind(path: Path) -> Kind:
    """Told from the first bytes and the name; raises `DataError` for anything that holds no rows."""
    if not path.exists():
        folder = path.parent
        names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
        looked = "" if path.is_absolute() else f" It was looked for from {str(Path.cwd())!r}."
        hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else looked
        raise DataError(f"the data file {str(path)!r} does not exist", f"Check data.path.{hint}")
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)[:5]
        raise DataError(f"{str(path)!r} is a directory, a file is expected",
                        f"Name one file: {', '.join(inside)}." if inside else "Name a JSONL, JSON, CSV or "
                                                                              "Parquet file.")  # fmt: skip
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
    reader = {"jsonl": read_jsonl, "json": read_json_array, "csv": read_csv, "parquet": read_parquet}[kind]
    found = False
    try:
        for item in reader(path):
            found = found or isinstance(item, Record) or item.severity == "error"
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
