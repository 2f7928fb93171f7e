"""What a rehearsal goes through, on any device: recorded passes, two optimizer steps, a batch of an evaluation.

On a GPU it is what `bench/memory.py` reads; on meta tensors (train/rehearse.py) it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from crosstune.data.batches import Batch, PassSize
from crosstune.memory.estimate import Settings
from crosstune.model.attach import Slots, attached
from crosstune.model.base import Base
from crosstune.model.targets import resolve_targets
from crosstune.sections import Evaluate, Lora, Train
from crosstune.train import step as training
from crosstune.train.cutting import Cutting
from crosstune.train.graph import Passes, Replayed
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.step import DeviceBatch
from crosstune.train.trace import Tracker


def go_through(
    base: Base, settings: Settings, mark: Callable[[str], None], *, passes: int = 2, evaluate_tokens: int = 0
) -> None:
    """The steps themselves, on any device: `mark` is told the end of each phase."""
    job = job_of(base, settings)
    with attached(base, [job.spec] * settings.lanes, checkpointed_layers=settings.checkpointed) as slots:
        slots.keep_weights(settings.copies)
        optimizer = LaneAdamW(slots, [job.train] * settings.lanes)
        lanes = [Lane(job, [], (), 2) for _ in range(settings.lanes)]
        mark("lanes")
        batches = [_batch(settings, settings.micro_batch, settings.tokens)] * passes
        graphs = _recorded(slots, settings)
        if graphs is not None:
            short = _batch(settings, settings.micro_batch, graphs.sizes[0].width)
            training.train_step(slots, optimizer, lanes, [short, short], graphs.run)
            mark("graphs")
        with _marked(mark, base, optimizer):
            for _ in range(2):
                training.train_step(slots, optimizer, lanes, batches)
        if evaluate_tokens:
            _evaluate(slots, settings, evaluate_tokens)
            mark("evaluation")


def job_of(base: Base, settings: Settings) -> LaneJob:
    names: str | Sequence[str] = [linear.name for linear in settings.targets] or "all-linear"
    lora = Lora(rank=settings.rank, dropout=0.1 if settings.dropout else 0.0)
    targets = resolve_targets(base, names)
    return LaneJob(0, 0, lora, Train(), Evaluate(), (0,), (), targets)


def _recorded(slots: Slots, settings: Settings) -> Passes | None:
    """Passes that are recorded on a GPU, and on meta tensors said to be. None: there are none, or it is a CPU."""
    if not settings.recorded or slots.base.device.type not in ("cuda", "meta"):
        return None
    rows = settings.micro_batch
    width = -(-settings.recorded // (settings.lanes * rows))
    kind = Passes if slots.base.device.type == "cuda" else _SaidToBeRecorded
    return kind(slots, Cutting(rows), [PassSize(rows, width, rows * (width - 1))], _refuse)


def _refuse(text: str) -> None:
    raise RuntimeError(text)


class _SaidToBeRecorded(Passes):
    """A graph's memory without a graph: what its pass allocates comes from the graph's own pool."""

    def record(self, given: DeviceBatch) -> Replayed:
        (tracker,) = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tracker))
        return _Traced(self.slots, given, tracker)


class _Traced:
    """A recorded pass as the tracker sees it; torch.cuda.graph empties the cache before it records."""

    def __init__(self, slots: Slots, given: DeviceBatch, tracker: Tracker) -> None:
        self._given = given
        tracker.trace += [("empty", 0, 0), ("capture", 1, 0)]
        self._loss_K = training.run_pass(slots, given)
        tracker.trace.append(("captured", 1, 0))

    def replay(self, batch: DeviceBatch) -> torch.Tensor:
        self._given.take(batch)
        return self._loss_K


def _batch(settings: Settings, rows: int, width: int) -> Batch:
    """A pass of rows of `width` tokens, each of which is a target."""
    lanes = settings.lanes
    targets = (lanes, rows * (width - 1))
    keys = np.zeros((lanes, rows * width), np.int32) if settings.dropout else None
    zeros = np.zeros(targets, np.int64)
    return Batch(
        np.zeros((lanes * rows, width), np.int64), None, zeros, zeros, np.zeros(targets, np.float32), zeros, keys,
        lanes * rows * width, PassSize(rows, width, rows * (width - 1)),
    )  # fmt: skip


@torch.no_grad()  # allocates what inference_mode does, which would hide operators inside others from the tracker
def _evaluate(slots: Slots, settings: Settings, tokens: int) -> None:
    """A batch as `score_lanes` makes it."""
    rows = max(1, tokens // (settings.lanes * settings.tokens))
    settings = replace(settings, dropout=False)
    batch = DeviceBatch.of(_batch(settings, rows, settings.tokens), slots.base.device)
    slots.begin_pass(None)
    hidden_NTH = slots.base.hidden(batch.ids_NT)
    training.head_loss(slots.base, hidden_NTH, batch.index_KS, batch.target_KS, batch.weight_KS)


@contextmanager
def _marked(mark: Callable[[str], None], base: Base, optimizer: LaneAdamW) -> Iterator[None]:
    """Mark the ends of forward, head, backward and optimizer."""
    real_loss, real_pass, real_step = training.head_loss, training.run_pass, optimizer.apply

    def loss(*args: Any) -> Any:
        out = real_loss(*args)
        mark("head")
        return out

    def run_pass(*args: Any) -> Any:
        out = real_pass(*args)
        mark("backward")
        return out

    def step(*args: Any) -> Any:
        out = real_step(*args)
        mark("optimizer")
        return out

    def forward_ended(module: nn.Module, args: Any, out: Any) -> None:
        mark("forward")

    hook = base.decoder.register_forward_hook(forward_ended)
    try:
        with (
            patch.object(training, "head_loss", loss),
            patch.object(training, "run_pass", run_pass),
            patch.object(optimizer, "apply", step),
        ):
            yield
    finally:
        hook.remove()
