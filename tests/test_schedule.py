"""Which lanes train next, in runs that are cut short and go on. Lanes are not trained: their scores are made up."""

from __future__ import annotations

import math

import pytest

from crosstune.recipe.recipe import Recipe
from crosstune.store.run import Run
from crosstune.sweep.search import open_search
from crosstune.train.lane import LaneJob
from crosstune.workers.schedule import Schedule

FOLDS = 3


def train(folder, sweep, *, lanes, most_waves=10_000):
    """Go on with the run in `folder`; returns its trials' settings, and whether it came to its end."""
    recipe = Recipe.build({"model": "m", "data": "d", "output": str(folder), "sweep": sweep})
    with Run.open(folder, recipe=recipe, data_hashes=[b"x"], rows=[1]) as run:
        schedule = Schedule(
            run, open_search(recipe, folds=FOLDS), jobs_of, trials={}, lanes=lanes, metric="loss", report=lambda event: None,
        )  # fmt: skip
        for number, wave in enumerate(schedule.waves()):
            if number == most_waves:
                return None
            for job in wave:
                if (job.trial, job.fold) not in run.lanes_over():
                    loss = (math.log10(job.train.learning_rate) + 3) ** 2 + 0.1 * job.fold
                    run.record(
                        "lane_finished", trial=job.trial, fold=job.fold, loss=loss, perplexity=math.exp(loss),
                        token_accuracy=0.5, rows=1, train_rows=2, steps=4, status="done",
                    )  # fmt: skip
            run.record("wave_finished", lanes=[[job.trial, job.fold] for job in wave], tokens=100 * len(wave))
        done = {trial for trial, _ in run.finished_lanes()}
        assert all((trial, fold) in run.finished_lanes() for trial in done for fold in range(FOLDS))
        return [settings["settings"] for settings in run.events("trials")[-1]["trials"]]


def jobs_of(trial):
    recipe = trial.recipe
    return [
        LaneJob(trial.index, fold, recipe.lora, recipe.train, recipe.evaluate, (0,), (1,), ()) for fold in range(FOLDS)
    ]


RATES = {"train.learning_rate": {"log": [1e-5, 1e-1]}}


@pytest.mark.parametrize("lanes", [2, 4, 7])
def test_tpe_goes_on_with_the_same_trials_where_a_trial_lies_in_two_waves(tmp_path, lanes):
    pytest.importorskip("optuna")
    sweep = {**RATES, "kind": "tpe", "trials": 18}
    whole = train(tmp_path / "whole", sweep, lanes=lanes)
    sittings = 1
    while (found := train(tmp_path / "cut", sweep, lanes=lanes, most_waves=2)) is None:
        sittings += 1
    assert sittings > 2 and found == whole


def test_a_token_budget_ends_a_continued_run_where_it_would_have_ended(tmp_path):
    sweep = {**RATES, "trials": 20, "tokens": 700}
    whole = train(tmp_path / "whole", sweep, lanes=4)
    assert len(whole) == 3, "the third begins when 400 tokens are trained, a fourth would at 800"
    while (found := train(tmp_path / "cut", sweep, lanes=4, most_waves=1)) is None:
        pass
    assert found == whole


def test_a_time_budget_counts_earlier_sittings_and_keeps_no_trial_back_that_has_begun(tmp_path):
    sweep = {**RATES, "trials": 20, "hours": 1}
    assert train(tmp_path / "r", sweep, lanes=4, most_waves=2) is None
    recipe = Recipe.build({"model": "m", "data": "d", "output": str(tmp_path / "r"), "sweep": sweep})
    with Run.open(tmp_path / "r", recipe=recipe, data_hashes=[b"x"], rows=[1]) as run:
        run.record("closed", seconds=3600.0)
    begun = 4  # of which the last has no lane trained: it was given out for the wave that was never trained
    assert len(train(tmp_path / "r", sweep, lanes=4)) == begun
