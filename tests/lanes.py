"""What the tests of lanes share: random rows, jobs, and a wave run to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from crosstune.data.tokens import Tokens
from crosstune.model.base import Base, load_base
from crosstune.model.targets import resolve_targets
from crosstune.progress import Quiet
from crosstune.recipe.sections import Evaluate, Lora, Model, Train
from crosstune.train.events import Event, LaneFinished, LaneRetired, WaveFinished
from crosstune.train.lane import LaneJob
from crosstune.train.run_wave import run_wave

NUM_ROWS = 24


def random_tokens(num_rows: int = NUM_ROWS, *, seed: int = 0, longest: int = 30, vocab: int = 360) -> Tokens:
    """Rows of 8 to `longest` random tokens; the second half of each is learned."""
    draw = np.random.default_rng(seed)
    return tokens_of([draw.integers(0, vocab, draw.integers(8, longest + 1)).tolist() for _ in range(num_rows)])


def tokens_of(rows: Sequence[Sequence[int]], learn: Sequence[Sequence[bool]] | None = None) -> Tokens:
    """A Tokens of these ids; without `learn` the second half of a row is learned."""
    learn = learn or [[place >= len(row) // 2 for place in range(len(row))] for row in rows]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Tokens(
        ids=np.concatenate([np.asarray(row, np.int32) for row in rows]),
        learn=np.concatenate([np.asarray(mask, bool) for mask in learn]),
        starts=starts,
        numbers=np.arange(1, len(rows) + 1, dtype=np.int64),
        pad_id=364,
        stop_ids=(368,),
        max_tokens=64,
        fingerprint="test",
        findings=(),
    )


def fp32_base(folder: Path) -> Base:
    """The model in `folder`, fp32 on the CPU."""
    return load_base(Model(name=str(folder)), None, device=torch.device("cpu"), precision="fp32")


def fold_job(
    base: Base, fold: int, *, k: int = 4, num_rows: int = NUM_ROWS, lora: Any = None, trial: int = 0, **train: Any
) -> LaneJob:
    """Fold `fold` of `k`: every k-th row is held out."""
    given = {"rank": 4, "alpha": 8, "dropout": 0.1, **(lora or {})}
    long = {} if "max_steps" in train else {"epochs": 2}
    settings = {**long, "learning_rate": 5e-3, "batch_size": 4, "seed": 7, **train}
    held_out = tuple(range(fold, num_rows, k))
    rows = tuple(row for row in range(num_rows) if row not in held_out)
    section = Lora(**given)
    targets = resolve_targets(base, section.targets)
    return LaneJob(trial, fold, section, Train(**settings), Evaluate(), rows, held_out, targets)


@dataclass
class PlanOf:
    """What a wave reads of a Plan."""

    micro_batch: int = 2
    checkpointed_layers: int = 0
    evaluate_tokens: int = 4096
    peak_bytes: int = 0
    free_bytes: int = 1
    recorded: int = 1
    copies: bool = False


@dataclass
class Shrinking(PlanOf):
    """A plan that knows smaller ones: fewer rows a pass, then recomputed layers, then none."""

    micro_batch: int = 4
    lanes: int = 3

    def smaller(self):
        if self.micro_batch > 1:
            return replace(self, micro_batch=self.micro_batch // 2)
        return replace(self, checkpointed_layers=self.checkpointed_layers + 1) if self.checkpointed_layers < 2 else None

    def smaller_evaluation(self):
        return replace(self, evaluate_tokens=self.evaluate_tokens // 2) if self.evaluate_tokens > 200 else None


@dataclass
class Outcome:
    """What a wave reported."""

    events: list[Event] = field(default_factory=list)

    def lane(self, fold: int, trial: int = 0) -> LaneFinished:
        return next(
            e for e in self.events if isinstance(e, LaneFinished) and (e.job.trial, e.job.fold) == (trial, fold)
        )

    @property
    def retired(self) -> list[LaneRetired]:
        return [event for event in self.events if isinstance(event, LaneRetired)]

    @property
    def wave(self) -> WaveFinished:
        return next(event for event in self.events if isinstance(event, WaveFinished))


def run(base: Base, jobs: Sequence[LaneJob], tokens: Tokens, plan: PlanOf | None = None) -> Outcome:
    """Train `jobs` in one wave."""
    outcome = Outcome()
    run_wave(base, jobs, tokens, plan or PlanOf(), report=outcome.events.append, progress=Quiet())
    return outcome


def same_adapter(one: LaneFinished, other: LaneFinished) -> bool:
    """Bit-equal adapters."""
    return all(torch.equal(one.adapter[name], other.adapter[name]) for name in one.adapter)
