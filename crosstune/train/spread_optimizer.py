"""AdamW for lanes whose adapters lie on several devices: one `LaneAdamW` a shard, and one judgement for all.

A lane's gradient norm is that of its whole gradient, and whether its step is clipped, skipped or rescaled is decided
once, from it; so no shard of a lane can move without the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from crosstune.model.attach import Slots
from crosstune.recipe.sections import Train
from crosstune.train.optimizer import Judged, LaneAdamW


@dataclass(frozen=True)
class SpreadJudged(Judged):
    """The judgement on the first device, and the same on each."""

    everywhere: tuple[Judged, ...]


class SpreadAdamW:
    """`LaneAdamW`'s face over one for each shard."""

    def __init__(self, slots: Slots, trains: Sequence[Train]) -> None:
        self.slots = slots
        self.parts = tuple(LaneAdamW(shard, trains) for shard in slots.shards)
        self.scaled = self.parts[0].scaled

    @property
    def taken_K(self) -> Tensor:
        """Steps taken, the same in every shard."""
        return self.parts[0].taken_K

    @property
    def scale_K(self) -> Tensor:
        """Loss scales, the same in every shard."""
        return self.parts[0].scale_K

    @property
    def good_K(self) -> Tensor:
        """Good steps since the loss scale changed, the same in every shard."""
        return self.parts[0].good_K

    def reset(self, k: int, train: Train) -> None:
        """Give lane k's place to another lane."""
        for part in self.parts:
            part.reset(k, train)

    def step(self, loss_K: Tensor, learning_rates: Sequence[float], active_K: Tensor) -> tuple[Tensor, Tensor]:
        """Update the active lanes; return (gradient norm, ok), each (K,)."""
        judged = self.judge(loss_K, active_K)
        self.apply(judged, learning_rates)
        return judged.norm_K, judged.ok_K

    @torch.no_grad()
    def judge(self, loss_K: Tensor, active_K: Tensor) -> SpreadJudged:
        """All that an update needs, brought to every device: nothing is allocated after it."""
        device = loss_K.device
        norms = [torch.linalg.vector_norm(shard.grad_KP, dim=1).to(device) for shard in self.slots.shards]
        norm_K = torch.linalg.vector_norm(torch.stack(norms), dim=0) / self.scale_K
        found = self.parts[0].judge_norm(norm_K, loss_K, active_K)
        everywhere = tuple(_moved(found, shard.device) for shard in self.slots.shards)
        return SpreadJudged(**{one.name: getattr(found, one.name) for one in fields(found)}, everywhere=everywhere)

    def apply(self, judged: SpreadJudged, learning_rates: Sequence[float]) -> None:
        """Update parameters and state in place."""
        for part, there in zip(self.parts, judged.everywhere, strict=True):
            part.apply(there, learning_rates)


def lane_adamw(slots: Slots, trains: Sequence[Train]) -> Any:
    """The optimizer of a wave's lanes: a `LaneAdamW`, or where the base is spread a `SpreadAdamW`."""
    return LaneAdamW(slots, trains) if len(slots.shards) == 1 else SpreadAdamW(slots, trains)


def _moved(judged: Judged, device: torch.device) -> Judged:
    rescaled = judged.rescaled and (judged.rescaled[0].to(device), judged.rescaled[1].to(device))
    return Judged(
        judged.norm_K.to(device), judged.ok_K.to(device), judged.divide_K.to(device), judged.skip_K.to(device), rescaled
    )
