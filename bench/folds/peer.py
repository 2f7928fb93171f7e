"""A loop over folds as people write it, whatever trains a fold: base loaded once, an adapter put on and taken off.

The clock runs over setting up, training, scoring and taking off. Outside it: rows as token ids, the fold's initial
adapter (so that all contestants start from the same numbers), garbage collection. Nothing is saved.
"""

from __future__ import annotations

import gc
import statistics
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.folds.job import Prepared, set_adapter
from bench.folds.machine import card, emit, now, peaks, start_peak, versions
from crosstune.splits.splits import Fold


@dataclass(frozen=True)
class Style:
    """How a loop is set: rows a pass, passes a step, rows of an evaluation's batch, recomputing."""

    micro_batch: int = 4
    accumulation: int = 1
    evaluation_batch: int = 10
    checkpointing: bool = False
    liger: bool = False
    grouped: bool = False  # steps of rows of like lengths
    padding_free: bool = False  # a batch's rows one after another in one sequence


SMALL = Style(micro_batch=1, accumulation=4, evaluation_batch=1, checkpointing=True)
STYLES = {
    "trl-small": SMALL,
    "trl-best": Style(),
    "trl-liger": Style(liger=True),
    "trl-grouped": Style(grouped=True),
    "trl-free": Style(padding_free=True),
    "peft": Style(),
    "unsloth-small": SMALL,
    "unsloth": Style(),
}


@dataclass
class Counted:
    """Tokens that were computed, and those of them that are no padding."""

    computed: int = 0
    real: int = 0

    def add(self, computed: int, real: int) -> None:
        """One more batch."""
        self.computed, self.real = self.computed + computed, self.real + real

    def waste(self) -> float | None:
        """Share of the computed tokens that is padding."""
        return 1 - self.real / self.computed if self.computed else None


@dataclass
class Peer(ABC):
    """What differs between trainers. One fold after another: ready, set_up, train, evaluate, take_off."""

    model: Any
    style: Style
    adapted: Any = None
    train_tokens: Counted = field(default_factory=Counted)
    evaluate_tokens: Counted = field(default_factory=Counted)

    @abstractmethod
    def ready(self, prepared: Prepared, fold: Fold) -> None:
        """Rows as the trainer takes them. Not timed."""

    @abstractmethod
    def set_up(self) -> None:
        """Put a fresh adapter on the base and make the trainer; `adapted` is the PEFT model."""

    @abstractmethod
    def train(self) -> None:
        """One epoch."""

    @abstractmethod
    def evaluate(self) -> float:
        """Token mean of the loss over the held-out rows."""

    @abstractmethod
    def take_off(self) -> None:
        """Leave the base as it was."""


def run_peer(peer: Peer, name: str, prepared: Prepared, folds: int) -> None:
    """Time `folds` folds; a line each, and one for all."""
    start_peak()
    peer.train_tokens, peer.evaluate_tokens = Counted(), Counted()
    seconds, losses = [], []
    for fold in prepared.folds[:folds]:
        facts = run_fold(peer, prepared, fold)
        seconds.append(facts["seconds"])
        losses.append(facts["loss"])
        emit("fold", contestant=name, tokens=prepared.job.name, fold=fold.index, **facts)
    total, later = len(prepared.folds), seconds[1:] or seconds
    whole = sum(seconds) + (total - len(seconds)) * statistics.median(later)
    emit(
        "result", contestant=name, tokens=prepared.job.name, lanes=1, folds=total, folds_run=len(seconds),
        whole_s=whole, steady_s=total * statistics.median(later), per_fold_s=seconds, losses=losses,
        train_waste=peer.train_tokens.waste(), evaluate_waste=peer.evaluate_tokens.waste(),
        rows=prepared.digest(), **peaks(), card=card(), versions=versions(),
    )  # fmt: skip


def run_fold(peer: Peer, prepared: Prepared, fold: Fold) -> dict[str, Any]:
    """Seconds of each part and the held-out loss."""
    peer.ready(prepared, fold)
    began = now()
    peer.set_up()
    set_up = now()
    set_adapter(peer.adapted, fold.index)
    start = now()
    peer.train()
    trained = now()
    loss = peer.evaluate()
    scored = now()
    peer.take_off()
    ended = now()
    gc.collect()
    parts = {"set_up_s": set_up - began, "train_s": trained - start, "evaluate_s": scored - trained}
    return {
        "seconds": ended - start + set_up - began, **parts, "take_off_s": ended - scored, "loss": loss,
        "steps": prepared.steps(fold),
    }  # fmt: skip


def to_device(batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Without waiting where memory is pinned."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
