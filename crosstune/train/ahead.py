"""Before a wave's first step: its largest pass, which has its longest rows, so that memory runs out now or not at all.

A run that meets its longest row in step 900 would otherwise compute 899 steps with one plan and the rest with another.
The pass changes nothing: its gradient is thrown away, no step is counted, and nothing is drawn from a generator.
"""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.data.batches import Batch
from crosstune.data.tokens import Tokens
from crosstune.memory.plan import Plan
from crosstune.model.attach import Slots
from crosstune.train.cutting import Cutting, steps_of_wave
from crosstune.train.lane import Lane
from crosstune.train.step import DeviceBatch, run_pass

AHEAD_ON = {"cuda"}  # kinds of device; on a CPU a pass takes as long as ten times as many steps on a GPU
TIGHT_SHARE = 0.7  # of the device's memory: a plan that needs less leaves the longest row room enough


def is_worth_it(plan: Plan, device_type: str) -> bool:
    """The pass costs time, and a plan far from the limit doesn't need it."""
    return device_type in AHEAD_ON and plan.peak_bytes > TIGHT_SHARE * plan.free_bytes


def largest_pass(lanes: Sequence[Lane], tokens: Tokens, cutting: Cutting) -> Batch | None:
    """The largest pass that these lanes will make, of the steps that are looked at. None: they will make none."""
    passes = [units for units_K in steps_of_wave(lanes) for units in cutting.cut(units_K, tokens)]
    if not passes or not any(lane.is_fed for lane in lanes):
        return None
    sizes = [cutting.size(units, tokens) for units in passes]
    sides = [size.width * (1 if cutting.most_tokens else size.rows) for size in sizes]  # flat: rows lie in one row
    at = max(range(len(passes)), key=lambda at: (sides[at], sizes[at].targets))
    dropout = [(lane.job.seed, lane.step) for lane in lanes] if any(lane.job.lora.dropout for lane in lanes) else None
    weights = [1.0] * len(lanes)
    return cutting.collate(tokens, passes[at], weights_K=weights, dropout_K=dropout, size=sizes[at])


def run_largest_pass(slots: Slots, lanes: Sequence[Lane], tokens: Tokens, cutting: Cutting) -> None:
    """Forward and backward over the longest rows, for the memory that they take and nothing else."""
    batch = largest_pass(lanes, tokens, cutting)
    if batch is not None:
        run_pass(slots, DeviceBatch.of(batch, slots.base.device))
        slots.zero_gradients()
