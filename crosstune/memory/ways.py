"""Ways to fit: changes of the recipe that save memory, each with the bytes that it saves and the time that it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from crosstune.memory.gpus import GPUS, MIB
from crosstune.memory.widths import Job, Plan, make_plan
from crosstune.units import bytes_words

# What a change costs besides time, least first: a quantised base loses little, another GPU costs money, a lower rank
# and fewer targets take capacity, shorter rows lose data.
_COST = ("model.quantization", "gpu", "lora.rank", "lora.targets", "data.max_tokens")


@dataclass(frozen=True)
class Way:
    """A change of the recipe, or another GPU: what it is, what it saves, what it costs."""

    change: str
    options: Mapping[str, Any]
    peak_bytes: int
    saves_bytes: int
    seconds: float
    seconds_factor: float
    fits: bool

    def __str__(self) -> str:
        if "gpu" in self.options:
            return f"{self.change} (needs {bytes_words(self.peak_bytes)})"
        slower = f"{self.seconds_factor:.1f}x the time" if self.seconds_factor > 1.05 else "no slower"
        return f"{self.change} (saves {bytes_words(self.saves_bytes)}, {slower})"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "change": self.change, "options": dict(self.options), "fits": self.fits, "peak_bytes": self.peak_bytes,
            "saves_bytes": self.saves_bytes, "seconds": self.seconds, "seconds_factor": self.seconds_factor,
        }  # fmt: skip


def ways_to_fit(job: Job, plan: Plan | None = None) -> list[Way]:
    """What would save memory beside `plan` (default: the smallest one): what fits first, then what costs least.

    Two changes together are tried where none fits alone.
    """
    plan = make_plan(job, 1, 1, job.shape.layers) if plan is None else plan.spending(graphs=False, copies=False)
    changes = list(_changes(job))
    ways = [_way(plan, *change) for change in changes]
    if not any(way.fits for way in ways) and len(changes) > 1:
        name, options, other = changes[0]  # the strongest quantisation, with each of the others on top
        ways += [_way(plan, f"{name} {n}", {**options, **o}, both) for n, o, both in _changes(other)]
    ways += _gpus(plan)
    useful = [way for way in ways if way.saves_bytes > 16 * MIB or (way.fits and not plan.fits)]
    return sorted(useful, key=lambda way: (not way.fits, _cost(way), -way.saves_bytes))


def _way(plan: Plan, change: str, options: Mapping[str, Any], job: Job) -> Way:
    other = make_plan(job, plan.lanes, plan.micro_batch, plan.checkpointed_layers)
    factor = other.seconds / plan.seconds if plan.seconds else 1.0
    return Way(change, options, other.peak_bytes, plan.peak_bytes - other.peak_bytes, other.seconds, factor, other.fits)


def _cost(way: Way) -> int:
    return sum(2**place for place, key in enumerate(_COST) if key in way.options)


def _changes(job: Job) -> Iterator[tuple[str, dict[str, Any], Job]]:
    like, shape = job.like, job.shape
    stronger = {"none": ("nf4", "int8"), "int8": ("nf4",), "nf4": ()}[like.quantization]
    for kind in stronger:
        other = replace(job, like=replace(like, quantization=kind))
        yield f"model.quantization={kind}", {"model.quantization": kind}, other
    if like.rank > 8:
        yield "lora.rank=8", {"lora.rank": 8}, replace(job, like=replace(like, rank=8))
    few = tuple(linear for linear in shape.linears if linear.name in ("q_proj", "v_proj", "qkv_proj"))
    if set(few) < set(like.targets):
        names = [linear.name for linear in few]
        other = replace(job, like=replace(like, targets=few))
        yield f"lora.targets=[{','.join(names)}]", {"lora.targets": names}, other
    longest = _longest_that_fits(job)
    if longest is not None:
        cut = int(np.sum(job.lengths > longest))
        other = replace(job, lengths=np.minimum(job.lengths, longest))
        words = f"data.max_tokens={longest} (cuts {cut} of {len(job.lengths)} rows)"
        yield words, {"data.max_tokens": longest}, other


def _longest_that_fits(job: Job) -> int | None:
    """The longest row, in steps of 64, with which one lane and row, all layers recomputed, fits. None: no need."""
    low, high = 0, (job.tokens - 1) // 64  # fits(low) by assumption, fits(high) unknown
    if _fits_at(job, job.tokens):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits_at(job, 64 * middle) else (low, middle - 1)
    return 64 * low or None


def _fits_at(job: Job, tokens: int) -> bool:
    return make_plan(replace(job, lengths=np.minimum(job.lengths, tokens)), 1, 1, job.shape.layers).fits


def _gpus(plan: Plan) -> Iterator[Way]:
    """The smallest listed GPU on which the same plan fits."""
    job = plan.job
    if plan.fits or job.machine.kind != "cuda":
        return
    for name, machine in sorted(GPUS.items(), key=lambda item: item[1].total_bytes):
        other = make_plan(
            replace(job, machine=machine, free_bytes=machine.total_bytes),
            plan.lanes,
            plan.micro_batch,
            plan.checkpointed_layers,
        )
        if other.fits and machine.capability >= job.machine.capability:
            yield Way(f"a GPU like {name}", {"gpu": name}, other.peak_bytes, 0, other.seconds, 1.0, True)
            return
