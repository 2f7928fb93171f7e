"""A wave that was cut off at any moment and goes on ends in the same bits as one that was left alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from crosstune.errors import RunError
from crosstune.interrupt import Interrupted, Interrupts
from crosstune.model.attach import attached
from crosstune.model.base import Base
from crosstune.progress import Quiet
from crosstune.recipe.sections import Stop
from crosstune.train import wave as wave_module
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.events import LaneEvaluated, LaneFinished, LaneRetired
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.recover import PlanChanged
from crosstune.train.run_wave import run_wave
from crosstune.train.state import Standing, pack_wave
from tests.lanes import Outcome, PlanOf, Shrinking, fold_job, fp32_base, random_tokens, run

TOKENS = random_tokens()


class Crash(Exception):
    """Stands for a process that is gone."""


class Cutting(Quiet):
    """Progress that does something after some step of training."""

    def __init__(self, after: int, do: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.do = after, do

    def advance(self, n: int = 1, **facts: Any) -> None:
        if "losses" in facts:
            self.left -= 1
            if self.left == 0:
                self.do()


@pytest.fixture(scope="module")
def base(tiny: Path) -> Base:
    return fp32_base(tiny)


@pytest.fixture(scope="module")
def jobs(base: Base) -> list[LaneJob]:
    """Three lanes of unlike length and rank: one keeps its best step, one stops early. 10, at most 8, and 8 steps."""
    stop = Stop(share=0.2, patience=1, on="own_rows")
    return [
        fold_job(base, 0),
        fold_job(base, 1, lora={"rank": 2}, stop=stop, keep="best", learning_rate=0.05),
        fold_job(base, 2, epochs=1.6, schedule="constant"),
    ]


@pytest.fixture(scope="module")
def want(base: Base, jobs: list[LaneJob]) -> Outcome:
    """What the lanes report when left alone."""
    return run(base, jobs, TOKENS)


def go(
    base: Base, jobs: Sequence[LaneJob], folder: Path, outcome: Outcome, progress: Any, every: int | str = 1
) -> Interrupts:
    interrupts = progress.interrupts = Interrupts()
    said: list[str] = []
    kept = Checkpoints(folder, every, interrupts, said.append)
    try:
        run_wave(base, jobs, TOKENS, PlanOf(), report=outcome.events.append, progress=progress, checkpoints=kept)
    finally:
        kept.close()
        progress.said = said
    return interrupts


def assert_same(found: Outcome, want: Outcome) -> None:
    """The last word on every lane, and every score on the way, bit for bit."""
    for event in want.events:
        if isinstance(event, LaneFinished):
            twins = [e for e in found.events if isinstance(e, LaneFinished) and e.job == event.job]
            assert twins
            for twin in twins:
                assert (twin.status, twin.reason, twin.steps, twin.kept_step) == (
                    event.status, event.reason, event.steps, event.kept_step,
                )  # fmt: skip
                assert np.array_equal(twin.losses, event.losses, equal_nan=True)
                assert np.array_equal(twin.scores.nll, event.scores.nll)
                assert all(torch.equal(twin.adapter[name], event.adapter[name]) for name in event.adapter)
        if isinstance(event, LaneRetired):
            assert event in found.events
        if isinstance(event, LaneEvaluated):
            twins = [
                e for e in found.events if isinstance(e, LaneEvaluated) and (e.job, e.step) == (event.job, event.step)
            ]
            assert twins
            assert all(np.array_equal(twin.scores.nll, event.scores.nll) for twin in twins)


@pytest.mark.parametrize("step", [1, 4, 5, 8, 9, 10])
def test_interrupted_after_any_step_it_goes_on_to_the_same_bits(
    step: int, base: Base, jobs: list[LaneJob], want: Outcome, tmp_path: Path
) -> None:
    found = Outcome()

    def ask() -> None:
        cutting.interrupts.asked = signal.SIGTERM

    cutting = Cutting(step, ask)
    with pytest.raises(Interrupted) as interrupted:
        go(base, jobs, tmp_path, found, cutting, every="never")
    assert interrupted.value.exit_code == 143
    go(base, jobs, tmp_path, found, Quiet(), every="never")
    assert_same(found, want)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_gone_after_any_step_it_goes_on_from_the_last_checkpoint(
    every: int, base: Base, jobs: list[LaneJob], want: Outcome, tmp_path: Path
) -> None:
    def crash() -> None:
        raise Crash

    for step in range(1, 11, 3):
        found = Outcome()
        with pytest.raises(Crash):
            go(base, jobs, tmp_path / str(step), found, Cutting(step, crash), every=every)
        again = Cutting(10**9, crash)
        go(base, jobs, tmp_path / str(step), found, again, every=every)
        assert 10**9 - again.left == 10 - (step - 1) // every * every  # steps taken anew
        assert_same(found, want)


def test_cut_in_an_evaluation_it_begins_with_that_evaluation(
    base: Base, jobs: list[LaneJob], want: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Outcome()
    progress, calls, real = Quiet(), [0], wave_module.score_lanes

    def asked_while_scoring(*args: Any, **how: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            progress.interrupts.asked = signal.SIGINT
        return real(*args, **how)

    monkeypatch.setattr(wave_module, "score_lanes", asked_while_scoring)
    with pytest.raises(Interrupted) as interrupted:
        go(base, jobs, tmp_path, found, progress, every="never")
    assert interrupted.value.exit_code == 130
    assert not [event for event in found.events if isinstance(event, LaneEvaluated)]
    go(base, jobs, tmp_path, found, Quiet(), every="never")
    assert_same(found, want)


def test_a_lane_that_failed_stays_failed_and_leaves_no_trace_in_a_checkpoint(
    base: Base, jobs: list[LaneJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = wave_module.train_step, [3]

    def poisoned(slots: Any, optimizer: Any, lanes: Any, batches: Any, *run: Any) -> Any:
        if lanes[2].step == broken[0] - 1:
            slots.master_KP[2, :5] = torch.inf
            slots.refresh()
        return real(slots, optimizer, lanes, batches, *run)

    monkeypatch.setattr(wave_module, "train_step", poisoned)
    want, found = run(base, jobs, TOKENS), Outcome()
    assert [(event.job.fold, event.step) for event in want.retired] == [(2, 3)]

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash):
        go(base, jobs, tmp_path, found, Cutting(5, crash))
    for file in tmp_path.glob("*.safetensors"):
        assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in load_file(file).values())
    go(base, jobs, tmp_path, found, Quiet())
    assert_same(found, want)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_goes_on_to_the_same_bits(
    base: Base, jobs: list[LaneJob], want: Outcome, tmp_path: Path
) -> None:
    found = Outcome()

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash):
        go(base, jobs, tmp_path, found, Cutting(6, crash))
    newest = max(tmp_path.glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    again = Quiet()
    go(base, jobs, tmp_path, found, again)
    assert len(again.said) == 1
    assert newest.name in again.said[0]
    assert_same(found, want)


def test_a_checkpoint_of_other_lanes_is_not_taken(base: Base, jobs: list[LaneJob], tmp_path: Path) -> None:
    def crash() -> None:
        raise Crash

    with pytest.raises(Crash):
        go(base, jobs, tmp_path, Outcome(), Cutting(6, crash))
    found = Outcome()
    go(base, jobs[::-1], tmp_path, found, Quiet(), every="never")
    assert_same(found, run(base, jobs[::-1], TOKENS))


def test_a_full_disk_ends_the_wave_with_a_clear_error(
    base: Base, jobs: list[LaneJob], want: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(RunError, match="No space left on device"):
            go(base, jobs, tmp_path, Outcome(), Quiet())
    found = Outcome()
    go(base, jobs, tmp_path, found, Quiet())
    assert_same(found, want)


def test_after_a_smaller_plan_it_goes_on_from_where_the_plan_changed(
    base: Base, jobs: list[LaneJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = wave_module.train_step, [1]

    def no_memory_at_step_4(slots: Any, optimizer: Any, lanes: Any, batches: Any, *run: Any) -> Any:
        if lanes[0].step == 3 and left[0]:
            left[0] = 0
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return real(slots, optimizer, lanes, batches, *run)

    def train(outcome: Outcome, plan: Any, progress: Any) -> None:
        progress.interrupts = Interrupts()
        kept = Checkpoints(tmp_path, "never", progress.interrupts, lambda text: None)
        run_wave(base, jobs, TOKENS, plan, report=outcome.events.append, progress=progress, checkpoints=kept)
        kept.drop()

    def crash() -> None:
        raise Crash

    monkeypatch.setattr(wave_module, "train_step", no_memory_at_step_4)
    want, found = Outcome(), Outcome()
    train(want, Shrinking(), Quiet())
    left[0] = 1
    with pytest.raises(Crash):
        train(found, Shrinking(), Cutting(6, crash))
    smaller = next(event.after for event in found.events if isinstance(event, PlanChanged))
    again = Cutting(10**9, crash)
    train(found, smaller, again)
    assert 10**9 - again.left == 7  # steps 4 to 10, although no checkpoint was due
    assert_same(found, want)


def test_what_was_packed_stays_as_it_was_while_training_goes_on(base: Base, jobs: list[LaneJob]) -> None:
    lanes, standing = [Lane.start(job, TOKENS) for job in jobs], Standing(due=[1])
    with attached(base, [job.spec for job in jobs]) as slots:
        _, meta = pack_wave(slots, LaneAdamW(slots, [job.train for job in jobs]), lanes, standing)
    before = json.dumps(meta)
    lanes[0].losses.append(1.0)
    standing.due.clear()
    assert json.dumps(meta) == before
