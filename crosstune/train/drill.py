"""What a rehearsal goes through, on any device: recorded passes, two optimizer steps, a batch of an evaluation.

On a GPU it is what `bench/memory/readings.py` reads; on meta tensors (train/rehearse.py) it is traced.
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

from crosstune.data.batches import Batch, PassSize
from crosstune.memory.estimate import Settings
from crosstune.model.attach import Slots, attached
from crosstune.model.base import Base
from crosstune.model.targets import resolve_targets
from crosstune.recipe.sections import Evaluate, Lora, Train
from crosstune.train import step as training
from crosstune.train.cutting import Cutting
from crosstune.train.graph import Passes
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.step import DeviceBatch


def go_through(
    base: Base,
    settings: Settings,
    mark: Callable[[str], None],
    *,
    passes: int = 2,
    evaluate_tokens: int = 0,
    kind: Callable[..., Passes] = Passes,
) -> None:
    """The steps themselves, on any device: `mark` is told the end of each phase. `kind`: how passes are recorded."""
    job = job_of(base, settings)
    with attached(base, [job.spec] * settings.lanes, checkpointed_layers=settings.checkpointed) as slots:
        slots.keep_weights(settings.copies)
        optimizer = LaneAdamW(slots, [job.train] * settings.lanes)
        lanes = [Lane(job, [], (), 2) for _ in range(settings.lanes)]
        mark("lanes")
        batches = [_batch(settings, settings.micro_batch, settings.tokens)] * passes
        graphs = _recorded(slots, settings, kind)
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


def _recorded(slots: Slots, settings: Settings, kind: Callable[..., Passes]) -> Passes | None:
    """Passes of the recorded size. None: there are none, or it is a CPU."""
    if not settings.recorded or slots.base.device.type not in ("cuda", "meta"):
        return None
    rows, width = settings.micro_batch, settings.recorded_row
    return kind(slots, Cutting(rows), [PassSize(rows, width, rows * (width - 1))], _refuse)


def _refuse(text: str) -> None:
    raise RuntimeError(text)


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
