"""What of a fold's training rows is found again in its held-out rows: equal rows, equal groups; and what it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from crosstune.data.rows import Rows, normal_key
from crosstune.errors import Finding, Place
from crosstune.recipe.sections import STRATIFIED_KINDS, Folds
from crosstune.splits.fold_units import NUMBERS_SAID, Fold, hashable, listed


def find_leaks(rows: Rows, folds: Sequence[Fold], asked: Folds | None = None) -> list[Finding]:
    """Equal rows or equal groups on both sides of a fold, classes that a fold lacks, and rows that are in no fold."""
    findings = list(_duplicate_leaks(rows, folds))
    if asked is not None and asked.group is not None:
        findings += _group_leaks(rows, folds, asked.group)
    if asked is not None and asked.by is not None and asked.kind in STRATIFIED_KINDS:
        findings += _missing_classes(rows, folds, asked.by)
    used = {position for fold in folds for position in (*fold.train, *fold.held_out)}
    left_out = [row.number for position, row in enumerate(rows.rows) if position not in used]
    if left_out:
        findings.append(
            Finding("duplicates-left-out", "note",
                    f"{len(rows.rows) - len(left_out)} of {len(rows.rows)} rows are used; these are in no "
                    f"fold: {listed(left_out)}",
                    "Nothing needs doing; folds.duplicates: together keeps equal rows.",
                    tuple(left_out[:NUMBERS_SAID]), len(left_out), Place(rows.name))
        )  # fmt: skip
    return findings


def _duplicate_leaks(rows: Rows, folds: Sequence[Fold]) -> Iterator[Finding]:
    keys = [normal_key(row) for row in rows.rows]
    if len(set(keys)) == len(keys):
        return
    for fold in folds:
        trained = {keys[p]: p for p in reversed(fold.train)}
        seen = [
            (rows.rows[p].number, rows.rows[trained[keys[p]]].number)
            for p in sorted(fold.held_out)
            if keys[p] in trained
        ]
        if seen:
            pairs = ", ".join(f"{held} = {train}" for held, train in seen[:5]) + (" …" if len(seen) > 5 else "")
            yield Finding("duplicate-across-folds", "warning",
                          f"fold {fold.index}: {len(seen)} held-out row(s) equal a training row: {pairs}",
                          "Set folds.duplicates: together (or first).",
                          tuple(held for held, _ in seen[:NUMBERS_SAID]), len(seen), Place(rows.name))  # fmt: skip


def _group_leaks(rows: Rows, folds: Sequence[Fold], name: str) -> Iterator[Finding]:
    groups = [hashable(value) for value in rows.column(name, option="folds.group")]
    for fold in folds:
        trained = {groups[p] for p in fold.train} - {None}
        seen = [rows.rows[p].number for p in sorted(fold.held_out) if groups[p] in trained]
        if seen:
            yield Finding("group-across-folds", "error",
                          f"fold {fold.index}: {len(seen)} held-out row(s) share {name!r} with training rows: "
                          f"{listed(seen)}",
                          "Split by group (folds.kind: group).", tuple(seen[:NUMBERS_SAID]), len(seen),
                          Place(rows.name, field=name))  # fmt: skip


def _missing_classes(rows: Rows, folds: Sequence[Fold], name: str) -> Iterator[Finding]:
    labels = [hashable(value) for value in rows.column(name, option="folds.by")]
    every = Counter(labels)
    for fold in folds:
        held = {labels[p] for p in fold.held_out}
        for label in every:
            if label not in held:
                yield Finding("fold-without-class", "warning", f"fold {fold.index} holds out no row of class "
                                                               f"{label!r} of {name!r}",
                              "Choose fewer folds, or add rows of this "
                              "class.", where=Place(rows.name, field=name))  # fmt: skip
