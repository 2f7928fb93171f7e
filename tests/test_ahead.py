"""Case M03: a long row that comes late changes the plan before the first step, or not at all."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from crosstune.progress import Quiet
from crosstune.train import ahead
from crosstune.train.ahead import is_worth_it, largest_pass
from crosstune.train.cutting import Cutting
from crosstune.train.lane import Lane
from crosstune.train.recover import PlanChanged
from crosstune.train.run_wave import run_wave
from crosstune.train.step import step_batches
from tests.lanes import Outcome, Shrinking, fold_job, fp32_base, same_adapter, tokens_of


@dataclass
class Tight(Shrinking):
    """A plan that says that it needs nearly all."""

    peak_bytes: int = 95
    free_bytes: int = 100
    evaluate_tokens: int = 200


class SmallMemory(TorchDispatchMode):
    """No tensor may be larger than `limit`: the fake of an allocator that runs out at the longest row."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.largest = limit, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
                if tensor.untyped_storage().nbytes() > self.limit:
                    raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return out


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


def one_long_row(number=24, longest=180):
    """Row 22 comes in step 2 of every lane at the earliest."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 360, draw.integers(8, 20)).tolist() for _ in range(number)]
    rows[22] = draw.integers(0, 360, longest).tolist()
    return tokens_of(rows)


def jobs_of(base):
    return [fold_job(base, fold, k=3, epochs=2) for fold in range(3)]


def train(base, plan, *, on=("cuda",), mode=None):
    outcome = Outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "AHEAD_ON", set(on))
        with mode or nullcontext():
            run_wave(base, jobs_of(base), one_long_row(), plan, report=outcome.events.append, progress=Quiet())
    return outcome


@pytest.mark.parametrize("flat", [False, True])
def test_no_pass_is_larger_than_the_one_ahead(base, flat):
    tokens = one_long_row()
    lanes = [Lane.start(job, tokens) for job in jobs_of(base)]
    for micro_batch in (1, 2, 4, 9):
        cutting = Cutting(micro_batch, 8, 3 * 184 * micro_batch if flat else 0, 180 if flat else 0)
        most = largest_pass(lanes, tokens, cutting)
        for step in range(lanes[0].last_step):
            for lane in lanes:
                lane.step = step
            for batch in step_batches(lanes, tokens, [1.0] * 3, cutting):
                assert batch.ids_NT.size <= most.ids_NT.size
        for lane in lanes:
            lane.step = 0
    for lane in lanes:
        lane.step = lane.last_step
    assert largest_pass(lanes, tokens, Cutting(2, 8)) is None


def test_it_changes_no_bit_of_a_run(base):
    with_it, without = train(base, Tight(), on=("cuda", "cpu")), train(base, Tight())
    for fold in range(3):
        assert same_adapter(with_it.lane(fold), without.lane(fold))
        assert with_it.lane(fold).losses == without.lane(fold).losses
    assert with_it.wave.tokens == without.wave.tokens and with_it.wave.steps == without.wave.steps


def test_memory_runs_out_before_the_first_step_and_not_in_the_middle(base):
    mode = SmallMemory(1 << 60)
    train(base, Tight(micro_batch=1), mode=mode)
    limit = mode.largest  # what one long row a lane takes; with others beside it it takes more
    late = train(base, Tight(), mode=SmallMemory(limit))
    early = train(base, Tight(), on=("cuda", "cpu"), mode=SmallMemory(limit))
    changed = [[event for event in run.events if isinstance(event, PlanChanged)] for run in (late, early)]
    assert changed[0][-1].step > 0
    assert {event.step for event in changed[1]} == {0}
    assert changed[1][0].doing == "a first pass over the longest rows"
    assert changed[1][-1].after.micro_batch < 4
    planned = train(base, replace(Tight(), micro_batch=changed[1][-1].after.micro_batch))
    for fold in range(3):
        assert same_adapter(early.lane(fold), planned.lane(fold))


def test_a_plan_with_room_to_spare_does_without():
    assert is_worth_it(Tight(), "cuda")
    assert not is_worth_it(Tight(peak_bytes=50), "cuda")
    assert not is_worth_it(Tight(), "cpu")
