"""Folds: which rows a lane trains on and which it is scored on, by scikit-learn's splitters, a column or an object.

The assignment depends on the rows and the recipe's `folds` alone, never on a global random state. Rows that are equal
but for case, white space and Unicode form stay on one side. Positions into `rows.rows` and fold indices count from 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.rows import Rows
from crosstune.errors import DataError, Finding, Place, Refused
from crosstune.recipe.sections import GROUP_KINDS, STRATIFIED_KINDS, Folds
from crosstune.splits.fold_units import (
    NUMBERS_SAID,
    Fold,
    class_codes,
    equal_keys,
    fold_labels,
    hashable,
    is_null,
    listed,
    points_in_time,
    sets_of,
)
from crosstune.splits.leaks import find_leaks

_GROUPED = {"kfold": "group", "stratified": "stratified-group", "leave-one-out": "leave-one-group-out"}
__all__ = ["Fold", "check_folds", "find_leaks", "fold_table", "split_rows"]
_ANOTHER = "Choose another folds.kind or a smaller folds.k."
_COLUMNS = (
    "A splitter gets the column folds.by as classes and folds.group as groups: name them in the recipe, "
    "or ask for folds={'kind': 'stratified', 'by': 'label', 'k': 5}."
)
Split = tuple[NDArray[np.int64], NDArray[np.int64]]


def split_rows(rows: Rows, folds: Folds, *, splitter: Any = None) -> list[Fold]:
    """The folds as asked. `splitter`: a scikit-learn splitter object, or an iterable of (train, held-out) positions.

    Raises `DataError` for a column that isn't there, and `Refused` with all findings where the rows can't be split so.
    """
    if splitter is None:
        _refuse_contradictions(folds)
    plan = _Plan(rows, folds)
    faults = plan.faults() if splitter is None else []
    if any(finding.severity == "error" for finding in faults):
        raise Refused(faults)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*least populated class", category=UserWarning)
            pairs = list(plan.splits() if splitter is None else plan.splits_of(splitter))
    except (ValueError, TypeError) as error:  # what scikit-learn can't split; without classes, it's a TypeError
        if splitter is None and isinstance(error, TypeError):
            raise
        raise DataError(f"{rows.name} can't be split: {error}", _ANOTHER if splitter is None else _COLUMNS) from None
    made = [Fold(index, _sorted(train), _sorted(held_out)) for index, (train, held_out) in enumerate(pairs)]
    _refuse_empty(made, rows)
    return made


def check_folds(rows: Rows, folds: Folds) -> list[Finding]:
    """Why these rows can't be split as asked: all errors at once, and notes. `DataError` for a missing column."""
    _refuse_contradictions(folds)
    return _Plan(rows, folds).faults()


def fold_table(rows: Rows, folds: Sequence[Fold]) -> list[tuple[int, int]]:
    """(row number, fold that holds it out), by fold and row; repeated splits name a row more than once."""
    return [(rows.rows[position].number, fold.index) for fold in folds for position in sorted(fold.held_out)]


# --- what is split -------------------------------------------------------------------------------------------------


class _Plan:
    """Rows reduced to what may be split: one position for each set of rows that must stay together."""

    def __init__(self, rows: Rows, folds: Folds) -> None:
        self.rows, self.folds = rows, folds
        self.kind = _GROUPED.get(folds.kind, folds.kind) if folds.group is not None else folds.kind
        self.seed = folds.seed % 2**32  # what numpy's RandomState takes
        self.values = rows.column(folds.by, option="folds.by") if folds.by is not None else None
        self.groups = rows.column(folds.group, option="folds.group") if folds.group is not None else None
        keys = equal_keys(rows, folds)
        self.sets, same = sets_of(keys, self.groups), sets_of(keys, None)
        first = list(dict(zip(reversed(same), reversed(range(len(rows))), strict=True)).values())[::-1]
        self.used = (
            sorted(first) if folds.duplicates == "first" or self.kind == "time-series" else list(range(len(rows)))
        )

    def faults(self) -> list[Finding]:
        """Findings about these rows and this kind of split."""
        folds, where = self.folds, Place(self.rows.name)
        units, findings = len({self.sets[p] for p in self.used}), []
        rows_word = (
            f"the {len(self.rows)} rows" if units == len(self.rows) else f"the {units} sets of rows that stay together"
        )
        if self.kind == "column":
            return self._column_faults()
        if (self.kind in ("leave-one-out", "leave-one-group-out") and units < 2) or not len(self.rows):
            findings.append(Finding("too-few-rows", "error", f"folds.kind {self.folds.kind} needs two rows or "
                                                             f"groups; there are {units}",
                                    "Add rows.", where=where))  # fmt: skip
        counted = self.kind not in ("leave-one-out", "leave-one-group-out", "shuffle")
        need = folds.k + (self.kind == "time-series")
        if counted and self.groups is None and need > units:
            findings.append(Finding("k-larger-than-rows", "error", f"folds.k needs {need} rows at least: "
                                                                   f"{need} > {units}, {rows_word}",
                                    f"Set folds.k to {max(units - (need - folds.k), 2)} or less, or add "
                                    "rows.", where=where))  # fmt: skip
        elif counted and self.groups is not None and folds.k > units:
            named = len({hashable(g) for g in self.groups if not is_null(g)})
            findings.append(Finding("too-few-groups", "error",
                                    f"folds.k is {folds.k}, but {folds.group!r} has {named} named groups "
                                    f"({units} with rows without "
                                    "a group taken one by one)", f"Set folds.k to {max(units, 2)} or "
                                                                 "less.", where=where))  # fmt: skip
        elif self.kind in STRATIFIED_KINDS:
            findings += self._small_classes()
        if self.groups is not None and (
            lone := [self.rows.rows[p].number for p, g in enumerate(self.groups) if is_null(g)]
        ):
            findings.append(Finding("missing-group", "note", f"{len(lone)} row(s) have no {folds.group!r}; "
                                                             "each is a group of its own",
                                    "Give them a group if they belong to "
                                    "one.", tuple(lone[:NUMBERS_SAID]), len(lone), where))  # fmt: skip
        return findings

    def splits(self) -> Iterator[Split]:
        """Pairs of positions, by the kind that was asked for."""
        if self.kind == "column":
            yield from self._by_column()
        elif self.groups is not None or self.kind in GROUP_KINDS:
            yield from self._grouped()
        elif self.kind == "time-series":
            yield from self._in_time()
        else:
            yield from self._one_of_each(self._splitter())

    def splits_of(self, splitter: Any) -> Iterator[Split]:
        """Pairs of positions by an object of the caller's."""
        if isinstance(splitter, Iterable):
            for train, held_out in splitter:
                yield np.asarray(train), np.asarray(held_out)
            return
        state = vars(splitter)
        if state.get("random_state", 0) is None and state.get("shuffle", True):
            raise DataError(f"the splitter {splitter} has no random_state: another run would get other folds",
                            "Give it a seed: random_state=0.")  # fmt: skip
        if self.groups is None:
            yield from self._one_of_each(splitter)
        else:
            yield from self._by_groups(splitter)

    # --- kinds -----------------------------------------------------------------------------------------------------

    def _splitter(self) -> Any:
        from sklearn import model_selection as sklearn

        k, seed, folds = self.folds.k, self.seed, self.folds
        if self.kind == "kfold":
            return sklearn.KFold(k, shuffle=True, random_state=seed)
        if self.kind == "stratified":
            return sklearn.StratifiedKFold(k, shuffle=True, random_state=seed)
        if self.kind == "leave-one-out":
            return sklearn.LeaveOneOut()
        if self.kind == "repeated-kfold":
            return sklearn.RepeatedKFold(n_splits=k, n_repeats=folds.repeats, random_state=seed)
        if self.kind == "repeated-stratified":
            return sklearn.RepeatedStratifiedKFold(n_splits=k, n_repeats=folds.repeats, random_state=seed)
        assert self.kind == "shuffle", self.kind
        if self.values is not None:
            return sklearn.StratifiedShuffleSplit(k, test_size=folds.test_share, random_state=seed)
        return sklearn.ShuffleSplit(k, test_size=folds.test_share, random_state=seed)

    def _one_of_each(self, splitter: Any) -> Iterator[Split]:
        """Split one row of each set of equal rows; the others follow it."""
        members: dict[int, list[int]] = {}
        for position in self.used:
            members.setdefault(self.sets[position], []).append(position)
        sets = [np.array(positions) for positions in members.values()]
        classes = None if self.values is None else class_codes([self.values[positions[0]] for positions in sets])
        for train, held_out in splitter.split(np.zeros((len(sets), 1)), classes):
            yield _all_of(sets, train), _all_of(sets, held_out)

    def _grouped(self) -> Iterator[Split]:
        from sklearn import model_selection as sklearn

        k, seed, folds = self.folds.k, self.seed, self.folds
        if self.kind == "shuffle":
            yield from self._by_groups(sklearn.GroupShuffleSplit(k, test_size=folds.test_share, random_state=seed))
        elif self.kind == "leave-one-group-out":
            yield from self._by_groups(sklearn.LeaveOneGroupOut())
        elif self.kind == "stratified-group":
            yield from self._by_groups(sklearn.StratifiedGroupKFold(k, shuffle=True, random_state=seed))
        elif self.kind == "repeated-stratified":
            for turn in range(folds.repeats):
                yield from self._by_groups(
                    sklearn.StratifiedGroupKFold(k, shuffle=True, random_state=(seed + turn) % 2**32)
                )
        else:
            # GroupKFold evens out the sizes but knows no seed: renumbering groups in a seeded order gives it one.
            for turn in range(folds.repeats if self.kind == "repeated-kfold" else 1):
                order = np.random.RandomState((seed + turn) % 2**32).permutation(max(self.sets) + 1)
                yield from self._by_groups(sklearn.GroupKFold(k), order)

    def _by_groups(self, splitter: Any, order: NDArray[np.int64] | None = None) -> Iterator[Split]:
        used = np.array(self.used)
        groups = np.array([self.sets[p] for p in self.used])
        classes = np.zeros(len(used)) if self.values is None else class_codes([self.values[p] for p in self.used])
        for train, held_out in splitter.split(
            np.zeros((len(used), 1)), classes, groups if order is None else order[groups]
        ):
            yield used[train], used[held_out]

    def _in_time(self) -> Iterator[Split]:
        """Split moments: rows of one time lie on one side, or some would be judged by others of the same time."""
        from sklearn.model_selection import TimeSeriesSplit

        moments: dict[float, list[int]] = {}
        for time, position in zip(self._times(), self.used, strict=True):
            moments.setdefault(time, []).append(position)
        sets = [np.array(moments[time]) for time in sorted(moments)]
        for train, held_out in TimeSeriesSplit(self.folds.k).split(np.zeros((len(sets), 1))):
            yield _all_of(sets, train), _all_of(sets, held_out)

    def _times(self) -> Sequence[float]:
        """The time of each used row: of the column, or its place among the rows."""
        if self.values is None:
            return self.used
        numbers = [self.rows.rows[p].number for p in self.used]
        return points_in_time([self.values[p] for p in self.used], numbers, str(self.folds.by))

    def _by_column(self) -> Iterator[Split]:
        assert self.values is not None
        labels = [hashable(self.values[p]) for p in self.used]
        used = np.array(self.used)
        for label in fold_labels(labels):
            held_out = np.array([value == label for value in labels])
            yield used[~held_out], used[held_out]

    # --- faults ----------------------------------------------------------------------------------------------------

    def _small_classes(self) -> list[Finding]:
        assert self.values is not None
        k, by, numbers = self.folds.k, self.folds.by, dict[Hashable, list[int]]()
        units: dict[Hashable, set[int]] = {}
        for p in self.used:
            numbers.setdefault(hashable(self.values[p]), []).append(self.rows.rows[p].number)
            units.setdefault(hashable(self.values[p]), set()).add(self.sets[p])
        small = {label: numbers[label] for label in numbers if len(units[label]) < k}
        allowed = self.folds.allow_small_classes and len(small) < len(numbers)
        return [
            Finding("class-smaller-than-k", "warning" if allowed else "error",
                    f"class {label!r} of {by!r} has {len(rows)} row(s)"
                    + (f", {len(units[label])} that may be parted" if len(units[label]) < len(rows) else "")
                    + f": {len(units[label])} < {k} folds",
                    f"Set folds.k to {len(units[label])}, add rows of this class, or set "
                    "folds.allow_small_classes: true."
                    if len(units[label]) > 1 else "Add rows of this class, or set folds.allow_small_classes: true.",
                    tuple(rows[:NUMBERS_SAID]), len(rows), Place(self.rows.name, field=str(by)))
            for label, rows in small.items()
        ]  # fmt: skip

    def _column_faults(self) -> list[Finding]:
        assert self.values is not None
        by, where = self.folds.by, Place(self.rows.name, field=str(self.folds.by))
        null = [self.rows.rows[p].number for p in self.used if is_null(self.values[p])]
        if null:
            return [Finding("missing-fold", "error", f"{len(null)} row(s) have no {by!r}: {listed(null)}",
                            "Give each row a fold; -1 keeps a row in training "
                            "always.", tuple(null[:NUMBERS_SAID]), len(null), where)]  # fmt: skip
        labels = fold_labels([hashable(self.values[p]) for p in self.used])
        if len(labels) < 2:
            return [Finding("too-few-folds", "error", f"{by!r} names {len(labels)} fold(s), two are needed",
                            "Name a fold for each row.", where=where)]  # fmt: skip
        whole = [label for label in labels if isinstance(label, int)]
        if len(whole) == len(labels) and (gaps := sorted(set(range(whole[0], whole[-1])) - set(whole))):
            return [Finding("fold-without-rows", "error", f"{by!r} runs from {whole[0]} to {whole[-1]}, and no "
                                                          f"row has {listed(gaps)}",
                            "Number the folds without gaps.", where=where)]  # fmt: skip
        return []


# --- small parts ---------------------------------------------------------------------------------------------------


def _sorted(positions: Iterable[Any]) -> tuple[int, ...]:
    return tuple(sorted(int(position) for position in positions))


def _all_of(sets: Sequence[NDArray[np.int64]], chosen: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(0, dtype=np.int64), *(sets[i] for i in chosen)])


def _refuse_contradictions(folds: Folds) -> None:
    """An option that the kind of split has no use for is refused rather than ignored."""
    if folds.by is not None and folds.kind not in {*STRATIFIED_KINDS, "column", "time-series", "shuffle"}:
        raise DataError(f"folds.by {folds.by!r} has no meaning for folds.kind {folds.kind}",
                        "Remove it, or choose a stratified kind.")  # fmt: skip
    if folds.by is not None and folds.group is not None and folds.kind == "shuffle":
        raise DataError("folds.kind shuffle can keep groups together or classes even, not both",
                        "Remove folds.by or folds.group, or choose stratified-group.")  # fmt: skip
    if folds.group is not None and folds.kind == "time-series":
        raise DataError(
            "folds.kind time-series can't keep groups together", "Remove folds.group, or choose kind group."
        )


def _refuse_empty(folds: Sequence[Fold], rows: Rows) -> None:
    """Our own splits and a caller's must have rows on both sides, no row on both, and no row that isn't there."""
    if not folds:
        raise DataError("the splitter gives no folds", "Give one that splits at least once.")
    for fold in folds:
        for side, positions in (("training", fold.train), ("held-out", fold.held_out)):
            if not positions:
                raise DataError(
                    f"fold {fold.index} has no {side} rows (fold-without-rows)",
                    "Choose fewer folds, or another folds.kind or seed.",
                )
            if min(positions) < 0 or max(positions) >= len(rows):
                raise DataError(
                    f"fold {fold.index} names {side} position {max(positions)}; there are {len(rows)} rows",
                    "Mend the splitter.",
                )
        if both := set(fold.train) & set(fold.held_out):
            raise DataError(
                f"fold {fold.index} has row {rows.rows[min(both)].number} on both sides", "Mend the splitter."
            )
