"""Before a wave's first step: one pass over its longest rows, so that memory runs out now or not at all.

A run that meets its longest row in step 900 would otherwise compute 899 steps with one plan and the rest with another.
The pass changes nothing: its gradient is thrown away, no step is counted, and nothing is drawn from a generator.
"""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.data.batches import Batch, Unit, collate
from crosstune.data.tokens import Tokens
from crosstune.memory.plan import Plan
from crosstune.model.attach import Slots
from crosstune.train.lane import Lane
from crosstune.train.cutting import LENGTH_MULTIPLE
from crosstune.train.step import DeviceBatch, run_pass

AHEAD_ON = {"cuda"}  # kinds of device; on a CPU a pass takes as long as ten times as many steps on a GPU
TIGHT_SHARE = 0.7  # of the device's memory: a plan that needs less leaves the longest row room enough


def is_worth_it(plan: Plan, device_type: str) -> bool:
    """The pass costs time, and a plan far from the limit doesn't need it."""
    return device_type in AHEAD_ON and plan.peak_bytes > TIGHT_SHARE * plan.free_bytes


def longest_pass(lanes: Sequence[Lane], tokens: Tokens, *, micro_batch: int, multiple: int) -> Batch | None:
    """A pass as large as any that these lanes will make: the longest rows of each. None: no lane will make one."""
    units_K = [_longest(lane, tokens, micro_batch) if lane.is_fed else [] for lane in lanes]
    if not any(units_K):
        return None
    dropout = [(lane.job.seed, lane.step) for lane in lanes] if any(lane.job.lora.dropout for lane in lanes) else None
    return collate(tokens, units_K, weights_K=[1.0] * len(lanes), dropout_K=dropout, multiple=multiple)


def run_longest_pass(slots: Slots, lanes: Sequence[Lane], tokens: Tokens, plan: Plan) -> None:
    """Forward and backward over the longest rows, for the memory that they take and nothing else."""
    device = slots.base.device
    multiple = LENGTH_MULTIPLE[device.type]
    batch = longest_pass(lanes, tokens, micro_batch=plan.micro_batch, multiple=multiple)
    if batch is not None:
        run_pass(slots, DeviceBatch.of(batch, device))
        slots.zero_gradients()


def _longest(lane: Lane, tokens: Tokens, count: int) -> list[Unit]:
    rows = min(count, lane.job.train.batch_size)
    return sorted(lane.units, key=lambda unit: -sum(int(tokens.lengths[row]) for row in unit))[:rows]
