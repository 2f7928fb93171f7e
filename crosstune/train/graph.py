"""Passes as CUDA graphs: forward and backward of all lanes recorded once for a size, then replayed.

Launching the two thousand kernels of a pass of an 8B model takes a processor 165 ms, whatever they compute; on an H200
one lane's pass over 4 x 128 tokens computes for 43 ms (`bench/step.py`). A graph launches them all at once.

A graph's sizes are fixed, so passes are padded to one of a few sizes, chosen from all passes that the wave will make.
Recording takes about as long as launching a pass and a half; it is done for sizes that come often enough and compute
for less time than their launch takes. Every other pass runs directly, in its own size, and so do all where nothing can
be recorded; the results are the same.

A step's update stays outside: a dozen kernels, whose values (learning rate, who is skipped) the host knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from crosstune.data.batches import Batch, PassSize
from crosstune.errors import first_line
from crosstune.model.attach import Slots
from crosstune.train.cutting import Cutting, launch_of
from crosstune.train.step import DeviceBatch, run_pass

RECORDING = 1.5  # launched passes that recording one takes the time of
MOST_GRAPHS = 6  # of one wave: each keeps its kernels' arguments, a few MB


class Replayed(Protocol):
    """A recorded pass."""

    def replay(self, batch: DeviceBatch) -> Tensor:
        """Forward and backward of another batch of its size. Returns each lane's weighted loss, fp32 (K,)."""
        ...


class Passes:
    """Runs a wave's passes. `fit` says to what size a pass is to be padded, `run` computes it."""

    def __init__(self, slots: Slots, cutting: Cutting, sizes: Sequence[PassSize], say: Callable[[str], None]) -> None:
        self.slots, self.cutting, self.sizes, self.say = slots, cutting, list(sizes), say
        self._graphs: dict[PassSize, Replayed] = {}
        self._pool: Any = None

    def fit(self, size: PassSize) -> PassSize:
        """The smallest recorded size that holds this one, or itself."""
        return min((known for known in self.sizes if known.holds(size)), default=size)

    def run(self, batch: Batch) -> Tensor:
        """Forward and backward of one pass, added to the gradient. Returns each lane's weighted loss, fp32 (K,)."""
        given = DeviceBatch.of(batch, self.slots.base.device)
        if (size := batch.size) not in self.sizes or (batch.position_NT is not None and batch.cuts_R is None):
            return run_pass(self.slots, given)
        if size not in self._graphs:
            loss_K = run_pass(self.slots, given)  # also what a graph needs done before: kernels compiled, caches filled
            self._record(size, given)
            return loss_K
        return self._graphs[size].replay(given)

    def _record(self, size: PassSize, given: DeviceBatch) -> None:
        """Record the size; if that can't be done, go on without graphs and say why."""
        device = self.slots.base.device
        try:
            self._graphs[size] = self.record(given)
        except RuntimeError as error:
            self.say(f"passes are not recorded as CUDA graphs: {first_line(error)}")
            _let_generators_go(device)
            self.close()

    def record(self, given: DeviceBatch) -> Replayed:
        """A pass of this size, to be replayed."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        return _Graph(self.slots, given, self._pool)

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._graphs, self.sizes, self._pool = {}, [], None


def _let_generators_go(device: torch.device) -> None:
    """A recording that fails leaves the device's random generator waiting for its end (torch 2.11): a copy doesn't."""
    generator = torch.cuda.default_generators[device.index or 0]
    generator.graphsafe_set_state(generator.clone_state())


def recorded_sizes(slots: Slots, uses: Mapping[PassSize, int]) -> list[PassSize]:
    """The sizes that are worth recording, of those that a wave's passes have."""
    if not uses:
        return []
    return choose_sizes(uses, lanes=slots.num_lanes, launch=launch_of(slots))


class _Graph:
    """One recorded pass: tensors that it reads, and the one that it writes."""

    def __init__(self, slots: Slots, given: DeviceBatch, pool: Any) -> None:
        self._given, self._graph = given, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._loss_K = run_pass(slots, given)

    def replay(self, batch: DeviceBatch) -> Tensor:
        self._given.take(batch)
        self._graph.replay()
        return self._loss_K


def choose_sizes(uses: Mapping[PassSize, int], *, lanes: int, launch: float) -> list[PassSize]:
    """The sizes to record: those for which launching, padding and recording together take the least time.

    Time is counted in tokens computed. `launch`: the tokens that are computed while a pass is launched kernel by kernel
    (memory/speed.py), so a pass that isn't recorded costs at least that many, and a recording RECORDING times as many.
    Passes that can be padded to one another are sorted by their tokens; runs of neighbours are recorded as one size, or
    not at all. Which runs: dynamic programming over (passes so far, runs so far).

    Decided from all passes of a wave, so that a run that goes on computes what it would have computed.
    """
    kinds: dict[tuple[int, int], dict[int, list[PassSize]]] = {}
    for size in uses:
        kind = (0, size.longest) if size.longest else (size.rows, 0)
        kinds.setdefault(kind, {}).setdefault(size.width, []).append(size)
    chosen = []
    for (rows, _), by_width in kinds.items():
        widths = sorted(by_width)
        each = max(1, rows * lanes)  # tokens of a pass for each of its T
        counts = [sum(uses[size] for size in by_width[width]) for width in widths]
        for run in best_runs([each * width for width in widths], counts, launch):
            members = [size for width in widths[run.start : run.stop] for size in by_width[width]]
            chosen.append(PassSize(*(max(sizes) for sizes in zip(*map(astuple, members), strict=True))))
    return sorted(chosen)


def best_runs(tokens: Sequence[int], uses: Sequence[int], launch: float) -> list[range]:
    """The runs (places in `tokens`, ascending) that are recorded, at most MOST_GRAPHS."""
    count = [0, *accumulate(uses)]
    launched = [0.0, *accumulate(n * max(size, launch) for size, n in zip(tokens, uses, strict=True))]

    def recorded(start: int, stop: int) -> float:
        return (count[stop] - count[start]) * tokens[stop - 1] + RECORDING * launch

    best: list[list[float]] = [launched]  # by runs so far: the least cost of the first passes
    came: list[list[int | None]] = []  # where the last run began, None where the last passes aren't recorded
    for _ in range(MOST_GRAPHS):
        before, now = best[-1], [0.0]
        begun: list[int | None] = [None]
        for stop in range(1, len(tokens) + 1):
            direct = now[stop - 1] + launched[stop] - launched[stop - 1]
            taken, start = min((before[start] + recorded(start, stop), start) for start in range(stop))
            now.append(min(direct, taken))
            begun.append(None if direct <= taken else start)
        best.append(now)
        came.append(begun)
    return _walk_back(best, came)


def _walk_back(best: Sequence[Sequence[float]], came: Sequence[Sequence[int | None]]) -> list[range]:
    stop = len(best[0]) - 1
    level = min(range(len(best)), key=lambda runs: best[runs][stop])
    runs = []
    while stop and level:
        start = came[level - 1][stop]
        if start is None:
            stop -= 1
        else:
            runs.append(range(start, stop))
            stop, level = start, level - 1
    return runs[::-1]
