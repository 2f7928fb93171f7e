"""One optimizer step of all lanes: passes forward and backward, then AdamW. Knows nothing of time or files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crosstune.data.batches import Batch, PassSize, Unit, collate, cut_step, pass_size
from crosstune.data.tokens import Tokens
from crosstune.model.attach import Slots
from crosstune.model.head import head_loss
from crosstune.train.lane import Lane, Status
from crosstune.train.optimizer import LaneAdamW

# Row lengths are rounded up to this many tokens: tensor cores want multiples of 8 (docs.nvidia.com, matmul guide).
LENGTH_MULTIPLE = {"cpu": 1, "mps": 1, "cuda": 8}


@dataclass(frozen=True)
class StepResult:
    """What a step did, each (K,): token-mean loss (NaN for a lane that wasn't fed), gradient norm, finite."""

    loss: NDArray[np.float64]
    grad_norm: NDArray[np.float64]
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

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        """Copy the arrays over, from pinned memory where that makes the copy asynchronous."""

        def move(array: NDArray[np.generic] | None) -> Tensor | None:
            if array is None:
                return None
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return cls(*(move(getattr(batch, field.name)) for field in fields(cls)))  # type: ignore[arg-type]

    def take(self, other: DeviceBatch) -> None:
        """Another pass of the same size, in the memory of this one."""
        for field in fields(self):
            mine, given = getattr(self, field.name), getattr(other, field.name)
            if mine is not None:
                mine.copy_(given, non_blocking=True)


def step_batches(
    lanes: Sequence[Lane],
    tokens: Tokens,
    scales: Sequence[float],
    *,
    micro_batch: int,
    multiple: int,
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
    passes = cut_step(units_K, tokens.lengths, micro_batch)
    return [
        collate(
            tokens, units, weights_K=weights, dropout_K=dropout, size=fit(pass_size(tokens, units, multiple))
        )
        for units in passes
    ]  # fmt: skip


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
    told = torch.stack([loss_K, judged.norm_K, judged.ok_K.float(), active_K.float()]).double()
    optimizer.apply(judged, [lane.learning_rate() for lane in lanes])
    slots.refresh()
    facts = told.cpu().numpy()
    loss = np.where(facts[3] > 0, facts[0], np.nan)
    return StepResult(loss, facts[1], facts[2] > 0, sum(batch.num_tokens for batch in batches))


def run_pass(slots: Slots, batch: DeviceBatch) -> Tensor:
    """Forward and backward of one pass, added to `grad_KP`. Returns each lane's weighted loss, fp32 (K,)."""
    slots.begin_pass(batch.key_KS)
    hidden_NTH = slots.base.hidden(batch.ids_NT, batch.position_NT)
    out = head_loss(slots.base, hidden_NTH, batch.index_KS, batch.target_KS, batch.weight_KS)
    out.weighted.backward()
    return (out.nll_KS * batch.weight_KS).sum(1)
