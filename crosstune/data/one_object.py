"""A file that holds one object and no rows: what it is instead, and how rows are made of it. Knows values, no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.errors import DataError

SPEAKERS = {"role", "from"}  # a message's key, in either of its spellings
ROWS_OF_PANDAS = "Write rows: frame.to_json('rows.jsonl', orient='records', lines=True)."


def refuse_one_object(name: str, record: Mapping[str, Any]) -> None:
    """Raise `DataError` where the only record of a source is a whole table: by columns, or under a key of its own."""
    sizes = {len(value) for value in record.values() if _is_column(value)}
    if len(record) > 1 and len(sizes) == 1 and all(map(_is_column, record.values())) and max(sizes) > 1:
        raise DataError(
            f"{name} holds one object, whose {len(record)} values are columns of {sizes.pop()} cells, not rows",
            ROWS_OF_PANDAS,
        )
    if len(under := [key for key, value in record.items() if _is_rows(value)]) == 1:
        key = under[0]
        raise DataError(
            f"{name} holds one object; its {len(record[key])} rows lie under the key {key!r}",
            f"Write one row a line: jq -c '.{key}[]' {name} > rows.jsonl",
        )


def _is_column(value: Any) -> bool:
    """[cell, …], or {"0": cell, …} as pandas writes a frame unless told otherwise."""
    if isinstance(value, dict):
        return bool(value) and all(key.isdecimal() for key in value)
    return isinstance(value, list) and not any(isinstance(cell, dict | list) for cell in value)


def _is_rows(value: Any) -> bool:
    """[object, …], of which none is a message: a row's own prompt may be a list of those."""
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(isinstance(row, dict) and not SPEAKERS & row.keys() for row in value)
    )
