"""What memory that a plan leaves is spent on: passes recorded as CUDA graphs, and 16-bit copies of a 4-bit base.

A recorded pass is launched at once (train/graph.py); its graph keeps the pass's memory as long as it lives. A copy of a
4-bit weight is made once a wave, in place of twice a pass: making an 8B model's weights takes an H200 10 ms, a tenth of
a pass of 5 lanes x 4 rows x 128 tokens and a quarter of one lane's. Copies are the same numbers; graphs change results
by no more than the padding of passes to recorded sizes does. Both are the first that is given up when memory runs out.
"""

from __future__ import annotations

from typing import Literal

from crosstune.memory.speed import launch_tokens
from crosstune.memory.widths import Plan

SPARE_SHARE = 0.15  # of all that may be used, left free beside the plan with what is spent


def use_spare(plan: Plan, graphs: bool | Literal["auto"] = "auto") -> Plan:
    """The plan with graphs and copies where there is room. `graphs`: true takes them wherever they fit at all."""
    job, room = plan.job, (1 - SPARE_SHARE) * plan.free_bytes
    if job.machine.kind != "cuda" or plan.layout is not None or not job.shape.fusable:
        return plan
    if graphs is not False and plan.quantization != "int8" and _waits_for_launches(plan):
        recorded = plan.spending(graphs=True)
        if recorded.peak_bytes <= (plan.free_bytes if graphs is True else room):
            plan = recorded
    if plan.quantization == "nf4":
        copied = plan.spending(copies=True)
        if copied.peak_bytes <= room:
            plan = copied
    return plan


def _waits_for_launches(plan: Plan) -> bool:
    """The smallest pass computes for less time than its kernels take to be launched: nothing else is recorded."""
    shape, machine = plan.job.shape, plan.job.machine
    smallest = plan.lanes * plan.micro_batch * int(plan.job.lengths.min())
    return smallest < launch_tokens(shape.layers, shape.block_parameters, machine)
