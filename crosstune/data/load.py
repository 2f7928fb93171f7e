"""Rows in: JSONL, JSON, CSV and Parquet files, data frames, Hugging Face data sets, hub ids → `Row` or `Finding`.

Only faults that reading must notice are found here (encoding, syntax, types, roles); what a row says is for lint.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from crosstune.data.files import SUFFIXES, file_kind, read_records
from crosstune.data.lines import Record
from crosstune.data.rows import Row, Rows, Shape, Turn, content_key, normal_key, normal_text
from crosstune.data.shapes import ShapeReader
from crosstune.data.table_file import without_nulls
from crosstune.data.turns import ROLES
from crosstune.errors import DataError, Finding, MissingExtra, Place
from crosstune.recipe.sections import Data

__all__ = [
    "ROLES",
    "Row",
    "Rows",
    "Shape",
    "Turn",
    "content_key",
    "leave_out",
    "load_rows",
    "normal_key",
    "normal_text",
    "read_rows",
]
_LOOK_AHEAD = 100  # records that decide whether the recipe's columns are there at all
_MOST_FINDINGS = 1000  # findings of one code that are kept one by one


def read_rows(source: Any, data: Data) -> Iterator[Row | Finding]:
    """Yield each good row and each fault, in file order, in bounded memory for JSONL, CSV and Parquet.

    `source`: path, hub id, `pandas.DataFrame`, `datasets.Dataset` or an iterable of mappings. Raises `DataError` where
    there are no rows to speak of: no such file, a directory, a picture, a column that the recipe names and no row has.
    """
    items, shapes = _open(source, data)
    yield from _read(items, shapes)


def load_rows(source: Any, data: Data) -> Rows:
    """All rows of a path, hub id, `pandas.DataFrame`, `datasets.Dataset` or iterable of mappings.

    With `data.skip_bad_rows` the rows with errors are left out and listed as warnings.
    """
    items, shapes = _open(source, data)
    rows: list[Row] = []
    findings: list[Finding] = []
    for item in _read(items, shapes):
        if type(item) is Row:
            rows.append(item)
        elif isinstance(item, Finding):
            findings.append(item)
    if data.skip_bad_rows:
        findings, _ = leave_out(findings)
    return Rows(tuple(rows), tuple(_capped(findings)), shapes.shape, shapes.name, dict(shapes.fields))


def leave_out(findings: Iterable[Finding]) -> tuple[list[Finding], set[int]]:
    """Errors that name rows become warnings that say those rows are left out; with the numbers of these rows."""
    said, numbers = [], set[int]()
    for finding in findings:
        if finding.severity == "error" and finding.rows:
            numbers.update(finding.rows)
            finding = replace(finding, severity="warning", message=f"{finding.message}; left out (data.skip_bad_rows)")
        said.append(finding)
    return said, numbers


def _open(source: Any, data: Data) -> tuple[Iterator[Record | Finding], ShapeReader]:
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.exists() and _is_hub_id(str(source)):
            return _from_dataset(_hub_dataset(str(source), data.split)), ShapeReader(
                data, str(source), parse_strings=True
            )
        kind = file_kind(path)
        return read_records(path, kind), ShapeReader(data, str(source), parse_strings=kind in ("csv", "parquet"))
    package = type(source).__module__.partition(".")[0]
    if package == "pandas" and isinstance(source, sys.modules["pandas"].DataFrame):
        return _from_frame(source), ShapeReader(data, "data frame", parse_strings=True)
    if package == "datasets":
        datasets = sys.modules["datasets"]
        if isinstance(source, datasets.DatasetDict | datasets.IterableDatasetDict):
            if data.split not in source:
                raise DataError(
                    f"the data set has no split {data.split!r}; splits: {', '.join(source)}", "Set data.split."
                )
            source = source[data.split]
        if isinstance(source, datasets.Dataset | datasets.IterableDataset):
            return _from_dataset(source), ShapeReader(data, "data set", parse_strings=True)
    if isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
        return _from_mappings(source), ShapeReader(data, "rows", parse_strings=False)
    raise DataError(f"rows can't be read from a {type(source).__name__}",
                    "Give a path, a hub id, a pandas DataFrame, a datasets.Dataset or a list of mappings.")  # fmt: skip


def _read(items: Iterator[Record | Finding], shapes: ShapeReader) -> Iterator[Row | Finding]:
    items = iter(items)
    ahead = list(islice(items, _LOOK_AHEAD))
    shapes.check_columns([item.value for item in ahead if type(item) is Record])
    for item in chain(ahead, items):
        if type(item) is not Record:
            yield item  # type: ignore[misc]  # the only other kind is Finding
            continue
        row = shapes.read(item.number, item.line, item.value, suspect=item.suspect)
        if type(row) is Row:
            yield row
        else:
            yield from row  # type: ignore[misc]
    yield from shapes.finish()


def _capped(findings: list[Finding]) -> Iterator[Finding]:
    """The first 1,000 findings of a code one by one, the rest as one."""
    seen: dict[str, int] = {}
    more: dict[str, list[Finding]] = {}
    for finding in findings:
        seen[finding.code] = seen.get(finding.code, 0) + 1
        if seen[finding.code] <= _MOST_FINDINGS:
            yield finding
        else:
            more.setdefault(finding.code, []).append(finding)
    for code, rest in more.items():
        rows = tuple(number for finding in rest for number in finding.rows)
        yield Finding(code, rest[0].severity, f"{len(rest)} more of this kind, first: {rest[0].message}", rest[0].fix,
                      rows, sum(max(f.count, 1) for f in rest), Place(rest[0].where.file))  # fmt: skip


def _is_hub_id(name: str) -> bool:
    """owner/name, unless that is a file that isn't there: asking the hub for a misspelt path takes half a minute."""
    owner = name.partition("/")[0]
    named_as_file = Path(name).suffix.lower() in {*SUFFIXES, ".gz", ".zip", ".txt"}
    return bool(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name)) and not named_as_file and not Path(owner).exists()


def _hub_dataset(name: str, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "hub") from None
    try:
        return datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{name!r} is no file here, and the hub doesn't give it as a data set: {str(error).splitlines()[0]}",
            "Check data.path and data.split, the network, and for private data sets HF_TOKEN.",
        ) from None


def _from_dataset(dataset: Any) -> Iterator[Record | Finding]:
    number = 0
    for batch in dataset.with_format(None).iter(batch_size=1000):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield Record(number, None, without_nulls(dict(zip(names, values, strict=True))), suspect=True)
    if not number:
        yield _empty("data set")


def _from_frame(frame: Any) -> Iterator[Record | Finding]:
    names = [str(name) for name in frame.columns]
    number = 0
    for number, values in enumerate(frame.itertuples(index=False, name=None), 1):
        yield Record(
            number, None, {name: _plain(value) for name, value in zip(names, values, strict=True)}, suspect=True
        )
    if not number:
        yield _empty("data frame")


def _from_mappings(rows: Iterable[Any]) -> Iterator[Record | Finding]:
    number = 0
    for number, row in enumerate(rows, 1):
        yield Record(number, None, dict(row) if isinstance(row, Mapping) else row, suspect=True)
    if not number:
        yield _empty("rows")


def _empty(name: str) -> Finding:
    return Finding("empty-file", "error", f"{name}: there are no rows", "Give at least one row.", where=Place(name))


def _plain(value: Any) -> Any:
    """A cell of a data frame as Python's own: NaN, NA and NaT are None, numpy's numbers and arrays plain ones."""
    kind = type(value)
    if kind in (str, int, bool, dict, list) or value is None:
        return value
    if kind is float:
        return None if value != value else value
    if kind.__name__ in ("NAType", "NaTType"):
        return None
    if kind.__module__ == "numpy":
        plain = value.tolist()
        return None if type(plain) is float and plain != plain else plain
    return value
