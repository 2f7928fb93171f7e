"""Bytes → `Plan`: the fastest settings that fit, found by formulas alone: no torch, no GPU, some milliseconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.errors import DeviceError, ModelError
from crosstune.memory.estimate import Settings
from crosstune.memory.gpus import Machine, this_cpu
from crosstune.memory.layout import Devices
from crosstune.memory.shape import Linear, ModelShape
from crosstune.memory.spare import use_spare
from crosstune.memory.speed import counts_near
from crosstune.memory.ways import ways_to_fit
from crosstune.memory.widths import Job, make_plan
from crosstune.memory.widths import Plan as Plan  # also offered here
from crosstune.recipe.recipe import Recipe
from crosstune.units import bytes_words

# A pass of this many tokens keeps a CPU's cores busy; wider ones take memory and, since their rows differ more in
# length, padding. SmolLM2-135M, 5 lanes, rows of some 50 tokens: a run took 29.0, 25.5, 25.6, 29.7 core seconds with
# 1, 2, 4, 8 rows a lane and pass.
CPU_PASS_TOKENS = 1024


# A plan that leaves room is worth some time: it is neither rehearsed nor in danger of a smaller one in mid-run.
ROOMY_SHARE, ROOMY_COST = 0.85, 1.1


def plan_memory(
    *,
    recipe: Recipe,
    shape: ModelShape,
    lengths: NDArray[np.integer],
    num_lanes: int,
    ranks: Sequence[int],
    free_bytes: int,
    device_kind: str,
    precision: str,
    machine: Machine | None = None,
    devices: Devices | None = None,
) -> Plan:
    """The fastest plan that fits `free_bytes`: all bytes this process may use on the device, the base not yet counted.

    `devices`: those over which the base is spread, each with its own free bytes.

    `lengths`: tokens of each row (of each packed sequence). What recipe.device sets is kept; "auto" is decided.
    `machine` is the device to plan for; default: this computer's CPU, or a GPU of unknown rates.
    Raises DeviceError with the three best ways to fit if nothing does.
    """
    if machine is None and device_kind == "cpu":
        machine = this_cpu()
    machine = machine or Machine(device_kind, device_kind, free_bytes, (8, 0), 100e12, 1e12)
    job = describe(recipe, shape, lengths, num_lanes=num_lanes, ranks=ranks, machine=machine, precision=precision)
    job = replace(job, free_bytes=free_bytes, devices=devices)
    best, least = search(job, recipe)
    if best is None:
        where = "" if least.layout is None else f"; {least.layout}"
        ways = "; ".join(str(way) for way in ways_to_fit(job)[:3])
        raise DeviceError(
            f"nothing fits: the smallest plan needs {bytes_words(least.peak_bytes)} of {machine.name}'s "
            f"{bytes_words(least.free_bytes)} ({least.lanes} lane, {least.micro_batch} row of {job.tokens} tokens"
            f"{where})",
            f"Ways to fit: {ways or 'a smaller model'}.",
        )
    return best


def describe(
    recipe: Recipe,
    shape: ModelShape,
    lengths: NDArray[np.integer],
    *,
    num_lanes: int,
    ranks: Sequence[int],
    machine: Machine,
    precision: str,
) -> Job:
    """The job that a recipe means, with all of the device's memory free. Of swept options the widest counts."""
    like = Settings(
        1, 1, 1, quantization=recipe.model.quantization, double_quant=recipe.model.double_quant, precision=precision,
        rank=max(ranks), targets=_targets(recipe, shape), dropout=any(map(bool, _values(recipe, "lora.dropout"))),
    )  # fmt: skip
    batch_size = max(_values(recipe, "train.batch_size"))
    return Job(shape, machine, machine.total_bytes, num_lanes, batch_size, _steps(recipe, len(lengths)), lengths, like)


def search(job: Job, recipe: Recipe) -> tuple[Plan | None, Plan]:
    """(the best plan that fits, if any, with the nearest faster one that doesn't; the smallest plan there is)."""
    plans = list(_candidates(job, recipe))
    fitting = [plan for plan in plans if plan.fits]
    least = min(plans, key=lambda plan: plan.peak_bytes)
    if not fitting:
        return None, least
    best = _choose(fitting, job)
    faster = [plan for plan in plans if not plan.fits and plan.seconds < best.seconds]
    best = replace(best, larger=min(faster, key=lambda plan: plan.peak_bytes, default=None))
    return use_spare(best, recipe.device.graphs), least


def _candidates(job: Job, recipe: Recipe) -> Iterator[Plan]:
    """For each width nothing recomputed, everything recomputed, and between them the fewest layers that fit."""
    device, layers = recipe.device, job.shape.layers
    lanes_tried = counts_near(job.num_lanes) if device.lanes == "auto" else [min(device.lanes, job.num_lanes)]
    rows_tried = counts_near(job.batch_size)
    if device.micro_batch != "auto":
        rows_tried = [min(device.micro_batch, job.batch_size)]
    for lanes in lanes_tried:
        for micro in rows_tried:
            if device.checkpointing != "auto":
                count = {"none": 0, "all": layers}.get(str(device.checkpointing), device.checkpointing)
                yield make_plan(job, lanes, micro, min(int(count), layers))
                continue
            first, last = make_plan(job, lanes, micro, 0), make_plan(job, lanes, micro, layers)
            yield first
            yield last
            if not first.fits and last.fits:
                yield from _between(first, last)


def _between(first: Plan, last: Plan) -> Iterator[Plan]:
    """Bisection: `first` doesn't fit, `last` does."""
    low, high = first.checkpointed_layers, last.checkpointed_layers
    while high - low > 1:
        middle = (low + high) // 2
        plan = make_plan(first.job, first.lanes, first.micro_batch, middle)
        yield plan
        low, high = (low, middle) if plan.fits else (middle, high)


def _choose(fitting: Sequence[Plan], job: Job) -> Plan:
    """GPU: about the fastest, with the fewest waves. CPU: all lanes together, nothing recomputed, moderate passes."""
    if job.machine.kind == "cuda":
        fastest = min(plan.seconds for plan in fitting)
        # The model of time is no better than 20%, and knows nothing of what each wave costs beside its steps.
        waves = min(plan.waves for plan in fitting if plan.seconds <= 1.2 * fastest)
        together = [plan for plan in fitting if plan.waves == waves]
        fastest = min(plan.seconds for plan in together)
        roomy = [plan for plan in together if plan.peak_bytes <= ROOMY_SHARE * plan.free_bytes]
        if any(plan.seconds <= ROOMY_COST * fastest for plan in roomy):
            together, fastest = roomy, min(plan.seconds for plan in roomy)
        return min((plan for plan in together if plan.seconds <= 1.02 * fastest), key=lambda plan: plan.peak_bytes)
    mean = float(np.mean(job.lengths))

    def order(plan: Plan) -> tuple[float, ...]:
        width = plan.lanes * plan.micro_batch * mean
        return (plan.waves, plan.checkpointed_layers, max(0.0, width - CPU_PASS_TOKENS), -plan.micro_batch)

    return min(fitting, key=order)


def _values(recipe: Recipe, name: str) -> list[Any]:
    """All values that an option may take: the recipe's own and, where it is swept over a list, those."""
    section, key = name.split(".")
    swept = recipe.sweep.get(name)
    own = recipe.model_dump()[section][key]
    return [own, *swept] if isinstance(swept, list) else [own]


def _targets(recipe: Recipe, shape: ModelShape) -> tuple[Linear, ...]:
    """The layers that get an adapter in any trial; all of them where names are patterns or belong elsewhere."""
    found = set()
    for wanted in _values(recipe, "lora.targets"):
        try:
            found |= set(shape.targets(wanted))
        except ModelError:
            found |= set(shape.linears)
    return tuple(linear for linear in shape.linears if linear in found)


def _steps(recipe: Recipe, num_rows: int) -> int:
    """Optimizer steps a lane, taking a fold to train on all but 1/k of the rows."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps
    rows = max(1, round(num_rows * (1 - 1 / recipe.folds.k) * recipe.train.share))
    return max(1, math.ceil(recipe.train.epochs * math.ceil(rows / recipe.train.batch_size)))
