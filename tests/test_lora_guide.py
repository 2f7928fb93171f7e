"""The guide's tables are those of the kept scores, and halving finds a winner as good at half the lane-steps."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from crosstune.sweep.pruning import Halving
from crosstune.sweep.sweep import Sweep

ROOT = Path(__file__).parent.parent


def test_the_tables_are_current():
    page = runpy.run_path(str(ROOT / "docs" / "write_lora_guide.py"))["guide_page"]()
    assert (ROOT / "docs" / "lora-guide.md").read_text(encoding="utf-8") == page, "python docs/write_lora_guide.py"


@pytest.mark.parametrize("run", ["qa-0", "qa-1", "qa-2", "words-0"])
def test_halving_finds_an_equivalent_winner_at_half_the_lane_steps_or_fewer(run):
    losses = np.array(json.loads((ROOT / "bench" / "results" / "lora-guide.json").read_text())["runs"][run]["loss"])
    rule, lanes = Halving(Sweep(prune="halving"), *losses.shape), 0
    for fold in range(5):
        for trial in [trial for trial in range(12) if trial not in rule.given_up()]:
            rule.report(trial, fold, 1, losses[trial, fold], final=True)
            lanes += 1
    kept = [trial for trial in range(12) if trial not in rule.given_up()]
    assert lanes <= losses.size / 2
    assert losses[kept].mean(1).min() <= 1.01 * losses.mean(1).min()
