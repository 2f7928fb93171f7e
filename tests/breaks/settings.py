"""Folds that can't be made of the rows, and settings that can't be meant."""

from __future__ import annotations

from tests.breaks.among_rows import repeat
from tests.breaks.bed import JSON, Bed, Expected, breaks


@breaks(*JSON)
def class_too_small(bed: Bed) -> Expected:
    rare = bed.rng.sample(range(1, len(bed.rows) + 1), bed.rng.randrange(1, 5))
    for number, record in enumerate(bed.rows, 1):
        record["sort"] = "scrap" if number in rare else "fits"
    bed.overrides = ["folds.kind=stratified", "folds.by=sort", "folds.k=5"]
    return "class-smaller-than-k", tuple(sorted(rare))


@breaks(*JSON)
def groups_too_few(bed: Bed) -> Expected:
    for record in bed.rows:
        record["well"] = bed.rng.choice("abc")
    bed.overrides = ["folds.kind=group", "folds.group=well", "folds.k=5"]
    return "too-few-groups", ()


@breaks(*JSON)
def group_missing(bed: Bed) -> Expected:
    row = bed.pick()
    for number, record in enumerate(bed.rows, 1):
        record["well"] = None if number == row else number % 8
    bed.overrides = ["folds.kind=group", "folds.group=well", "folds.k=4"]
    return "missing-group", (row,)


@breaks(*JSON)
def same_row_on_both_sides(bed: Bed) -> Expected:
    _, rows = repeat(bed, str.lower)
    for number, record in enumerate(bed.rows, 1):
        record["fold"] = number % 3 if number not in rows else rows.index(number)
    bed.overrides = ["folds.kind=column", "folds.by=fold"]
    return "duplicate-across-folds", rows


@breaks(*JSON)
def rows_out_of_time(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1
    for number, record in enumerate(bed.rows, 1):
        record["date"] = f"2024-03-{number if number != row else number - 1:02d}"
    bed.rows[row - 1]["date"] = "2023-01-01"
    bed.overrides = ["folds.kind=time-series", "folds.k=3"]
    return "time-order", (row,)


@breaks(*JSON)
def more_folds_than_rows(bed: Bed) -> Expected:
    bed.overrides = [f"folds.k={bed.rng.randrange(25, 60)}"]
    return "k-larger-than-rows", ()


SETTINGS = (
    ("lora.alpha={}", (2000, 10_000, 0.01), "adapter-scale"), ("train.learning_rate={}", (0.05, 1.0, 1e-8), "learning-rate"),
    ("lora.dropout={}", (0.0001, 0.7, 0.9), "dropout-without-effect"), ("train.warmup={}", (500, 10_000), "warmup-never-ends"),
    ("lora.targets=[q_proj, {}]", ("v_porj", "value", "q_porj", "all_linear"), "target-not-found"),
    ("lint.allow=[{}]", ("duplicate-row", "anything", "double_bos"), "unknown-code"),
    ("folds.repeats={}", (3, 7), "setting-without-effect"), ("folds.test_share={}", (0.3, 0.5), "setting-without-effect"),
)  # fmt: skip


@breaks(*JSON)
def setting(bed: Bed) -> Expected:
    option, values, code = bed.rng.choice(SETTINGS)
    bed.overrides = [option.format(bed.rng.choice(values)), "folds.k=3"]
    return code, ()


@breaks(*JSON)
def packed_to_nothing(bed: Bed) -> Expected:
    bed.overrides = ["data.packing=true", f"train.batch_size={bed.rng.randrange(8, 32)}", "folds.k=3"]
    return "packing-few-rows", ()
