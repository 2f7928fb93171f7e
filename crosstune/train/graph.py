"""Passes as CUDA graphs: forward and backward of all lanes recorded once for a size, then replayed.

Launching the two thousand kernels of a pass of an 8B model takes a processor 165 ms, whatever they compute; on an H200
one lane's pass over 4 x 128 tokens computes for 43 ms (`bench/step.py`). A graph launches them all at once.

A graph's sizes are fixed, so passes are padded to one of a few sizes, chosen from all passes that the wave will make so
that the fewest tokens are wasted. Recording takes about as long as three passes, and is done for sizes that come often
enough. Every other pass runs directly, and so do all where nothing can be recorded; the results are the same.

A step's update stays outside: a dozen kernels, whose values (learning rate, who is skipped) the host knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from crosstune.data.batches import Batch, PassSize
from crosstune.errors import first_line
from crosstune.model.attach import Slots
from crosstune.model.device import release
from crosstune.train.cutting import Cutting
from crosstune.train.step import DeviceBatch, run_pass

RECORDING = 3  # passes that recording one takes the time of
MOST_GRAPHS = 6  # of one wave: each keeps its kernels' arguments, a few MB


class Passes:
    """Runs a wave's passes. `fit` says to what size a pass is to be padded, `run` computes it."""

    def __init__(
        self, slots: Slots, cutting: Cutting, uses: Mapping[PassSize, int], say: Callable[[str], None]
    ) -> None:
        self.slots, self.cutting, self.say = slots, cutting, say
        self.sizes = choose_sizes(uses) if slots.is_recordable else []
        self._graphs: dict[PassSize, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.sizes else None

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
        if torch.cuda.mem_get_info(device)[0] < torch.cuda.memory_reserved(device):
            release(device)  # what the pass before held is wanted for the graph's own memory
        try:
            self._graphs[size] = _Graph(self.slots, given, self._pool)
        except RuntimeError as error:
            self.say(f"passes are not recorded as CUDA graphs: {first_line(error)}")
            self.close()

    def close(self) -> None:
        """Give the graphs' memory back."""
        self._graphs, self.sizes, self._pool = {}, [], None


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


def choose_sizes(uses: Mapping[PassSize, int]) -> list[PassSize]:
    """The sizes to record: those for which padding and recording together take the least time.

    Passes that can be padded to one another are sorted by T; runs of neighbours are padded to the run's largest. Which
    runs: dynamic programming over (passes so far, runs so far), the least sum of padded T. A run that isn't recorded
    costs its own T, and the time it then takes more is not known here: RECORDING decides.
    """
    kinds: dict[tuple[int, int], dict[int, list[PassSize]]] = {}
    for size in uses:
        kind = (0, size.longest) if size.longest else (size.rows, 0)
        kinds.setdefault(kind, {}).setdefault(size.width, []).append(size)
    chosen = []
    for by_width in kinds.values():
        widths = sorted(by_width)
        counts = [sum(uses[size] for size in by_width[width]) for width in widths]
        for run in best_runs(widths, counts):
            members = [size for width in widths[run.start : run.stop] for size in by_width[width]]
            if sum(uses[size] for size in members) > RECORDING:
                chosen.append(PassSize(*(max(sizes) for sizes in zip(*map(astuple, members), strict=True))))
    return sorted(chosen)


def best_runs(widths: Sequence[int], uses: Sequence[int]) -> Iterator[range]:
    """Runs of neighbours (places in `widths`, ascending) with the least sum of padded T, at most MOST_GRAPHS."""
    count = [0, *accumulate(uses)]
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, 0)] * len(widths)]
    for _ in range(MOST_GRAPHS):
        before, now = best[-1], [(math.inf, 0)]
        for stop in range(1, len(widths) + 1):
            now.append(
                min(
                    (before[start][0] + widths[stop - 1] * (count[stop] - count[start] + RECORDING), start)
                    for start in range(stop)
                )
            )
        best.append(now)
    stop = len(widths)
    level = min(range(1, len(best)), key=lambda runs: best[runs][stop][0])
    runs = []
    while stop:
        start = best[level][stop][1]
        runs.append(range(start, stop))
        stop, level = start, level - 1
    return reversed(runs)
