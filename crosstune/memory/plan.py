"""Bytes → `Plan`: the fastest settings that fit, the next smaller ones, and ways to fit when nothing does.

A plan never changes what is computed: the effective batch, the row order and the schedule stay; only how many lanes
and rows share a pass, and what is kept or computed again. Formulas steer the search; it needs neither torch nor a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.errors import DeviceError
from crosstune.memory.estimate import Estimate, Settings, estimate
from crosstune.memory.gpus import MIB, Machine, this_cpu
from crosstune.memory.shape import ModelShape
from crosstune.memory.speed import counts_near, step_seconds
from crosstune.recipe import Recipe
from crosstune.units import bytes_words, seconds_words

# A pass of this many tokens keeps a CPU's cores busy; wider ones only take memory.
CPU_PASS_TOKENS = 4096


@dataclass(frozen=True)
class Job:
    """What a plan may not change: the model, the adapters, the rows, the device."""

    shape: ModelShape
    machine: Machine
    free_bytes: int
    num_lanes: int
    batch_size: int
    steps: int  # optimizer steps a lane
    lengths: NDArray[np.integer] = field(repr=False)
    like: Settings = field(repr=False)  # rank, targets, precision, quantisation

    @property
    def tokens(self) -> int:
        """The longest row: a pass must survive it, whenever it comes."""
        return max(2, int(np.max(self.lengths)))


@dataclass(frozen=True)
class Plan:
    """How wide to run. `fits` is judged on the device's used bytes, fragmentation and context included."""

    lanes: int
    waves: int
    micro_batch: int
    accumulation: int
    checkpointed_layers: int
    quantization: str
    precision: str
    max_tokens: int
    peak_bytes: int
    free_bytes: int
    parts: Mapping[str, int]
    seconds: float
    job: Job = field(repr=False)
    larger: Plan | None = field(default=None, repr=False)  # the nearest faster plan, which doesn't fit
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.free_bytes

    @property
    def settings(self) -> dict[str, Any]:
        """The plan's choices under the recipe's names."""
        layers = self.job.shape.layers
        words = {0: "none", layers: "all"}.get(self.checkpointed_layers, self.checkpointed_layers)
        return {
            "device.lanes": self.lanes, "device.micro_batch": self.micro_batch, "device.checkpointing": words,
            "device.precision": self.precision, "model.quantization": self.quantization,
        }  # fmt: skip

    def smaller(self) -> Plan | None:
        """The next smaller plan for the same lanes: the fastest that needs at least 5% less. None: no room left."""
        layers, batch = self.job.shape.layers, self.job.batch_size
        tries = [
            make_plan(self.job, self.lanes, micro, checkpointed)
            for micro in counts_near(batch)
            for checkpointed in sorted({0, *range(0, layers, max(1, layers // 8)), layers, self.checkpointed_layers})
            if micro <= self.micro_batch and checkpointed >= self.checkpointed_layers
        ]
        tries = [plan for plan in tries if plan.peak_bytes <= self.peak_bytes - self._smallest_gain()]
        return min(tries, key=lambda plan: (plan.seconds, plan.peak_bytes), default=None)

    def _smallest_gain(self) -> int:
        fixed = sum(
            size for name, size in self.parts.items() if name.startswith(("base", "lanes", "context", "cuBLAS"))
        )
        return max(1, (self.peak_bytes - fixed) // 20)

    def __str__(self) -> str:
        recompute = {0: "nothing recomputed", self.job.shape.layers: "all layers recomputed"}.get(
            self.checkpointed_layers, f"{self.checkpointed_layers} of {self.job.shape.layers} layers recomputed"
        )
        return (
            f"{self.lanes} of {self.job.num_lanes} lanes a wave ({self.waves} wave{'s' * (self.waves > 1)}), "
            f"{self.micro_batch} rows a lane and pass x {self.accumulation}, {recompute}, {self.precision}"
            + (f" over {self.quantization}" if self.quantization != "none" else "")
            + f": {bytes_words(self.peak_bytes)} of {bytes_words(self.free_bytes)}, about {seconds_words(self.seconds)}"
        )


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
) -> Plan:
    """The fastest plan that fits `free_bytes`: all bytes this process may use on the device, the base not yet counted.

    `lengths`: tokens of each row (of each packed sequence). What recipe.device sets is kept; "auto" is decided.
    `machine` is the device to plan for; default: this computer's CPU, or a GPU of unknown rates.
    Raises DeviceError with the three best ways to fit if nothing does.
    """
    machine = machine or (
        this_cpu() if device_kind == "cpu" else Machine(device_kind, device_kind, free_bytes, (8, 0), 100e12, 1e12)
    )
    like = Settings(
        1, 1, 1, quantization=recipe.model.quantization, double_quant=recipe.model.double_quant, precision=precision,
        rank=max(ranks), targets=shape.targets(recipe.lora.targets), dropout=recipe.lora.dropout > 0,
    )  # fmt: skip
    job = Job(
        shape, machine, free_bytes, num_lanes, recipe.train.batch_size, _steps(recipe, len(lengths)), lengths, like
    )
    plans = list(_candidates(job, recipe))
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min(plans, key=lambda plan: plan.peak_bytes)
        raise DeviceError(
            f"nothing fits: the smallest plan needs {bytes_words(least.peak_bytes)} of {machine.name}'s "
            f"{bytes_words(free_bytes)} ({least.lanes} lane, {least.micro_batch} row of {job.tokens} tokens)",
            "Ways to fit: " + "; ".join(str(way) for way in ways_to_fit(job, recipe)[:3]) + ".",
        )
    best = _choose(fitting, job)
    faster = [plan for plan in plans if not plan.fits and plan.seconds < best.seconds]
    return replace(best, larger=min(faster, key=lambda plan: plan.peak_bytes, default=None))


def make_plan(job: Job, lanes: int, micro_batch: int, checkpointed: int) -> Plan:
    """The plan with exactly these settings, whether or not it fits."""
    settings = replace(job.like, lanes=lanes, micro_batch=micro_batch, tokens=job.tokens, checkpointed=checkpointed)
    found: Estimate = estimate(job.shape, settings, job.machine)
    waves, accumulation = math.ceil(job.num_lanes / lanes), math.ceil(job.batch_size / micro_batch)
    seconds = (
        waves
        * job.steps
        * step_seconds(job.shape, settings, job.machine, lengths=job.lengths, batch_size=job.batch_size)
    )
    return Plan(
        lanes, waves, micro_batch, accumulation, checkpointed, settings.quantization, settings.precision, job.tokens,
        found.peak_bytes, job.free_bytes, found.parts, seconds, job,
    )  # fmt: skip


def _candidates(job: Job, recipe: Recipe) -> Iterator[Plan]:
    """Every plan worth a look: for each width the fewest checkpointed layers that fit, and the one below."""
    device, layers = recipe.device, job.shape.layers
    lanes_tried = counts_near(job.num_lanes) if device.lanes == "auto" else [min(device.lanes, job.num_lanes)]
    rows_tried = (
        counts_near(job.batch_size) if device.micro_batch == "auto" else [min(device.micro_batch, job.batch_size)]
    )
    for lanes in lanes_tried:
        for micro in rows_tried:
            if device.checkpointing != "auto":
                count = {"none": 0, "all": layers}.get(str(device.checkpointing), device.checkpointing)
                yield make_plan(job, lanes, micro, min(int(count), layers))
                continue
            low, high = 0, layers  # the fewest checkpointed layers that fit lie in (low, high]
            first, last = make_plan(job, lanes, micro, 0), make_plan(job, lanes, micro, layers)
            yield first
            if first.fits:
                continue
            yield last
            while last.fits and high - low > 1:
                middle = (low + high) // 2
                plan = make_plan(job, lanes, micro, middle)
                yield plan
                low, high = (low, middle) if plan.fits else (middle, high)


def _choose(fitting: Sequence[Plan], job: Job) -> Plan:
    """GPU: about the fastest, with the fewest waves. CPU: all lanes together, nothing recomputed, moderate passes."""
    if job.machine.kind == "cuda":
        fastest = min(plan.seconds for plan in fitting)
        near = [plan for plan in fitting if plan.seconds <= 1.1 * fastest]  # the model of time is no better than that
        return min(near, key=lambda plan: (plan.waves, plan.peak_bytes))
    mean = float(np.mean(job.lengths))

    def order(plan: Plan) -> tuple[float, ...]:
        width = plan.lanes * plan.micro_batch * mean
        return (plan.waves, plan.checkpointed_layers, max(0.0, width - CPU_PASS_TOKENS), -plan.micro_batch)

    return min(fitting, key=order)


def _steps(recipe: Recipe, num_rows: int) -> int:
    """Optimizer steps a lane, taking a fold to train on all but 1/k of the rows."""
    if recipe.train.max_steps is not None:
        return recipe.train.max_steps
    rows = max(1, round(num_rows * (1 - 1 / recipe.folds.k) * recipe.train.share))
    return max(1, math.ceil(recipe.train.epochs * math.ceil(rows / recipe.train.batch_size)))


@dataclass(frozen=True)
class Way:
    """A change of the recipe that lets it fit, or saves memory: what, how much, and what it costs."""

    change: str
    options: Mapping[str, Any]
    peak_bytes: int
    saves_bytes: int
    seconds: float
    seconds_factor: float
    fits: bool

    def __str__(self) -> str:
        slower = f"{self.seconds_factor:.1f}x the time" if self.seconds_factor > 1.05 else "no slower"
        return f"{self.change} (saves {bytes_words(self.saves_bytes)}, {slower})"


def ways_to_fit(job: Job, recipe: Recipe, best: Plan | None = None) -> list[Way]:
    """Changes of the recipe, those that fit first, then by how little they cost."""
    least = best or make_plan(job, 1, 1, job.shape.layers)
    ways = []
    for change, options, other in _changes(job, recipe):
        plan = (
            make_plan(other, 1, 1, job.shape.layers)
            if best is None
            else make_plan(other, best.lanes, best.micro_batch, best.checkpointed_layers)
        )
        saves = least.peak_bytes - plan.peak_bytes
        if saves > 16 * MIB or (plan.fits and not least.fits):
            factor = plan.seconds / least.seconds if least.seconds else 1.0
            ways.append(Way(change, options, plan.peak_bytes, saves, plan.seconds, factor, plan.fits))
    return sorted(ways, key=lambda way: (not way.fits, _loss_of_quality(way), -way.saves_bytes))


def _loss_of_quality(way: Way) -> int:
    """Rows cut off lose data, fewer targets lose capacity; a quantised base loses least."""
    order = ("model.quantization", "device.gpus", "lora.rank", "lora.targets", "data.max_tokens")
    return next((place for place, key in enumerate(order) if key in way.options), len(order))


def _changes(job: Job, recipe: Recipe) -> Iterator[tuple[str, dict[str, Any], Job]]:
    def with_like(**changes: Any) -> Job:
        return replace(job, like=replace(job.like, **changes))

    for kind in ("int8", "nf4"):
        if job.like.quantization == "none" or (job.like.quantization, kind) == ("int8", "nf4"):
            yield f"model.quantization={kind}", {"model.quantization": kind}, with_like(quantization=kind)
    if job.like.rank > 8:
        yield "lora.rank=8", {"lora.rank": 8}, with_like(rank=8)
    few = tuple(linear for linear in job.shape.linears if linear.name in ("q_proj", "v_proj", "qkv_proj"))
    if set(few) < set(job.like.targets):
        names = [linear.name for linear in few]
        yield f"lora.targets=[{','.join(names)}]", {"lora.targets": names}, with_like(targets=few)
    shortest = _longest_that_fits(job)
    if shortest is not None:
        cut = int(np.sum(job.lengths > shortest))
        other = replace(job, lengths=np.minimum(job.lengths, shortest))
        yield (
            f"data.max_tokens={shortest}, which cuts {cut} of {len(job.lengths)} rows",
            {"data.max_tokens": shortest},
            other,
        )


def _longest_that_fits(job: Job) -> int | None:
    """The longest row (a multiple of 64 tokens) with which one lane, one row a pass, all layers checkpointed, fits."""
    for tokens in range(job.tokens // 64 * 64, 0, -64):
        other = replace(job, lengths=np.minimum(job.lengths, tokens))
        if make_plan(other, 1, 1, job.shape.layers).fits:
            return tokens if tokens < job.tokens else None
    return None
