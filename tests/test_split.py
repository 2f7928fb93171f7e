"""A wave for which the smallest plan is too large goes on in halves: the same results, and nothing lost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import crosstune
from crosstune.errors import DeviceError
from crosstune.interrupt import Interrupts
from crosstune.model.attach import Slots
from crosstune.progress import Quiet
from crosstune.recipe.recipe import Recipe
from crosstune.report.score_table import show_scores
from crosstune.train import wave as wave_module
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.events import LaneFinished, WaveFinished
from crosstune.train.recover import PlanChanged, WaveSplit
from crosstune.train.run_wave import run_wave
from crosstune.train.split import halves, join, lane_names, parts_of
from tests.lanes import Outcome, Shrinking, fold_job, fp32_base, random_tokens, run, same_adapter
from tests.tiny import CASES

LANES = 5


@dataclass
class FiveLanes(Shrinking):
    lanes: int = LANES


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


def jobs_of(base):
    """Lanes of different ranks and targets, one with its best step kept and one that ends early."""
    sizes = [
        {"rank": 4},
        {"rank": 2, "targets": ["q_proj"]},
        {"rank": 8, "targets": ["v_proj", "up_proj"]},
        {},
        {"rank": 1},
    ]
    extra = [
        {},
        {"stop": {"share": 0.2, "patience": 9}, "keep": "best"},
        {},
        {"stop": {"share": 0.3, "patience": 1}},
        {},
    ]
    return [fold_job(base, fold, k=LANES, lora=lora, epochs=2, **more) for fold, (lora, more) in enumerate(zip(sizes, extra, strict=True))]  # fmt: skip


class Room:
    """So many lanes fit, from step `after` on, in training or in an evaluation."""

    def __init__(self, lanes, after=0, where="train_step"):
        self.lanes, self.after, self.where, self.calls = lanes, after, where, 0

    def patch(self, monkeypatch):
        real = getattr(wave_module, self.where)

        def limited(slots, *args, **kwargs):
            self.calls += 1
            if self.calls > self.after and slots.num_lanes > self.lanes:
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
            return real(slots, *args, **kwargs)

        monkeypatch.setattr(wave_module, self.where, limited)


class Stop(Exception):
    pass


class EndsAt(Quiet):
    """Raises after so many steps of the process, as a kill would end it."""

    def __init__(self, steps):
        self.left = steps

    def advance(self, n=1, **facts):
        self.left -= "losses" in facts
        if self.left == 0:
            raise Stop


def train(base, monkeypatch, room=None, folder=None, progress=None, plan=None, outcome=None):
    outcome = outcome or Outcome()
    kept = Checkpoints(folder, 1, Interrupts(), lambda text: None) if folder else None
    with monkeypatch.context() as patch:
        if room is not None:
            room.patch(patch)
        try:
            run_wave(
                base, jobs_of(base), random_tokens(), plan or FiveLanes(), report=outcome.events.append,
                progress=progress or Quiet(), checkpoints=kept,
            )  # fmt: skip
        finally:
            if kept is not None:
                kept.wait()
                kept.close()
    return outcome


def splits(outcome):
    return [event for event in outcome.events if isinstance(event, WaveSplit)]


def alike(one, other):
    for fold in range(LANES):
        first, second = one.lane(fold), other.lane(fold)
        assert (first.steps, first.kept_step, first.status) == (second.steps, second.kept_step, second.status)
        np.testing.assert_allclose(first.losses, second.losses, rtol=1e-4)
        np.testing.assert_allclose(first.scores.nll, second.scores.nll, rtol=1e-4, atol=1e-5)
        assert {n: t.shape for n, t in first.adapter.items()} == {n: t.shape for n, t in second.adapter.items()}


@pytest.mark.parametrize("where", ["train_step", "score_lanes"])
@pytest.mark.parametrize(("lanes", "after"), [(3, 0), (3, 4), (1, 2)])
def test_lanes_in_parts_are_those_of_the_whole_wave(base, monkeypatch, where, lanes, after):
    disturbed, whole = train(base, monkeypatch, Room(lanes, after, where)), train(base, monkeypatch)
    alike(disturbed, whole)
    told = splits(disturbed)
    assert [len(part) for part in told[0].parts] == [3, 2]
    assert len(told) == (1 if lanes == 3 else 4)
    assert (
        max(len(part) for split in told for part in split.parts if lanes == 1 and len(split.jobs) == 2)
        if lanes == 1
        else 1
    )
    assert sum(isinstance(event, LaneFinished) for event in disturbed.events) == LANES
    assert sum(isinstance(event, WaveFinished) for event in disturbed.events) == 1
    assert (disturbed.wave.steps, disturbed.wave.tokens) == (whole.wave.steps, whole.wave.tokens)
    assert any(isinstance(event, PlanChanged) for event in disturbed.events)  # every smaller plan was tried first


def test_a_split_is_told_with_the_steps_that_the_wave_had_taken(base, monkeypatch):
    disturbed = train(base, monkeypatch, Room(3, after=3))
    (told,) = splits(disturbed)
    assert (told.step, told.doing) == (3, "a training step")


def test_a_part_is_a_run_with_half_of_the_lanes(base, monkeypatch):
    disturbed = train(base, monkeypatch, Room(3))
    last = next(event.after for event in reversed(disturbed.events) if isinstance(event, PlanChanged))
    for part in splits(disturbed)[0].parts:
        alone = run(base, list(part), random_tokens(), last)
        for job in part:
            one, other = disturbed.lane(job.fold), alone.lane(job.fold)
            np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)
            for name, tensor in one.adapter.items():
                torch.testing.assert_close(tensor, other.adapter[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("end", [1, 2, 3, 4, 6, 9, 14, 17])
def test_a_run_that_is_killed_in_any_part_goes_on_there(base, monkeypatch, tmp_path, end):
    """As a run does it: with the plan that the journal has by then."""
    undisturbed, killed = train(base, monkeypatch, Room(2, 2)), Outcome()
    with pytest.raises(Stop):
        train(base, monkeypatch, Room(2, 2), tmp_path / "kept", EndsAt(end), outcome=killed)
    plans = [event.after for event in killed.events if isinstance(event, PlanChanged)]
    again = train(base, monkeypatch, Room(2, max(0, 3 - end)), tmp_path / "kept", plan=plans[-1] if plans else None)
    ended = [event.job.fold for run in (killed, again) for event in run.events if isinstance(event, LaneFinished)]
    assert set(ended) == set(range(LANES))
    for event in again.events:
        if isinstance(event, LaneFinished):
            assert same_adapter(undisturbed.lane(event.job.fold), event)
            assert undisturbed.lane(event.job.fold).losses == event.losses


def test_one_lane_that_does_not_fit_ends_the_run(base, monkeypatch):
    with pytest.raises(DeviceError, match="nothing left to make smaller") as error:
        train(base, monkeypatch, Room(0))
    assert "data.max_tokens" in error.value.fix


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_for_which_memory_does_not_do_are_set_up_in_parts(base, monkeypatch, lanes):
    disturbed, whole = train(base, monkeypatch, Room(lanes, where="lane_adamw")), train(base, monkeypatch)
    alike(disturbed, whole)
    told = splits(disturbed)
    assert [len(part) for part in told[0].parts] == [3, 2] and len(told) == (1 if lanes == 4 else 2)
    assert {event.doing for event in told} == {"setting up a wave"}
    assert (disturbed.wave.steps, disturbed.wave.tokens) == (whole.wave.steps, whole.wave.tokens)


@pytest.mark.parametrize("end", [1, 4, 9])
def test_a_run_that_is_killed_before_a_part_is_set_up_goes_on_there(base, monkeypatch, tmp_path, end):
    undisturbed = train(base, monkeypatch, Room(2, where="lane_adamw"))
    with pytest.raises(Stop):
        train(base, monkeypatch, Room(2, where="lane_adamw"), tmp_path / "kept", EndsAt(end))
    again = train(base, monkeypatch, Room(2, where="lane_adamw"), tmp_path / "kept")
    for event in again.events:
        if isinstance(event, LaneFinished):
            assert same_adapter(undisturbed.lane(event.job.fold), event)
            assert undisturbed.lane(event.job.fold).losses == event.losses
    assert {event.job.fold for event in again.events if isinstance(event, LaneFinished)} >= {3, 4}


def test_one_lane_that_cannot_be_set_up_ends_the_run_and_leaves_the_base_as_it_was(base, monkeypatch):
    kinds = [type(module) for module in base.model.modules()]
    with pytest.raises(DeviceError, match="out of memory in setting up a wave, of one lane") as error:
        train(base, monkeypatch, Room(0, where="lane_adamw"))
    assert "lora.rank" in error.value.fix
    assert [type(module) for module in base.model.modules()] == kinds


def test_a_wave_is_set_up_without_copies_of_the_base_where_they_do_not_fit(base, monkeypatch):
    def keep_weights(slots, keep):
        if keep:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    monkeypatch.setattr(Slots, "keep_weights", keep_weights)
    monkeypatch.setattr(FiveLanes, "thrifty", lambda self: replace(self, copies=False), raising=False)
    disturbed, whole = train(base, monkeypatch, plan=FiveLanes(copies=True)), train(base, monkeypatch)
    alike(disturbed, whole)
    (told,) = (event for event in disturbed.events if isinstance(event, PlanChanged))
    assert told.doing == "setting up a wave" and told.after == replace(told.before, copies=False)


def test_packed_parts_hold_each_lane_once(base):
    rows = torch.arange(20.0).view(5, 4)
    meta = {"step": 3, "trained": 70, "due": [1, 4], "lanes": [{"name": f"lane {k}"} for k in range(5)]}
    packed = ({"parameters": rows, "best.4": rows[4], "best.4.nll": rows[0], "best.1": rows[1]}, meta)
    one, other = halves(packed)
    assert lane_names(one) == ["lane 0", "lane 1", "lane 2"] and lane_names(other) == ["lane 3", "lane 4"]
    assert torch.equal(other[0]["parameters"], rows[3:]) and torch.equal(other[0]["best.1"], rows[4])
    assert (one[1]["due"], other[1]["due"]) == ([1], [1])
    assert one[1]["trained"] + other[1]["trained"] == 70
    nested = join([join(halves(one)), other])
    assert nested[1]["step"] == 9
    ((first, second),) = [parts_of(nested)]
    assert lane_names(first) == lane_names(one) and lane_names(second) == lane_names(other)
    assert all(torch.equal(tensor, other[0][name]) for name, tensor in second[0].items())


def test_a_run_tells_in_journal_and_table_how_it_went_on(tiny, monkeypatch, tmp_path, capsys):
    """Through the public API, whose plan is a real one; what is trained is what an undisturbed run trains."""
    monkeypatch.setenv("CROSSTUNE_CACHE", "")
    losses = {}
    for name in ("whole", "split"):
        with monkeypatch.context() as patch:
            if name == "split":
                Room(2, 1).patch(patch)
                Room(1, 0, "score_lanes").patch(patch)
            result = crosstune.cross_validate(
                data=str(CASES / "chat24.jsonl"), model=str(tiny), output=str(tmp_path / name), folds={"k": 3},
                train={"epochs": 1, "batch_size": 4}, progress=Quiet(),
            )  # fmt: skip
        losses[name] = result.mean
    assert losses["split"] == pytest.approx(losses["whole"], rel=1e-5)
    assert len(result.adapters) == 3 and not result.failed
    told = result.report["out_of_memory"]
    assert {"a training step", "an evaluation"} <= {event["doing"] for event in told}
    assert next(event["went_on"] for event in told if "lanes" in event["went_on"]) == {"lanes": [2, 1]}
    show_scores(result.report)
    shown = " ".join(capsys.readouterr().out.split())
    assert "out of memory in a training step after step" in shown and "went on with lanes [2, 1]" in shown
    again = crosstune.cross_validate(Recipe.load(tmp_path / "split" / "recipe.yaml"), progress=Quiet())
    assert again.mean == result.mean
