"""`Plan`: how wide a job runs on a device, with its bytes and its time; `smaller()` is the next one down.

A plan never changes what is computed: the effective batch, the row order and the schedule stay; only how many lanes
and rows share a pass, and what is kept or computed again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.memory.block import block_of
from crosstune.memory.estimate import EVALUATE_TOKENS, Settings, estimate, evaluation_bytes
from crosstune.memory.gpus import Machine
from crosstune.memory.layout import Devices, Layout, lay_out
from crosstune.memory.shape import ModelShape
from crosstune.memory.speed import counts_near, launch_tokens, step_seconds
from crosstune.units import bytes_words, seconds_words

# Row lengths are rounded up to this many tokens: tensor cores want multiples of 8 (docs.nvidia.com, matmul guide).
LENGTH_MULTIPLE = {"cpu": 1, "mps": 1, "cuda": 8}


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
    devices: Devices | None = None  # those over which the base is spread; None: it lies on one

    @property
    def tokens(self) -> int:
        """Tokens of the longest row as it is padded: a pass must survive it, whenever it comes."""
        multiple = LENGTH_MULTIPLE[self.machine.kind]
        return max(2, -(-int(np.max(self.lengths)) // multiple) * multiple)


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
    evaluate_tokens: int  # of a batch without autograd: as many as don't raise the peak
    peak_bytes: int
    free_bytes: int
    parts: Mapping[str, int]
    seconds: float
    job: Job = field(repr=False)
    larger: Plan | None = field(default=None, repr=False)  # the nearest faster plan, which doesn't fit
    layout: Layout | None = None  # of a spread base; bytes are then those of the device nearest to its limit
    recorded: int = 0  # tokens of the largest pass that is recorded as a CUDA graph (memory/spare.py); 0: none is
    copies: bool = False  # of a 4-bit base in the compute type (memory/spare.py)

    @property
    def fits(self) -> bool:
        """The device has room for it."""
        return self.peak_bytes <= self.free_bytes

    @property
    def pass_tokens(self) -> int:
        """Tokens of the largest pass, padding included."""
        return self.lanes * self.micro_batch * self.max_tokens

    @property
    def widths(self) -> Settings:
        """The plan as the estimate takes it."""
        return replace(
            self.job.like, lanes=self.lanes, micro_batch=self.micro_batch, tokens=self.max_tokens,
            checkpointed=self.checkpointed_layers, evaluate_tokens=self.evaluate_tokens, recorded=self.recorded,
            copies=self.copies,
        )  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """The plan's choices under the recipe's names."""
        layers = self.job.shape.layers
        words = {0: "none", layers: "all"}.get(self.checkpointed_layers, self.checkpointed_layers)
        return {
            "device.lanes": self.lanes, "device.micro_batch": self.micro_batch, "device.checkpointing": words,
            "device.precision": self.precision, "model.quantization": self.quantization,
            "device.graphs": self.recorded > 0,
        }  # fmt: skip

    def spending(self, *, graphs: bool | None = None, copies: bool | None = None) -> Plan:
        """The same widths with or without graphs and copies. None: as it is."""
        graphs, copies = self.recorded > 0 if graphs is None else graphs, self.copies if copies is None else copies
        made = make_plan(self.job, self.lanes, self.micro_batch, self.checkpointed_layers, graphs=graphs, copies=copies)
        return replace(made, evaluate_tokens=min(made.evaluate_tokens, self.evaluate_tokens), larger=self.larger)

    def thrifty(self) -> Plan | None:
        """The same widths without what costs memory and saves time only: copies go first, then graphs."""
        if self.copies:
            return self.spending(copies=False)
        return self.spending(graphs=False) if self.recorded else None

    def smaller(self) -> Plan | None:
        """The next smaller plan for the same lanes: the fastest that needs at least 5% less. None: no room left.

        The 5% are of what comes and goes with a step; the base and the lanes stay as they are. Copies and graphs go
        first.
        """
        if thrifty := self.thrifty():
            return thrifty
        layers = self.job.shape.layers
        counts = {0, *range(0, layers, max(1, layers // 8)), layers, self.checkpointed_layers}
        tries = [
            make_plan(self.job, self.lanes, micro, checkpointed)
            for micro in counts_near(self.job.batch_size)
            for checkpointed in sorted(counts)
            if micro <= self.micro_batch and checkpointed >= self.checkpointed_layers
        ]
        fixed = ("base", "lanes", "context", "cuBLAS")
        kept = sum(size for name, size in self.parts.items() if name.startswith(fixed))
        enough = self.peak_bytes - max(1, (self.peak_bytes - kept) // 20)
        tries = [plan for plan in tries if plan.peak_bytes <= enough]
        return min(tries, key=lambda plan: (plan.seconds, plan.peak_bytes), default=None)

    def smaller_evaluation(self) -> Plan | None:
        """The same plan with half the tokens in a batch of an evaluation, once copies and graphs are gone.

        None: each lane has one row already.
        """
        if thrifty := self.thrifty():
            return thrifty
        least = self.lanes * self.max_tokens
        if self.evaluate_tokens <= least:
            return None
        return replace(self, evaluate_tokens=max(least, self.evaluate_tokens // 2))

    def __str__(self) -> str:
        count, layers = self.checkpointed_layers, self.job.shape.layers
        again = {0: "nothing recomputed", layers: "all layers recomputed"}.get(
            count, f"{count} of {layers} layers recomputed"
        )
        over = f" over {self.quantization}" if self.quantization != "none" else ""
        waves = f"{self.lanes} of {self.job.num_lanes} lanes a wave ({_count(self.waves, 'wave')})"
        width = f"{_count(self.micro_batch, 'row')} a lane and pass x {self.accumulation}"
        size = f"{bytes_words(self.peak_bytes)} of {bytes_words(self.free_bytes)}"
        where = f", {self.layout}" if self.layout is not None else ""
        spent = ", CUDA graphs" * (self.recorded > 0) + f", {self.precision} copies of the base" * self.copies
        took = f"{size}, about {seconds_words(self.seconds)}"
        return f"{waves}, {width}, {again}, {self.precision}{over}{spent}{where}: {took}"


def make_plan(
    job: Job, lanes: int, micro_batch: int, checkpointed: int, *, graphs: bool = False, copies: bool = False
) -> Plan:
    """The plan with exactly these settings, whether or not it fits."""
    settings = replace(
        job.like, lanes=lanes, micro_batch=micro_batch, tokens=job.tokens, checkpointed=checkpointed, copies=copies
    )
    if graphs:
        launched = launch_tokens(job.shape.layers, job.shape.block_parameters, job.machine)
        settings = replace(settings, recorded=min(settings.pass_tokens, math.ceil(launched)))
    evaluate = evaluation_tokens(*_fullest(job, settings), job.machine)
    settings = replace(settings, evaluate_tokens=evaluate)
    layout, free = None, job.free_bytes
    if job.devices is None:
        found = estimate(job.shape, settings, job.machine)
    else:
        layout, found, free = lay_out(job.shape, settings, job.machine, job.devices)
    waves, accumulation = math.ceil(job.num_lanes / lanes), math.ceil(job.batch_size / micro_batch)
    step = step_seconds(job.shape, settings, job.machine, lengths=job.lengths, batch_size=job.batch_size)
    return Plan(
        lanes, waves, micro_batch, accumulation, checkpointed, settings.quantization, settings.precision, job.tokens,
        evaluate, found.peak_bytes, free, found.parts, waves * job.steps * step, job, layout=layout,
        recorded=settings.recorded, copies=copies,
    )  # fmt: skip


def _fullest(job: Job, settings: Settings) -> tuple[ModelShape, Settings]:
    """The model as the device with the most of its layers sees it."""
    if job.devices is None:
        return job.shape, settings
    layers = math.ceil(job.shape.layers / len(job.devices.names))
    return replace(job.shape, layers=layers), replace(settings, checkpointed=min(settings.checkpointed, layers))


def evaluation_tokens(shape: ModelShape, settings: Settings, machine: Machine) -> int:
    """Of a batch of an evaluation: halved until it needs no more than training does, down to one row a lane."""
    block, least = block_of(shape, settings, machine), settings.lanes * settings.tokens
    training = estimate(shape, replace(settings, evaluate_tokens=0), machine).transient_bytes
    tokens = max(least, EVALUATE_TOKENS[machine.kind])
    while tokens > least and evaluation_bytes(block, tokens, machine.kind) > training:
        tokens = max(least, tokens // 2)
    return tokens


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
