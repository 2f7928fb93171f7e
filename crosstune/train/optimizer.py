"""AdamW for every lane of a wave: PyTorch's own fused kernel, once a lane, over the lane's row of the flat tensor.

Each lane has its own learning rate, decay, clipping, step count, loss scale and finite check. Clipping and the loss
scale are handed to the kernel as its `grad_scale`, a step that must not happen as its `found_inf`, so parameters and
moments are read and written once. State: two fp32 numbers a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from crosstune.model.attach import Slots
from crosstune.model.shards import Shard
from crosstune.recipe.sections import Train

# Loss scaling for fp16, as torch.amp.GradScaler's defaults: start, growth after so many good steps, halving.
FIRST_SCALE, GROWTH_INTERVAL = 2.0**16, 2000


@dataclass(frozen=True)
class Judged:
    """What a step will do, each (K,): gradient norm, finite, divisor of the gradient, whether it is left out."""

    norm_K: Tensor
    ok_K: Tensor
    divide_K: Tensor
    skip_K: Tensor
    rescaled: tuple[Tensor, Tensor] | None  # good steps and loss scales afterwards, in fp16


class LaneAdamW:
    """Moments `m_KP`, `v_KP` (fp32), steps taken `taken_K`, loss scales `scale_K`, `good_K` steps since a change."""

    def __init__(self, slots: Slots | Shard, trains: Sequence[Train]) -> None:
        self.slots = slots
        device, lanes = slots.master_KP.device, slots.num_lanes
        self.m_KP, self.v_KP = torch.zeros_like(slots.master_KP), torch.zeros_like(slots.master_KP)
        self.taken_K = torch.zeros(lanes, device=device)
        self.scaled = slots.base.dtype == torch.float16
        self.scale_K = torch.full((lanes,), FIRST_SCALE if self.scaled else 1.0, device=device)
        self.good_K = torch.zeros(lanes, device=device)
        self.clip_K = torch.tensor([train.max_grad_norm for train in trains], device=device)
        self.kernels = [self._kernel(k, train) for k, train in enumerate(trains)]

    @property
    def parts(self) -> tuple[LaneAdamW, ...]:
        """One a shard (spread_optimizer.py)."""
        return (self,)

    def _kernel(self, k: int, train: Train) -> torch.optim.AdamW:
        parameter = nn.Parameter(self.slots.master_KP[k])
        parameter.grad = self.slots.grad_KP[k]
        kernel = torch.optim.AdamW(
            [parameter],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            eps=train.epsilon,
            weight_decay=train.weight_decay,
            fused=True,
        )
        kernel.state[parameter] = {"step": self.taken_K[k], "exp_avg": self.m_KP[k], "exp_avg_sq": self.v_KP[k]}
        return kernel

    def reset(self, k: int, train: Train) -> None:
        """Give lane k's place to another lane."""
        for tensor in (self.m_KP, self.v_KP, self.taken_K, self.good_K):
            tensor[k].zero_()
        self.scale_K[k] = FIRST_SCALE if self.scaled else 1.0
        self.clip_K[k] = train.max_grad_norm
        self.kernels[k] = self._kernel(k, train)

    def step(self, loss_K: Tensor, learning_rates: Sequence[float], active_K: Tensor) -> tuple[Tensor, Tensor]:
        """Update the active lanes from `grad_KP`; return (gradient norm, ok), each (K,).

        A lane with a non-finite loss or gradient is left as it is, bit for bit, and so is one that isn't active.
        """
        judged = self.judge(loss_K, active_K)
        self.apply(judged, learning_rates)
        return judged.norm_K, judged.ok_K

    @torch.no_grad()
    def judge(self, loss_K: Tensor, active_K: Tensor) -> Judged:
        """All that an update needs. Nothing changes here, and nothing is allocated after it: see train/recover.py."""
        norm_K = torch.linalg.vector_norm(self.slots.grad_KP, dim=1) / self.scale_K
        return self.judge_norm(norm_K, loss_K, active_K)

    @torch.no_grad()
    def judge_norm(self, norm_K: Tensor, loss_K: Tensor, active_K: Tensor) -> Judged:
        """The same from each lane's gradient norm."""
        ok_K = torch.isfinite(norm_K) & torch.isfinite(loss_K)
        # clip_grad_norm_'s rule; a gradient is divided by grad_scale, so its inverse goes in.
        factor_K = (self.clip_K / (norm_K + 1e-6)).clamp(max=1.0)
        divide_K = torch.where(ok_K, self.scale_K / factor_K, torch.ones_like(norm_K))
        skip_K = (~(ok_K & active_K)).float()
        return Judged(norm_K, ok_K, divide_K, skip_K, self._rescaled(ok_K, active_K) if self.scaled else None)

    @torch.no_grad()
    def apply(self, judged: Judged, learning_rates: Sequence[float]) -> None:
        """Update parameters and state in place."""
        for k, kernel in enumerate(self.kernels):
            kernel.param_groups[0]["lr"] = learning_rates[k]
            kernel.grad_scale, kernel.found_inf = judged.divide_K[k], judged.skip_K[k]  # type: ignore[attr-defined]
            kernel.step()
        if judged.rescaled is not None:
            good_K, scale_K = judged.rescaled
            self.good_K.copy_(good_K)
            self.scale_K.copy_(scale_K)

    def _rescaled(self, ok_K: Tensor, active_K: Tensor) -> tuple[Tensor, Tensor]:
        """(good steps, loss scales) after this step."""
        good_K = torch.where(ok_K, self.good_K + active_K, torch.zeros_like(self.good_K))
        grown_K = good_K >= GROWTH_INTERVAL
        factor_K = torch.where(ok_K | ~active_K, torch.ones_like(self.scale_K), torch.full_like(self.scale_K, 0.5))
        factor_K = torch.where(grown_K, torch.full_like(factor_K, 2.0), factor_K)
        return good_K.masked_fill(grown_K, 0), self.scale_K * factor_K
