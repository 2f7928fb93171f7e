"""A wave under way ↔ tensors and a JSON header: all that can't be computed from (seed, lane, step), and nothing else.

Losses go into the header as text, not into a tensor: a lane that failed has a NaN there, and no tensor on the disk may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from crosstune.model.attach import Slots
from crosstune.model.shards import put, whole
from crosstune.train.lane import Lane, RowScores, Status
from crosstune.train.optimizer import LaneAdamW

_OF_LANE = ("step", "reason", "failed_step", "losses", "best_step", "best_loss", "without_gain")
_OF_SCORES = ("rows", "nll", "targets", "hits")


@dataclass
class Standing:
    """How far a wave has come, beside its lanes: steps, tokens, lanes whose evaluation is due, best steps so far."""

    steps: int = 0
    trained: int = 0
    due: list[int] = field(default_factory=list)
    best: dict[int, Tensor] = field(default_factory=dict)  # lane → its best row of master_KP, where keep: best
    best_scores: dict[int, RowScores] = field(default_factory=dict)


def pack_wave(
    slots: Slots, optimizer: LaneAdamW, lanes: Sequence[Lane], standing: Standing
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The wave as tensors (on the CPU) and a header: training goes on while they are written, and changes neither."""
    tensors = {name: whole(parts, slots.spans) for name, parts in _live(slots, optimizer).items()}
    tensors |= {name: copies[0].detach().to("cpu", copy=True) for name, copies in _alike(optimizer).items()}
    for k, best in standing.best.items():
        tensors[f"best.{k}"] = best.detach().to("cpu", copy=True)
        scores = standing.best_scores[k]
        tensors |= {f"best.{k}.{name}": torch.from_numpy(getattr(scores, name).copy()) for name in _OF_SCORES}
    meta = {
        "step": standing.steps,
        "trained": standing.trained,
        "due": standing.due,
        "lanes": [
            {"name": lane.job.name, "status": lane.status.value, **{name: getattr(lane, name) for name in _OF_LANE}}
            for lane in lanes
        ],
    }
    return tensors, deepcopy(meta)


def unpack_wave(
    slots: Slots, optimizer: LaneAdamW, lanes: Sequence[Lane], packed: tuple[Mapping[str, Tensor], Mapping[str, Any]]
) -> Standing | None:
    """Put a packed wave back, bit for bit, and say how far it had come; None, and nothing touched, if it is another."""
    tensors, meta = packed
    live, alike = _live(slots, optimizer), _alike(optimizer)
    shapes = {**dict.fromkeys(live, (slots.num_lanes, slots.size)), **dict.fromkeys(alike, (slots.num_lanes,))}
    same_lanes = [of_lane["name"] for of_lane in meta["lanes"]] == [lane.job.name for lane in lanes]
    if not same_lanes or any(name not in tensors or tensors[name].shape != shapes[name] for name in shapes):
        return None
    with torch.no_grad():
        for name, parts in live.items():
            put(tensors[name], parts, slots.spans)
        for name, copies in alike.items():
            for copy in copies:
                copy.copy_(tensors[name])
    slots.refresh()
    for lane, of_lane in zip(lanes, meta["lanes"], strict=True):
        lane.status = Status(of_lane["status"])
        for name in _OF_LANE:
            setattr(lane, name, of_lane[name])
    standing = Standing(meta["step"], meta["trained"], list(meta["due"]))
    for k in range(len(lanes)):
        if f"best.{k}" in tensors:
            standing.best[k] = tensors[f"best.{k}"].to(slots.base.device)
            standing.best_scores[k] = RowScores(*(tensors[f"best.{k}.{name}"].numpy() for name in _OF_SCORES))
    return standing


def _live(slots: Slots, optimizer: LaneAdamW) -> dict[str, list[Tensor]]:
    """Tensors of (lanes, numbers), by shard."""
    return {
        "parameters": [shard.master_KP for shard in slots.shards],
        "m": [part.m_KP for part in optimizer.parts],
        "v": [part.v_KP for part in optimizer.parts],
    }


def _alike(optimizer: LaneAdamW) -> dict[str, list[Tensor]]:
    """Tensors of (lanes,), the same for every shard."""
    parts = optimizer.parts
    return {
        "taken": [part.taken_K for part in parts],
        "loss_scale": [part.scale_K for part in parts],
        "good_steps": [part.good_K for part in parts],
    }
