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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from crosstune.data.batches import Batch, PassSize, cut_step, pass_size
from crosstune.data.tokens import Tokens
from crosstune.errors import first_line
from crosstune.model.attach import Slots
from crosstune.model.device import release
from crosstune.train.lane import Lane
from crosstune.train.step import LENGTH_MULTIPLE, DeviceBatch, run_pass

RECORDING = 3  # passes that recording one takes the time of
MOST_GRAPHS = 6  # of one wave: each keeps its kernels' arguments, a few MB
LOOK_AHEAD = 2000  # steps whose passes are looked at


class Passes:
    """Runs a wave's passes. `fit` says to what size a pass is to be padded, `run` computes it."""

    def __init__(self, slots: Slots, to_come: Mapping[PassSize, int], say: Callable[[str], None]) -> None:
        self.slots, self.say = slots, say
        self.sizes = choose_sizes(to_come) if to_come and slots.is_recordable else []
        self._graphs: dict[PassSize, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.sizes else None

    def fit(self, size: PassSize) -> PassSize:
        """The smallest recorded size that holds this one, or itself."""
        return min((known for known in self.sizes if known.holds(size)), default=size)

    def run(self, batch: Batch) -> Tensor:
        """Forward and backward of one pass, added to the gradient. Returns each lane's weighted loss, fp32 (K,)."""
        given = DeviceBatch.of(batch, self.slots.base.device)
        if (size := batch.size) not in self.sizes or batch.position_NT is not None:
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


def sizes_to_come(lanes: Sequence[Lane], tokens: Tokens, *, micro_batch: int, device_type: str) -> Counter[PassSize]:
    """How often the passes of these lanes' next steps have which size."""
    found: Counter[PassSize] = Counter()
    steps = max((lane.last_step - lane.step for lane in lanes if lane.is_fed), default=0)
    for ahead in range(min(steps, LOOK_AHEAD)):
        units_K = [lane.next_units(ahead) for lane in lanes]
        for units in cut_step(units_K, tokens.lengths, micro_batch):
            found[pass_size(tokens, units, LENGTH_MULTIPLE[device_type])] += 1
    return found


def choose_sizes(to_come: Mapping[PassSize, int]) -> list[PassSize]:
    """The sizes to record: those for which padding and recording together take the least time.

    Passes of the same number of rows are sorted by T; runs of neighbours are padded to the run's largest T and S. Which
    runs: dynamic programming over (passes so far, runs so far), the least sum of padded T. A run that isn't recorded
    costs its own T, and the time it then takes more is not known here: RECORDING decides.
    """
    chosen: list[PassSize] = []
    for rows in {size.rows for size in to_come}:
        uses: Counter[int] = Counter()
        targets: dict[int, int] = {}
        for size, count in to_come.items():
            if size.rows == rows:
                uses[size.width] += count
                targets[size.width] = max(targets.get(size.width, 0), size.targets)
        widths = sorted(uses)
        for run in best_runs(widths, [uses[width] for width in widths]):
            members = widths[run.start : run.stop]
            if sum(uses[width] for width in members) > RECORDING:
                chosen.append(PassSize(rows, members[-1], max(targets[width] for width in members)))
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
