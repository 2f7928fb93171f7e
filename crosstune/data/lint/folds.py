"""The split into folds: what `splits` says about it, and what only the folds' own rows show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.load import Rows
from crosstune.errors import DataError, Finding, Place, Refused
from crosstune.recipe.sections import Folds
from crosstune.splits.splits import Fold, check_folds, find_leaks, split_rows

# Folds of a random split over rows of like length stay well within a factor of two of one another.
UNEQUAL = 2.0
TIME_COLUMNS = ("time", "date", "datetime", "timestamp", "day", "created_at", "year")


def check_split(
    rows: Rows, asked: Folds, *, tokens_per_row: NDArray[np.int64] | None = None, splitter: Any = None
) -> tuple[list[Finding], list[Fold]]:
    """All findings about the split of these rows, and its folds. `tokens_per_row`: their lengths, in the same order."""
    missing = list(check_columns(rows, asked))
    if missing:
        return missing, []
    findings = list(check_time_order(rows, asked))
    try:
        if splitter is None:
            findings += check_folds(rows, asked)
            if any(finding.severity == "error" for finding in findings):
                return findings, []
        folds = split_rows(rows, asked, splitter=splitter)
    except Refused as refused:
        return [*findings, *refused.findings], []
    except DataError as error:
        return [*findings, FAULTS["split-refused"].found(error.problem, where=Place(rows.name), fix=error.fix)], []
    findings += find_leaks(rows, folds, asked)
    if tokens_per_row is not None and not asked.kind.startswith("leave-one"):  # one row or group each, of any length
        findings += check_equal_folds(rows, folds, tokens_per_row)
    return findings, folds


def check_columns(rows: Rows, asked: Folds) -> Iterator[Finding]:
    """Columns that the split is to use and that no row has."""
    for option, name in (("folds.by", asked.by), ("folds.group", asked.group)):
        if name is not None and name not in rows.column_names:
            message = f"there is no column {name!r} ({option}); columns found: {', '.join(rows.column_names) or 'none'}"
            yield FAULTS["unknown-column"].found(message, where=Place(rows.name, field=option))


def check_time_order(rows: Rows, asked: Folds) -> Iterator[Finding]:
    """A time-series split by the order of the file, where a column says that the file isn't in order."""
    if asked.kind != "time-series" or asked.by is not None:
        return
    for name in TIME_COLUMNS:
        if name not in rows.column_names:
            continue
        values = [row.columns.get(name) for row in rows.rows]
        if len({type(value) for value in values}) != 1 or not isinstance(values[0], int | float | str):
            continue
        pairs: Iterator[tuple[Any, Any]] = pairwise(values)
        early = [rows.rows[at + 1].number for at, (one, two) in enumerate(pairs) if two < one]
        if early:
            message = f"{name!r} goes back at {len(early)} row(s), and a time-series split takes the rows as they stand"
            fix = f"Set folds.by: {name}, or sort the file."
            yield FAULTS["time-order"].found(message, early, Place(rows.name, field=name), fix=fix)


def check_equal_folds(rows: Rows, folds: Sequence[Fold], tokens_per_row: NDArray[np.int64]) -> Iterator[Finding]:
    """Held-out sides of very different weight."""
    counts = [int(tokens_per_row[list(fold.held_out)].sum()) for fold in folds]
    if counts and max(counts) > UNEQUAL * max(min(counts), 1):
        most, least = int(np.argmax(counts)), int(np.argmin(counts))
        message = (
            f"fold {folds[most].index} holds out {counts[most]:,} tokens, fold {folds[least].index} {counts[least]:,}"
        )
        yield FAULTS["unequal-folds"].found(message, where=Place(rows.name))
