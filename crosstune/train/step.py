"""One optimizer step of all lanes: passes forward and backward, then AdamW. Knows nothing of time or files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from crosstune.data.batches import Batch, PassSize, Unit
from crosstune.data.tokens import Tokens
from crosstune.model.attach import Slots
from crosstune.model.base import Base
from crosstune.model.device import pinned_memory
from crosstune.model.head import head_loss
from crosstune.model.lanes import Lanes
from crosstune.model.packed import Rows
from crosstune.train.cutting import Cutting
from crosstune.train.lane import Lane, Status
from crosstune.train.optimizer import LaneAdamW


@dataclass(frozen=True)
class StepResult:
    """What a step did, each (K,): token-mean loss (NaN for a lane that wasn't fed), finite."""

    loss: NDArray[np.float64]
    ok: NDArray[np.bool_]
    num_tokens: int


@dataclass(frozen=True)
class DeviceBatch:
    """A Batch on the device."""

    ids_NT: Tensor
    position_NT: Tensor | None
    index_KS: Tensor
    target_KS: Tensor
    weight_KS: Tensor
    key_KS: Tensor | None
    cuts_R: Tensor | None = None
    ends_K: Tensor | None = None
    spot_KS: Tensor | None = None
    longest: int = 0
    ends: Sequence[int] = ()  # `ends_K` on the host

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        """Copy the arrays over, from pinned memory where that makes the copy asynchronous."""

        def move(array: NDArray[np.generic] | None) -> Tensor | None:
            if array is None:
                return None
            tensor = torch.from_numpy(array)
            if device.type != "cuda":
                return tensor.to(device)
            return pinned_memory(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)

        tensors: dict[str, Any] = {name: move(getattr(batch, name)) for name in TENSORS}
        ends = [] if batch.ends_K is None else batch.ends_K.tolist()
        return cls(**tensors, longest=batch.size.longest, ends=ends)

    def take(self, other: DeviceBatch) -> None:
        """Another pass of the same size, in the memory of this one."""
        for name in TENSORS:
            mine, given = getattr(self, name), getattr(other, name)
            if mine is not None:
                mine.copy_(given, non_blocking=True)

    def hidden(self, base: Base, slots: Slots | None) -> Tensor:
        """Last hidden states (N, T, H); the lanes, if there are any, are told whose tokens these are."""
        rows = lanes = None
        if self.cuts_R is not None and self.ends_K is not None:
            rows, lanes = Rows(self.cuts_R, self.longest), Lanes.flat(self.ends_K, self.ends, self.ids_NT.shape[1])
        if slots is not None:
            slots.begin_pass(self.key_KS, lanes)
        return base.hidden(self.ids_NT, self.position_NT, rows)

    def by_lane(self, of_target_KS: Tensor) -> Tensor:
        """Sums of a number of each target over each lane's, (K,): in one order, so the same bits each time."""
        if self.spot_KS is None:
            return of_target_KS.sum(1)
        ended_S = functional.pad(of_target_KS.flatten(), (0, 1))
        return ended_S[self.spot_KS].sum(1)


TENSORS = tuple(field.name for field in fields(DeviceBatch) if field.name not in ("longest", "ends"))


def step_batches(
    lanes: Sequence[Lane],
    tokens: Tokens,
    scales: Sequence[float],
    cutting: Cutting,
    fit: Callable[[PassSize], PassSize] = lambda size: size,
) -> list[Batch]:
    """The passes of the lanes' next step. A target weighs (loss scale) / (targets of the lane's effective batch).

    `fit`: the size that a pass is padded to, from the one that it needs.
    """
    units_K: list[list[Unit]] = [lane.next_units() for lane in lanes]
    weights = []
    for lane, units, scale in zip(lanes, units_K, scales, strict=True):
        targets = sum(int(tokens.targets[row]) for unit in units for row in unit)
        weights.append(scale / targets if targets and lane.status is Status.RUNNING else 0.0)
    dropout = [(lane.job.seed, lane.step) for lane in lanes] if any(lane.job.lora.dropout for lane in lanes) else None
    return [
        cutting.collate(tokens, units, weights_K=weights, dropout_K=dropout, size=fit(cutting.size(units, tokens)))
        for units in cutting.cut(units_K, tokens)
    ]


def train_step(
    slots: Slots,
    optimizer: LaneAdamW,
    lanes: Sequence[Lane],
    batches: Sequence[Batch],
    run: Callable[[Batch], Tensor] | None = None,
) -> StepResult:
    """Gradients of all passes, one AdamW step a lane, compute copies refreshed. Lanes' own counters are not touched.

    Nothing but the gradient has changed while anything is still to be allocated, so a step that runs out of memory can
    be done again (train/recover.py). `run`: how a pass is run, if not by `run_pass` (train/graph.py).
    """
    device = slots.base.device
    run = run or (lambda batch: run_pass(slots, DeviceBatch.of(batch, device)))
    slots.zero_gradients()
    loss_K = torch.zeros(len(lanes), device=device)
    for batch in batches:
        loss_K += run(batch)
    active_K = torch.tensor([lane.status is Status.RUNNING and lane.is_fed for lane in lanes], device=device)
    loss_K /= optimizer.scale_K
    judged = optimizer.judge(loss_K, active_K)
    told = torch.stack([loss_K, judged.ok_K.float(), active_K.float()]).double()
    optimizer.apply(judged, [lane.learning_rate() for lane in lanes])
    slots.refresh()
    loss, ok, active = told.cpu().numpy()
    return StepResult(np.where(active > 0, loss, np.nan), ok > 0, sum(batch.num_tokens for batch in batches))


def run_pass(slots: Slots, batch: DeviceBatch) -> Tensor:
    """Forward and backward of one pass, added to `grad_KP`. Returns each lane's weighted loss, fp32 (K,)."""
    hidden_NTH = batch.hidden(slots.base, slots)
    out = head_loss(slots.base, hidden_NTH, batch.index_KS, batch.target_KS, batch.weight_KS)
    out.weighted.backward()
    return batch.by_lane(out.nll_KS * batch.weight_KS)
