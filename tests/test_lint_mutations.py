"""Clean files broken in each of the ways of `tests/breaks/`, 2,000 times: each break is found, with its row, and only it."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from crosstune.data.lint import LintReport, lint
from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.tokenizer import load_tokenizer
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data, Model
from tests.breaks import BREAKS, SHAPES, Bed
from tests.lintbed import ALWAYS, found

MUTATIONS = 2000
EACH = math.ceil(MUTATIONS / len(BREAKS))
# What may rightly be found beside the break itself.
BESIDES: dict[str, set[str]] = {
    "unknown_speaker": {"no-assistant-turn"},
    "nobody_answers": {"ends-without-assistant"},
    "system_turn_late": {"ends-without-assistant"},
    "wrongly_decoded": {"control-character"},
    "answer_cut": {"length-outlier"},
    "answer_gone": {"length-outlier"},
    "same_row_on_both_sides": {"duplicate-rows"},
    "two_labels_for_one_question": {"duplicate-rows"},
    "nearly_the_same_row": {"conflicting-answers"},
    "class_too_small": {"label-imbalance"},
    "packed_to_nothing": {"few-steps"},
    "setting": {"few-steps"},
}
WEIGHED = {"foreign-template", "conflicting-answers"}  # how much they weigh depends on the data
RECIPE_SAYS = {"few-steps", "unequal-folds"}  # 24 rows are few


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(Model(name=str(tiny)))


def lint_bed(bed: Bed, folder: Path, tiny: Path, tokenizer: Any) -> LintReport:
    file = folder / f"rows{bed.suffix}"
    file.write_bytes(bed.bytes())
    if bed.overrides:
        tree = {"model": str(tiny), "data": {"path": str(file), **bed.options}, "train": {"batch_size": 1}}
        return lint(Recipe.build(tree, bed.overrides))
    return lint(file, model=tokenizer if bed.needs_tokenizer else None, data=Data(path=str(file), **bed.options))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_beds_are_clean(shape: str, tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    for seed in range(10):
        bed = Bed(shape, Random(seed), needs_tokenizer=True)
        assert found(lint_bed(bed, tmp_path, tiny, tokenizer)) == {}


@pytest.mark.parametrize("name", BREAKS)
def test_each_break_is_found_with_its_row(name: str, tmp_path: Path, tiny: Path, tokenizer: Any) -> None:
    break_it, shapes = BREAKS[name]
    for turn in range(EACH):
        rng = Random(zlib.crc32(f"{name} {turn}".encode()))
        bed = Bed(shapes[turn % len(shapes)], rng)
        code, rows = break_it(bed)
        report = lint_bed(bed, tmp_path, tiny, tokenizer)
        told = found(report)
        place = f"{name}, turn {turn}, shape {bed.shape}: {told}"
        assert code in told, place
        if rows:
            assert set(told[code]) <= set(rows) and set(rows) & set(told[code]), f"{place}, expected rows {rows}"
            if code != "duplicate-across-folds":  # names the held-out side only
                assert told[code] == rows, f"{place}, expected rows {rows}"
        others = told.keys() - {code} - ALWAYS - BESIDES.get(name, set()) - (RECIPE_SAYS if bed.overrides else set())
        loud = {other for other in others if other in found(report, "error", "warning")}
        assert not loud, place
        if code not in WEIGHED:
            assert {finding.severity for finding in report.findings if finding.code == code} == {
                FAULTS[code].severity
            }, place


def test_there_are_as_many_as_promised() -> None:
    assert EACH * len(BREAKS) >= MUTATIONS
