"""Where each lane's numbers lie: flat tensors (K lanes, P numbers) and the places of every layer's A and B in them.

There is one shard, unless the base's layers lie on several devices: then one a device, for the adapters of its layers.
A whole row of a lane, as checkpoints hold it, is the same numbers in the same order however they are spread.

Shapes: K lanes, P numbers of a lane in this shard, R largest rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from crosstune.model.base import Base
from crosstune.model.lanes import Lanes
from crosstune.model.lora import Dropout, Pass


@dataclass(frozen=True)
class Site:
    """One adapted layer: its name, sizes, where its A and B begin in a lane's row of a flat tensor, and in which."""

    name: str
    in_features: int
    out_features: int
    a_start: int
    b_start: int
    place: int = 0


@dataclass(frozen=True)
class Span:
    """The next numbers of a whole row: they are these of a shard."""

    place: int
    start: int
    stop: int


class Shard:
    """The adapters of the layers on one device, and what those layers share while a pass runs.

    `master_KP`, `grad_KP`: fp32. `copy_KP`: the compute type, refreshed once a step (the master itself in fp32).
    """

    def __init__(self, base: Base, device: torch.device, scales: Sequence[float], size: int) -> None:
        self.base, self.device, self.num_lanes, self.size = base, device, len(scales), size
        self.master_KP = torch.zeros(self.num_lanes, size, device=device)
        self.grad_KP = torch.zeros_like(self.master_KP)
        same = base.dtype == torch.float32
        self.copy_KP = self.master_KP if same else torch.zeros_like(self.master_KP, dtype=base.dtype)
        self.now = Pass(torch.tensor(scales, device=device, dtype=base.dtype))
        self._rates: dict[tuple[float, ...], tuple[Tensor, Tensor]] = {}

    def clear(self, k: int) -> None:
        """Lane k's row: zero."""
        self.master_KP[k].zero_()
        self.grad_KP[k].zero_()

    def refresh(self) -> None:
        """Bring the compute copy up to date with the master."""
        if self.copy_KP is not self.master_KP:
            self.copy_KP.copy_(self.master_KP)

    def begin_pass(self, key_KS: Tensor | None, rates: Sequence[float], lanes: Lanes | None = None) -> None:
        """Say which tokens come next; `rates`: each lane's dropout; `lanes`: whose they are, if not in equal blocks."""
        self.now.lanes = lanes or Lanes(self.num_lanes)
        self.now.dropout = None
        if key_KS is not None and any(rates):
            threshold_K, scale_K = self._of_rates(tuple(rates))
            if lanes is not None:  # a token at a time: key (N, 1)
                key_KS, threshold_K, scale_K = key_KS.view(-1, 1), threshold_K[lanes.lane_N], scale_K[lanes.lane_N]
            self.now.dropout = Dropout(key_KS.to(self.device), threshold_K, scale_K)

    def _of_rates(self, rates: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """Thresholds and scales, kept: nothing may come from the host while a CUDA graph is recorded."""
        if rates not in self._rates:
            scale_K = torch.tensor([1 / (1 - rate) for rate in rates], device=self.device, dtype=self.base.dtype)
            self._rates[rates] = (Dropout.thresholds(list(rates), self.device), scale_K)
        return self._rates[rates]


def lay_out(
    sizes: Iterable[tuple[str, tuple[int, int]]], rank: int, place_of: Callable[[str], int]
) -> tuple[list[Site], list[Span]]:
    """Sites in the model's order, and what a whole row is made of.

    The A of layers under one parent lie together, so that those which read one tensor (query, key, value) can be read
    as one matrix.
    """
    sites: list[Site] = []
    spans: list[Span] = []
    ends: dict[int, int] = {}
    for _, group in groupby(sizes, key=lambda named: named[0].rpartition(".")[0]):
        members = list(group)
        place = place_of(members[0][0])
        begin = start = ends.get(place, 0)
        b_start = start + rank * sum(inputs for _, (inputs, _) in members)
        for name, (inputs, outputs) in members:
            sites.append(Site(name, inputs, outputs, start, b_start, place))
            start, b_start = start + rank * inputs, b_start + rank * outputs
        ends[place] = b_start
        if spans and spans[-1].place == place:
            begin = spans.pop().start
        spans.append(Span(place, begin, b_start))
    return sites, spans


def whole(parts: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """One tensor on the CPU, a copy, of a flat tensor of each shard (…, P)."""
    if len(parts) == 1:
        return parts[0].detach().to("cpu", copy=True)
    return torch.cat([parts[span.place][..., span.start : span.stop].detach().cpu() for span in spans], -1)


def put(given: Tensor, parts: Sequence[Tensor], spans: Sequence[Span]) -> None:
    """Write a whole tensor into the shards' own."""
    if len(parts) == 1:
        parts[0].copy_(given)
        return
    start = 0
    for span in spans:
        count = span.stop - span.start
        parts[span.place][..., span.start : span.stop].copy_(given[..., start : start + count])
        start += count
