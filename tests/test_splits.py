"""Folds: scikit-learn's where rows differ, and never an equal row or group on both sides."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import sklearn.model_selection as sklearn
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstune.data.load import load_rows
from crosstune.data.rows import Rows, normal_key
from crosstune.errors import DataError, Refused
from crosstune.nested import inner_folds
from crosstune.recipe.sections import Data, Folds
from crosstune.splits.fold_units import rows_together
from crosstune.splits.splits import Fold, check_folds, find_leaks, fold_table, split_rows


def rows_of(*texts: str, **columns: list[Any]) -> Rows:
    table = [{"text": text, **{name: values[i] for name, values in columns.items()}} for i, text in enumerate(texts)]
    return load_rows(table, Data(path="x"))


def different(n: int, **columns: list[Any]) -> Rows:
    return rows_of(*(f"row {i}" for i in range(n)), **columns)


def case(cases, name: str) -> Rows:
    return load_rows(cases / f"{name}.jsonl", Data(path="x"))


def held_out(rows: Rows, folds: list[Fold]) -> list[list[int]]:
    return [[rows.rows[p].number for p in fold.held_out] for fold in folds]


def pairs(folds: list[Fold]) -> list[tuple[list[int], list[int]]]:
    return [(list(fold.train), list(fold.held_out)) for fold in folds]


def codes(error: pytest.ExceptionInfo[Refused]) -> list[str]:
    return [finding.code for finding in error.value.findings if finding.severity == "error"]


LABELS = ["a", "b", "a", "c", "b", "a", "c", "b", "a", "c", "b", "a", "c", "b"]
TIMES = [5, 3, 9, 1, 7, 2, 8, 4, 6, 0, 13, 11, 12, 10]

SAME_AS_SKLEARN = {
    "kfold": (Folds(kind="kfold", k=4, seed=3), sklearn.KFold(4, shuffle=True, random_state=3)),
    "stratified": (Folds(kind="stratified", k=3, by="label", seed=3), sklearn.StratifiedKFold(3, shuffle=True, random_state=3)),
    "shuffle": (Folds(kind="shuffle", k=3, test_share=0.3, seed=3), sklearn.ShuffleSplit(3, test_size=0.3, random_state=3)),
    "shuffle by class": (Folds(kind="shuffle", k=3, by="label", test_share=0.3, seed=3),
                         sklearn.StratifiedShuffleSplit(3, test_size=0.3, random_state=3)),
    "leave-one-out": (Folds(kind="leave-one-out"), sklearn.LeaveOneOut()),
    "time-series": (Folds(kind="time-series", k=3), sklearn.TimeSeriesSplit(3)),
    "repeated-kfold": (Folds(kind="repeated-kfold", k=3, repeats=2, seed=3),
                       sklearn.RepeatedKFold(n_splits=3, n_repeats=2, random_state=3)),
    "repeated-stratified": (Folds(kind="repeated-stratified", k=3, repeats=2, by="label", seed=3),
                            sklearn.RepeatedStratifiedKFold(n_splits=3, n_repeats=2, random_state=3)),
    "stratified-group": (Folds(kind="stratified-group", k=3, by="label", group="group", seed=3),
                         sklearn.StratifiedGroupKFold(3, shuffle=True, random_state=3)),
    "leave-one-group-out": (Folds(kind="leave-one-group-out", group="group"), sklearn.LeaveOneGroupOut()),
    "shuffle in groups": (Folds(kind="shuffle", k=3, group="group", test_share=0.3, seed=3),
                          sklearn.GroupShuffleSplit(3, test_size=0.3, random_state=3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME_AS_SKLEARN)
def test_different_rows_are_split_as_scikit_learn_splits_them(kind):
    asked, splitter = SAME_AS_SKLEARN[kind]
    groups = [f"g{i // 2}" for i in range(14)]
    rows = different(14, label=LABELS, group=groups)
    expected = [
        (sorted(map(int, a)), sorted(map(int, b)))
        for a, b in splitter.split(np.zeros((14, 1)), LABELS, groups if asked.group else None)
    ]
    assert pairs(split_rows(rows, asked)) == expected


def test_group_folds_are_as_even_as_scikit_learns_and_move_with_the_seed():
    groups = [f"g{i}" for i in [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 6]]
    rows = different(12, group=groups)
    even = sorted(len(test) for _, test in sklearn.GroupKFold(3).split(np.zeros((12, 1)), groups=groups))
    seen = set()
    for seed in range(10):
        folds = split_rows(rows, Folds(kind="group", k=3, group="group", seed=seed))
        assert sorted(len(f.held_out) for f in folds) == even
        assert not find_leaks(rows, folds, Folds(kind="group", group="group"))
        seen.add(tuple(f.held_out for f in folds))
    assert len(seen) > 1


@pytest.mark.parametrize("kind", SAME_AS_SKLEARN)
def test_a_splitter_object_gives_its_own_folds(kind):
    asked, splitter = SAME_AS_SKLEARN[kind]
    asked = Folds(by=asked.by, group=asked.group)
    rows = different(14, label=LABELS, group=[f"g{i // 2}" for i in range(14)])
    assert pairs(split_rows(rows, asked, splitter=splitter)) == pairs(split_rows(rows, SAME_AS_SKLEARN[kind][0]))


def test_an_iterable_of_positions_is_taken_as_it_is():
    folds = split_rows(different(4), Folds(), splitter=[([0, 1], [2, 3]), (np.array([2, 3]), np.array([0]))])
    assert pairs(folds) == [([0, 1], [2, 3]), ([2, 3], [0])]


def test_a_splitter_without_a_seed_is_refused():
    for splitter in (sklearn.KFold(3, shuffle=True), sklearn.ShuffleSplit(3)):
        with pytest.raises(DataError, match="no random_state"):
            split_rows(different(9), Folds(), splitter=splitter)
    split_rows(different(9), Folds(), splitter=sklearn.KFold(3))


@pytest.mark.parametrize("bad", [[([0], [0, 1])], [([0], [])], [([0], [9])], []])
def test_a_splitter_that_is_wrong_is_refused(bad):
    with pytest.raises(DataError):
        split_rows(different(3), Folds(), splitter=bad)


def test_ten_rows_in_three_folds_are_four_three_three(cases):  # E02
    rows = case(cases, "E02-ten")
    folds = split_rows(rows, Folds(k=3))
    assert [len(f.held_out) for f in folds] == [4, 3, 3]
    assert sorted(fold_table(rows, folds)) == [(n, dict(fold_table(rows, folds))[n]) for n in range(1, 11)]


def test_no_named_well_is_in_two_folds_and_rows_without_one_stand_alone(cases):  # E03
    rows = case(cases, "E03-groups")
    asked = Folds(kind="group", k=3, group="well")
    for seed in range(10):
        folds = split_rows(rows, asked.model_copy(update={"seed": seed}))
        home = dict(fold_table(rows, folds))
        wells = [row.columns["well"] for row in rows.rows]
        for well in set(wells) - {None}:
            assert len({home[n] for n, w in enumerate(wells, 1) if w == well}) == 1
        assert sum(len(f.held_out) for f in folds) == 12
    (note,) = check_folds(rows, asked)
    assert (note.code, note.severity, note.rows) == ("missing-group", "note", (11, 12))
    with pytest.raises(Refused, match=r"5 named groups.*7 with") as caught:
        split_rows(rows, Folds(kind="group", k=9, group="well"))
    assert codes(caught) == ["too-few-groups"]
    with pytest.raises(DataError, match=r"no column 'wel'.*messages, well"):
        split_rows(rows, Folds(kind="group", group="wel"))


def test_equal_rows_lie_in_one_fold_or_only_the_first_is_used(cases):  # E04
    rows = case(cases, "E04-dupes")
    for seed in range(10):
        home = dict(fold_table(rows, split_rows(rows, Folds(k=3, seed=seed))))
        assert home[1] == home[9] and home[3] == home[7] == home[11] and len(home) == 12
        folds = split_rows(rows, Folds(k=3, seed=seed, duplicates="first"))
        assert sorted(n for n, _ in fold_table(rows, folds)) == [1, 2, 3, 4, 5, 6, 8, 10, 12]
        (note,) = find_leaks(rows, folds)
        assert (note.code, note.rows) == ("duplicates-left-out", (7, 9, 11)) and "9 of 12 rows" in note.message
        ignoring = split_rows(rows, Folds(k=3, seed=seed, duplicates="ignore"))
        table = [
            (sorted(a), sorted(b)) for a, b in sklearn.KFold(3, shuffle=True, random_state=seed).split(np.zeros(12))
        ]
        assert pairs(ignoring) == table
    assert (
        find_leaks(rows, split_rows(rows, Folds(k=3, seed=0, duplicates="ignore")))[0].code == "duplicate-across-folds"
    )


def test_a_class_smaller_than_k_is_refused_or_its_fold_is_marked(cases):  # E05
    rows = case(cases, "E05-classes")
    with pytest.raises(Refused, match=r"'scrap'.*2 < 3") as caught:
        split_rows(rows, Folds(kind="stratified", k=3, by="label"))
    assert codes(caught) == ["class-smaller-than-k"]
    asked = Folds(kind="stratified", k=3, by="label", allow_small_classes=True)
    with_scrap = [any(rows.rows[p].columns["label"] == "scrap" for p in f.held_out) for f in split_rows(rows, asked)]
    marked = find_leaks(rows, split_rows(rows, asked), asked)
    assert [(m.code, m.message) for m in marked] == [
        ("fold-without-class", f"fold {with_scrap.index(False)} holds out no row of class 'scrap' of 'label'")
    ]
    two = split_rows(rows, Folds(kind="stratified", k=2, by="label"))
    assert [Counter(rows.rows[p].columns["label"] for p in f.held_out)["scrap"] for f in two] == [1, 1]
    with pytest.raises(Refused, match="10 > 9") as caught:
        split_rows(rows, Folds(kind="stratified", k=10, by="label"))
    assert codes(caught) == ["k-larger-than-rows"]


def test_more_folds_than_rows_that_differ_is_refused():
    with pytest.raises(Refused, match="3 > 2"):
        split_rows(rows_of("a", "A", "a ", "b"), Folds(k=3))
    with pytest.raises(Refused, match="5 > 4"):
        split_rows(different(4), Folds(kind="time-series", k=4))


# --- a column, time, contradictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0, 1, 2, 0, -1], ["1", "2", "3", "1", "-1"], ["x", "y", "z", "x", "-1"]])
def test_a_column_holds_the_fold(values):
    folds = split_rows(different(5, fold=values), Folds(kind="column", by="fold"))
    assert [f.held_out for f in folds] == [(0, 3), (1,), (2,)]
    assert [f.train for f in folds] == [(1, 2, 4), (0, 2, 3, 4), (0, 1, 3, 4)], "-1 always trains"


@pytest.mark.parametrize(
    ("values", "code"), [([0, 1, 3], "fold-without-rows"), ([0, 1, None], "missing-fold"), ([1, 1, 1], "too-few-folds")]
)
def test_a_column_that_names_no_usable_folds_is_refused(values, code):
    with pytest.raises(Refused) as caught:
        split_rows(different(3, fold=values), Folds(kind="column", by="fold"))
    assert codes(caught) == [code]


@pytest.mark.parametrize(
    "write",
    [
        int,
        float,
        str,
        lambda t: f"2024-01-{t + 1:02d}",
        lambda t: f"2024-01-01T{t:02d}:00:00Z",
        lambda t: __import__("datetime").date(2024, 1, t + 1),
    ],
)
def test_time_series_train_on_the_past_only(write):
    rows = different(14, when=[write(t) for t in TIMES])
    folds = split_rows(rows, Folds(kind="time-series", k=3, by="when"))
    order = np.argsort(TIMES)
    assert pairs(folds) == [(sorted(order[a]), sorted(order[b])) for a, b in sklearn.TimeSeriesSplit(3).split(order)]
    for fold in folds:
        assert max(TIMES[p] for p in fold.train) < min(TIMES[p] for p in fold.held_out)


@pytest.mark.parametrize("value", ["3/14/2024", None, True, "soon"])
def test_a_time_that_is_none_is_refused_with_its_row(value):
    with pytest.raises(DataError, match="row 2"):
        split_rows(different(5, when=[1, value, 3, 4, 5]), Folds(kind="time-series", k=2, by="when"))


@pytest.mark.parametrize(
    "asked",
    [Folds(kind="kfold", by="label"), Folds(kind="group", group="label", by="label"), Folds(kind="time-series", group="label"), Folds(kind="shuffle", by="label", group="label")],
)  # fmt: skip
def test_an_option_is_refused_rather_than_ignored(asked):
    with pytest.raises(DataError, match=r"folds\."):
        split_rows(different(9, label=list("aabbccdde")), asked)


@pytest.mark.parametrize(
    "kind", ["kfold", "stratified", "leave-one-out", "shuffle", "repeated-kfold", "repeated-stratified"]
)
def test_a_group_is_kept_together_whatever_the_kind(kind):
    rows = different(18, who=[f"g{i % 6}" for i in range(18)], label=list("ab" * 9))
    asked = Folds(kind=kind, k=2, group="who", by="label" if "strat" in kind else None)
    folds = split_rows(rows, asked)
    assert not find_leaks(rows, folds, asked.model_copy(update={"by": None}))


def test_groups_that_share_an_equal_row_become_one():
    rows = rows_of("a", "b", "A ", "c", "d", "e", who=["x", "x", "y", "y", "z", "w"])
    folds = split_rows(rows, Folds(kind="leave-one-group-out", group="who"))
    assert held_out(rows, folds) == [[1, 2, 3, 4], [5], [6]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "A", " a", "b", "c", "d", "e", "f", "g", "h"]), min_size=6, max_size=30),
    st.integers(0, 2**40),
)
def test_every_row_is_held_out_once_and_never_met_in_training(texts, seed):
    rows = rows_of(*texts)
    keys = [normal_key(row) for row in rows.rows]
    if len(set(keys)) < 3:
        return
    folds = split_rows(rows, Folds(k=3, seed=seed))
    assert sorted(p for f in folds for p in f.held_out) == list(range(len(texts)))
    for fold in folds:
        assert not {keys[p] for p in fold.held_out} & {keys[p] for p in fold.train}
        assert sorted((*fold.train, *fold.held_out)) == list(range(len(texts)))
    assert not find_leaks(rows, folds)


def test_folds_depend_on_rows_and_seed_alone_and_leave_the_global_states_alone():
    rows = different(14, label=LABELS, group=[f"g{i // 2}" for i in range(14)])
    for asked, _ in SAME_AS_SKLEARN.values():
        first = split_rows(rows, asked)
        np.random.rand(7), random.random()
        before = np.random.get_state()[1].tobytes(), random.getstate()
        assert split_rows(rows, asked) == first
        assert (np.random.get_state()[1].tobytes(), random.getstate()) == before


def test_repeated_folds_name_a_row_once_a_repeat():
    rows = different(9)
    folds = split_rows(rows, Folds(kind="repeated-kfold", k=3, repeats=4))
    assert [f.index for f in folds] == list(range(12))
    assert Counter(n for n, _ in fold_table(rows, folds)) == dict.fromkeys(range(1, 10), 4)


def test_a_group_on_both_sides_of_a_given_split_is_an_error():
    rows = different(4, who=["x", "y", "x", None])
    asked = Folds(group="who")
    (finding,) = find_leaks(rows, [Fold(0, (0, 1), (2, 3))], asked)
    assert (finding.code, finding.severity, finding.rows) == ("group-across-folds", "error", (3,))


def test_a_choice_within_an_outer_fold_sees_nothing_from_after_its_time():
    rows = different(14, time=TIMES)
    folds = Folds(kind="time-series", k=3, by="time")
    for outer in split_rows(rows, folds):
        begins = min(TIMES[p] for p in outer.held_out)
        inner = inner_folds(rows, outer, folds.model_copy(update={"k": 2}))
        assert {TIMES[p] for fold in inner for p in (*fold.train, *fold.held_out)} <= set(range(begins))
        assert inner


def test_a_choice_within_an_outer_fold_sees_no_copy_of_a_row_set_aside():
    rows = rows_of(*(f"row {i % 10}" for i in range(20)))
    folds = Folds(kind="kfold", k=3, duplicates="first")
    for outer in split_rows(rows, folds):
        aside = {normal_key(rows.rows[p]) for p in outer.held_out}
        seen = {
            normal_key(rows.rows[p]) for fold in inner_folds(rows, outer, folds) for p in (*fold.train, *fold.held_out)
        }
        assert seen and not seen & aside


def test_rows_that_stay_together_are_those_of_a_group_and_equal_ones_and_no_group_is_none():
    rows = rows_of("a", "b", "c", "d", "A ", "e", "f", group=["x", "x", None, None, "y", "y", ""])
    assert rows_together(rows, Folds(group="group")) == [0, 0, 1, 2, 0, 0, 3], "a = A joins the groups x and y"
    assert rows_together(rows, Folds(group="group", duplicates="ignore")) == [0, 0, 1, 2, 3, 3, 4]
    assert rows_together(rows, Folds()) == [0, 1, 2, 3, 0, 4, 5]


def test_rows_of_one_day_are_not_judged_by_others_of_that_day():
    """Days are split as scikit-learn splits that many rows; the rows of a day follow it."""
    days = [3, 1, 1, 4, 2, 2, 2, 5, 3, 6, 6, 1, 4, 5, 5, 5]
    rows = different(16, day=[f"2024-01-{day:02d}" for day in days])
    made = split_rows(rows, Folds(kind="time-series", k=3, by="day"))
    oracle = [(set(train + 1), set(held + 1)) for train, held in sklearn.TimeSeriesSplit(3).split(np.zeros(6))]
    assert [({days[p] for p in f.train}, {days[p] for p in f.held_out}) for f in made] == oracle
    assert sorted(p for p in (*made[-1].train, *made[-1].held_out)) == list(range(16))
    with pytest.raises(DataError, match="can't be split"):
        split_rows(rows, Folds(kind="time-series", k=6, by="day"))


@pytest.mark.parametrize("write", [int, float, str, lambda value: str(float(value))])
def test_a_column_keeps_rows_in_training_however_a_table_holds_its_numbers(write):
    """PredefinedSplit of the whole numbers is the oracle; a table with a gap holds them as 0.0, 10.0, -1.0."""
    values = [0, 1, -1, 10, 2, 1, -1, 0, 3, 4, 5, 6, 7, 8, 9]
    made = split_rows(different(15, part=[write(value) for value in values]), Folds(kind="column", by="part"))
    oracle = [(train.tolist(), held.tolist()) for train, held in sklearn.PredefinedSplit(values).split()]
    assert pairs(made) == oracle
