"""Faults of the split into folds."""

from __future__ import annotations

from crosstune.data.lint.fault import Fault
from crosstune.data.lint.faults_file import chat

THINGS = ("zinc", "larch", "slate", "grey", "salt", "roof", "lamp", "kettle", "jar", "shelf", "tin", "oak")


def labelled(*rows: str) -> str:
    """Rows with one column more, 'column=value' each."""
    lines = []
    for number, row in enumerate(rows):
        line = chat(f"user: Describe the {THINGS[number]}.", f"assistant: {THINGS[-number - 1]}")
        name, _, value = row.partition("=")
        lines.append(line.replace("]}\n", f'], "{name}": {value}}}\n'))
    return "".join(lines)


def grouped(*rows: str) -> str:
    """Rows with a group and a fold: "a0" is of group a in fold 0."""
    lines = labelled(*(f"fold={row[1]}" for row in rows)).splitlines()
    return "".join(line[:-1] + f', "well": "{row[0]}"}}\n' for line, row in zip(lines, rows, strict=True))


FOLD_FAULTS = (
    Fault(
        "unknown-column",
        "error",
        "A column that no row has",
        "The option would be ignored, and the split would be another than was asked for.",
        "Name one of the columns found.",
        bad=labelled('well="a"', 'well="b"', 'well="c"'),
        good=labelled('wells="a"', 'wells="b"', 'wells="c"'),
        under=("folds.kind=group", "folds.group=wells", "folds.k=3"),
        source="https://github.com/microsoft/FLAML/pull/107",
    ),
    Fault(
        "too-few-rows",
        "error",
        "Too few rows or groups to leave one out",
        "One side would be empty.",
        "Add rows.",
        bad=labelled("n=1"),
        good=labelled("n=1", "n=2", "n=3"),
        under=("folds.kind=leave-one-out",),
    ),
    Fault(
        "k-larger-than-rows",
        "error",
        "More folds than rows",
        "Some fold would have nothing to score.",
        "Lower folds.k.",
        bad=labelled("n=1", "n=2", "n=3"),
        good=labelled("n=1", "n=2", "n=3", "n=4"),
        under=("folds.k=4",),
        source="https://github.com/BlueBrain/morphoclass/issues/22",
    ),
    Fault(
        "too-few-groups",
        "error",
        "Fewer groups than folds",
        "A group stays on one side, so some fold would be empty.",
        "Lower folds.k, or name a finer group column.",
        bad=labelled(*(f'well="{w}"' for w in "aabbaa")),
        good=labelled(*(f'well="{w}"' for w in "aabbcd")),
        under=("folds.kind=group", "folds.group=well", "folds.k=3"),
        source="https://github.com/scikit-learn/scikit-learn/issues/13621",
    ),
    Fault(
        "missing-group",
        "note",
        "Rows whose group is null",
        "Each is taken for a group of its own, though they may belong together.",
        "Fill in the group column.",
        bad=labelled('well="a"', 'well="b"', 'well="c"', "well=null"),
        good=labelled('well="a"', 'well="b"', 'well="c"', 'well="d"'),
        under=("folds.kind=group", "folds.group=well", "folds.k=3"),
    ),
    Fault(
        "class-smaller-than-k",
        "error",
        "A class with fewer rows than folds",
        "Some fold is scored without it, and metrics over classes are undefined or flattering there.",
        "Lower folds.k, add rows of the class, or set folds.allow_small_classes: true.",
        bad=labelled(*['label="fits"'] * 7, *['label="scrap"'] * 2),
        good=labelled(*['label="fits"', 'label="scrap"'] * 4),
        under=("folds.kind=stratified", "folds.by=label", "folds.k=3"),
        source="https://github.com/scikit-learn/scikit-learn/issues/6177",
    ),
    Fault(
        "fold-without-class",
        "warning",
        "A held-out fold without a row of some class",
        "Metrics over classes are undefined or flattering there.",
        "Choose fewer folds, or add rows of this class.",
        bad=labelled(*['label="fits"'] * 7, *['label="scrap"'] * 2),
        good=labelled(*['label="fits"', 'label="scrap"'] * 4),
        under=("folds.kind=stratified", "folds.by=label", "folds.k=3", "folds.allow_small_classes=true"),
    ),
    Fault(
        "missing-fold",
        "error",
        "Rows without a fold, in a column of folds",
        "It isn't said on which side they belong.",
        "Give each row a fold; -1 keeps a row in training always.",
        bad=labelled("fold=0", "fold=1", "fold=null"),
        good=labelled("fold=0", "fold=1", "fold=1"),
        under=("folds.kind=column", "folds.by=fold"),
    ),
    Fault(
        "too-few-folds",
        "error",
        "A column of folds that names fewer than two",
        "One fold has no training rows.",
        "Name a fold for each row.",
        bad=labelled("fold=0", "fold=0"),
        good=labelled("fold=0", "fold=1"),
        under=("folds.kind=column", "folds.by=fold"),
    ),
    Fault(
        "fold-without-rows",
        "error",
        "A fold number that no row has",
        "A gap in the numbers means that rows are lost, or numbered wrongly.",
        "Number the folds without gaps.",
        bad=labelled("fold=0", "fold=2"),
        good=labelled("fold=0", "fold=1"),
        under=("folds.kind=column", "folds.by=fold"),
    ),
    Fault(
        "duplicate-across-folds",
        "warning",
        "Equal rows on both sides of a fold",
        "The held-out row was trained on: the score is flattered.",
        "Set folds.duplicates: together.",
        bad=labelled("fold=0", "fold=1") + labelled("fold=1"),
        good=labelled("fold=0", "fold=1", "fold=1"),
        under=("folds.kind=column", "folds.by=fold"),
        source="https://github.com/TelecomsXChangeAPi/OpenTextShield/issues/194",
    ),
    Fault(
        "group-across-folds",
        "error",
        "Rows of one group on both sides of a fold",
        "The score holds for sources seen in training, not for new ones.",
        "Set folds.kind: group.",
        bad=grouped("a0", "a1", "b0", "b1"),
        good=grouped("a0", "a0", "b1", "b1"),
        under=("folds.kind=column", "folds.by=fold", "folds.group=well"),
        source="https://github.com/vanderschaarlab/autoprognosis/issues/33",
    ),
    Fault(
        "duplicates-left-out",
        "note",
        "Rows that are in no fold",
        "Asked for by folds.duplicates: first; the number of rows used is smaller than that of the file.",
        "Nothing; folds.duplicates: together keeps equal rows.",
        bad=labelled("n=1", "n=2", "n=3") + labelled("n=1"),
        good=labelled("n=1", "n=2", "n=3"),
        under=("folds.duplicates=first", "folds.k=2"),
    ),
    Fault(
        "unequal-folds",
        "note",
        "Held-out folds of very different token counts",
        "The mean over folds gives each fold the same weight; the small ones make it noisy.",
        "Look at the pooled loss, or use fewer folds.",
        bad=labelled("fold=0", "fold=1", "fold=1", "fold=1"),
        good=labelled("fold=0", "fold=1"),
        under=("folds.kind=column", "folds.by=fold"),
        source="Bengio and Grandvalet 2004, No Unbiased Estimator of the Variance of K-Fold Cross-Validation",
    ),
    Fault(
        "time-order",
        "warning",
        "Rows that aren't in order of time",
        "A time-series split then trains on the future of what it scores.",
        "Set folds.by to the time column, or sort the file.",
        bad=labelled("day=1", "day=3", "day=2", "day=4"),
        good=labelled("day=1", "day=2", "day=3", "day=4"),
        under=("folds.kind=time-series", "folds.k=2"),
        source="https://scikit-learn.org/stable/modules/cross_validation.html#time-series-split",
    ),
    Fault(
        "split-refused",
        "error",
        "A split that can't be made as asked",
        "No fold could be trained.",
        "See the message.",
        bad=labelled(*(f'label="{w}"' for w in "aabbaabb")),
        good=labelled(*(f'label="{w}"' for w in "aabbaabb")),
        under=("folds.by=label", "folds.k=2"),
    ),
)
