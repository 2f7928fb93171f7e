"""Lane: one adapter being trained (trial × fold, or trial × all rows), its schedule, and what has happened to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches import Unit, lane_seed, pack_rows, steps_an_epoch, unit_order, units_of_step
from crosstune.data.tokens import Tokens
from crosstune.model.attach import LaneSpec
from crosstune.recipe.sections import Evaluate, Lora, Train


class Status(str, Enum):
    """Where a lane stands. Only DONE and STOPPED have scores that count."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # early, as train.stop asked
    FAILED = "failed"
    BROKEN = "broken"  # failed by an exception of its own: there may be no way to feed it
    GIVEN_UP = "given up"  # its trial was given up by the sweep

    @property
    def is_finished(self) -> bool:
        """The lane will take no further step."""
        return self is not Status.RUNNING


@dataclass(frozen=True)
class LaneJob:
    """What a lane is asked to do. Rows are positions into Tokens (from 0); `fold` is None for a fit on all rows."""

    trial: int
    fold: int | None
    lora: Lora
    train: Train
    evaluate: Evaluate
    train_rows: tuple[int, ...]
    held_out: tuple[int, ...]
    targets: tuple[str, ...]  # full names of the layers to adapt
    packing: bool = False
    ends_at: float = 1.0  # share of its steps after which it ends; the schedule stays that of all steps

    @property
    def seed(self) -> int:
        """Seed of this lane's initial adapter, row order and dropout: of (train.seed, fold) alone."""
        return lane_seed(self.train.seed, self.fold)

    @property
    def name(self) -> str:
        """Short name for people: `trial 0 fold 3`."""
        return f"trial {self.trial} " + ("all rows" if self.fold is None else f"fold {self.fold}")

    @property
    def is_optimistic(self) -> bool:
        """The held-out rows decide when to stop or which step is kept, so the score is biased upwards."""
        return self.train.stop is not None and self.train.stop.on == "held_out"

    @property
    def spec(self) -> LaneSpec:
        """What the adapter is made of."""
        return LaneSpec(self.lora, self.targets, self.seed)


@dataclass(frozen=True)
class RowScores:
    """Per-row results of an evaluation: positions into Tokens, summed loss (natural log), targets, targets hit."""

    rows: NDArray[np.int64]
    nll: NDArray[np.float64]
    targets: NDArray[np.int64]
    hits: NDArray[np.int64]

    @property
    def loss(self) -> float:
        """Token mean over all rows; NaN without a target."""
        return float(self.nll.sum() / self.targets.sum()) if self.targets.sum() else math.nan

    @property
    def token_accuracy(self) -> float:
        """Share of targets that were the likeliest token."""
        return float(self.hits.sum() / self.targets.sum()) if self.targets.sum() else math.nan


@dataclass
class Lane:
    """A lane under way. `step` counts the optimizer steps taken (attempted, in fp16)."""

    job: LaneJob
    units: list[Unit]
    stop_rows: tuple[int, ...]
    total_steps: int
    step: int = 0
    status: Status = Status.RUNNING
    reason: str = ""
    failed_step: int | None = None
    losses: list[float] = field(default_factory=list)
    best_step: int = 0
    best_loss: float = math.inf
    without_gain: int = 0

    @classmethod
    def start(cls, job: LaneJob, tokens: Tokens) -> Lane:
        """A lane before its first step: rows kept aside for stopping, rows packed, steps counted."""
        stop_rows: tuple[int, ...] = ()
        rows: Sequence[int] = job.train_rows
        if job.train.stop is not None and job.train.stop.on == "own_rows":
            order = unit_order(job.seed, 2**32, len(rows))  # an epoch number that no training epoch has
            kept = max(1, round(job.train.stop.share * len(rows)))
            stop_rows = tuple(sorted(rows[i] for i in order[:kept]))
            rows = tuple(sorted(rows[i] for i in order[kept:]))
        units: list[Unit] = [(row,) for row in rows]
        if job.packing:
            units = pack_rows(tokens.lengths, rows, tokens.max_tokens)
        epoch = steps_an_epoch(len(units), job.train.batch_size)
        return cls(job, units, stop_rows, job.train.max_steps or math.ceil(job.train.epochs * epoch))

    @property
    def steps_an_epoch(self) -> int:
        """Optimizer steps of one pass over the lane's units."""
        return steps_an_epoch(len(self.units), self.job.train.batch_size)

    @property
    def last_step(self) -> int:
        """The step after which the lane ends: `total_steps`, unless the job ends before its schedule does."""
        return max(1, math.ceil(self.job.ends_at * self.total_steps - 1e-3))  # a share such as 2/3 is rounded

    @property
    def is_fed(self) -> bool:
        """The lane still takes part in passes. A failed lane does until its time is up, with weight 0, so that the
        shapes, and with them every bit of the other lanes, stay as they would have been."""
        return self.step < self.last_step and self.status not in (Status.STOPPED, Status.GIVEN_UP, Status.BROKEN)

    def next_units(self) -> list[Unit]:
        """The units of the next optimizer step; none if the lane is over."""
        return self.units_at(self.step) if self.is_fed else []

    def units_at(self, step: int) -> list[Unit]:
        """The units of any optimizer step; none beyond the last."""
        if not self.units or step >= self.last_step:
            return []
        return units_of_step(self.units, seed=self.job.seed, step=step, batch_size=self.job.train.batch_size)

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self.job.train, self.step, self.total_steps)

    def is_due(self) -> bool:
        """An evaluation is due after the step just taken."""
        every = self.steps_an_epoch if self.job.evaluate.every == "epoch" else self.job.evaluate.every
        return self.step == self.last_step or self.step % every == 0

    def note_stop_loss(self, loss: float) -> bool:
        """Take the loss that decides on stopping; say whether it is the best so far."""
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.without_gain = loss, self.step, 0
            return True
        self.without_gain += 1
        stop = self.job.train.stop
        if stop is not None and self.without_gain >= stop.patience and self.status is Status.RUNNING:
            self.status, self.reason = Status.STOPPED, f"no gain in {self.without_gain} evaluations"
        return False

    def fail(self, reason: str, status: Status = Status.FAILED) -> None:
        """Retire the lane at the step just taken."""
        self.status, self.reason, self.failed_step = status, reason, self.step


def learning_rate(train: Train, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0), as transformers.optimization's schedules of the same names."""
    warmup = math.ceil(train.warmup * total_steps) if train.warmup < 1 else int(train.warmup)
    if step < warmup:
        return train.learning_rate * step / max(1, warmup)
    left = max(1, total_steps - warmup)
    if train.schedule == "linear":
        return train.learning_rate * max(0.0, (total_steps - step) / left)
    if train.schedule == "cosine":
        return train.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * (step - warmup) / left)))
    return train.learning_rate
