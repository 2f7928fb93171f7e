"""`Fold`, and column values as what splitters need: rows that stay together, classes, points in time, fold names.

Knows nothing of splitters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.rows import Rows, normal_key
from crosstune.errors import DataError
from crosstune.recipe.sections import Folds

NUMBERS_SAID = 20  # row numbers that a finding names


@dataclass(frozen=True)
class Fold:
    """Positions of training and held-out rows. Rows may be in neither (duplicates left out, time series)."""

    index: int
    train: tuple[int, ...]
    held_out: tuple[int, ...]


def rows_together(rows: Rows, folds: Folds) -> list[int]:
    """The set of each row: rows of a set, by group or by equal content, stay on one side of every fold."""
    groups = None if folds.group is None else rows.column(folds.group, option="folds.group")
    return sets_of(equal_keys(rows, folds), groups)


def equal_keys(rows: Rows, folds: Folds) -> Sequence[Hashable]:
    """A key a row, the same for rows that count as equal."""
    return range(len(rows)) if folds.duplicates == "ignore" else [normal_key(row) for row in rows.rows]


def sets_of(keys: Sequence[Hashable], groups: Sequence[Any] | None) -> list[int]:
    """The set of each row, by equal keys and, if given, equal groups; a row without a group is one of its own."""
    return stay_together([keys] if groups is None else [keys, group_keys(groups)])


def stay_together(keys: Sequence[Sequence[Hashable]]) -> list[int]:
    """Numbers such that positions with an equal key in any of the sequences have the same one, by first appearance."""
    parent = list(range(len(keys[0])))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for sequence in keys:
        first: dict[Hashable, int] = {}
        for i, key in enumerate(sequence):
            a, b = root(first.setdefault(key, i)), root(i)
            parent[max(a, b)] = min(a, b)
    names: dict[int, int] = {}
    return [names.setdefault(root(i), len(names)) for i in range(len(parent))]


def group_keys(groups: Sequence[Any]) -> list[Hashable]:
    return [("row", i) if is_null(group) else ("group", hashable(group)) for i, group in enumerate(groups)]


def is_null(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and value != value)


def hashable(value: Any) -> Hashable:
    if is_null(value):
        return None
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, list | dict) else value


def class_codes(values: Sequence[Any]) -> NDArray[np.int64]:
    """Classes as numbers, by first appearance: scikit-learn then gives the split it gives for the values themselves."""
    names: dict[Hashable, int] = {}
    return np.array([names.setdefault(hashable(value), len(names)) for value in values], dtype=np.int64)


def fold_labels(labels: Iterable[Hashable]) -> list[Any]:
    """Distinct fold names in order, numbers as numbers; -1 is no fold, as in scikit-learn's PredefinedSplit."""
    distinct = {label: _whole(label) for label in labels if label is not None and _whole(label) != -1}
    if all(number is not None for number in distinct.values()):
        return sorted(distinct, key=lambda label: distinct[label] or 0)
    return sorted(distinct, key=str)


def _whole(label: Hashable) -> int | None:
    """A whole number as such, however a table holds it (-1, "-1", -1.0); None if the label is none."""
    found = re.fullmatch(r"(-?\d+)(\.0*)?", str(label))
    return int(found[1]) if found else None


def points_in_time(values: Sequence[Any], numbers: Sequence[int], by: str) -> list[float]:
    """Points in time as numbers: numbers, dates, or text that is a number or an ISO date."""
    times = []
    for value, number in zip(values, numbers, strict=True):
        if isinstance(value, str):
            value = _time_of(value.strip())
        if isinstance(value, date) and not isinstance(value, datetime):
            value = datetime(value.year, value.month, value.day)
        if isinstance(value, datetime):
            value = (
                value.replace(tzinfo=None) - (value.utcoffset() or datetime.min - datetime.min) - datetime(1970, 1, 1)
            ).total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise DataError(
                f"row {number}: {by!r} is no point in time", "Write it as a number or an ISO date such as 2024-07-26."
            )
        times.append(float(value))
    return times


def _time_of(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:NUMBERS_SAID])) + (" …" if len(numbers) > NUMBERS_SAID else "")
