"""The project's own build and training step on meta tensors, traced: what a plan is checked against.

Nothing is loaded and nothing is computed, so any computer can rehearse any model in seconds; and as the functions that
run here are those that train, the plan can't drift from the code. The trace is replayed through a model of CUDA's
caching allocator (`memory/allocator.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from crosstune.data.batches import Batch, PassSize
from crosstune.errors import DeviceError
from crosstune.memory.allocator import Event, Replay, replay
from crosstune.memory.estimate import Settings
from crosstune.memory.gpus import Machine
from crosstune.memory.plan import Plan
from crosstune.memory.precision import repeats_heads
from crosstune.model import block, elementwise, head
from crosstune.model.attach import Slots, attached, resolve_targets
from crosstune.model.attention import REPEATED, register
from crosstune.model.base import DTYPES, Base
from crosstune.sections import Evaluate, Lora, Train
from crosstune.train import generate
from crosstune.train import step as training
from crosstune.train.generate import Prompt
from crosstune.train.kernels import CPU_TEMPORARIES, CUDA_TEMPORARIES, STAND_INS, attention_of
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.quantized import quantize_linears
from crosstune.train.trace import META, Tracker
from crosstune.units import bytes_words

# Formulas and rehearsals differ by 3% at most (tests/test_memory_agreement.py), and by fragmentation.
SURE_SHARE = 0.9


@dataclass(frozen=True)
class Rehearsal:
    """A trace of the base, the lanes, two optimizer steps and an evaluation."""

    trace: tuple[Event, ...]
    machine: Machine

    def replay(self, *, expandable: bool | None = None, limit: int | None = None) -> Replay:
        """What PyTorch's allocator would show on the device."""
        half = self.machine.cublas_bytes // 2
        expandable = self.machine.expandable if expandable is None else expandable
        return replay(self.trace, expandable=expandable, limit=limit, first=(half, half) if half else ())

    @property
    def used_bytes(self) -> int:
        """What the device would show as used."""
        return self.replay().peak_reserved + self.machine.context_bytes


def rehearse(
    config: Mapping[str, Any], settings: Settings, machine: Machine, *, passes: int = 2, evaluate_tokens: int = 0
) -> Rehearsal:
    """Two optimizer steps of `passes` passes each, and a batch of an evaluation, as `settings` say.

    `config`: the mapping in the model's config.json.
    """
    hidden = CUDA_TEMPORARIES if machine.kind == "cuda" else CPU_TEMPORARIES
    tracker = Tracker(hidden, STAND_INS)
    with _as_on(machine, settings.precision), tracker:
        base = meta_base(config, settings, machine)
        tracker.track_module(base.model)
        tracker.trace.append(("empty", 0, 0))
        tracker.mark("base")
        go_through(base, settings, tracker.mark, passes=passes, evaluate_tokens=evaluate_tokens)
    trace = tuple(tracker.trace)
    gc.collect()
    return Rehearsal(trace, machine)


def rehearse_answers(
    config: Mapping[str, Any], settings: Settings, machine: Machine, *, rows: int, prompt: int, new_tokens: int
) -> Rehearsal:
    """`rows` prompts of each lane, answered together: the prefill and the last token of the longest answer.

    The tokens between are left out: the prompts are longer by as many.
    """
    tracker = Tracker(CUDA_TEMPORARIES if machine.kind == "cuda" else CPU_TEMPORARIES, STAND_INS, answer=False)
    ids = np.zeros(prompt + new_tokens - 2, np.int32)
    prompts = [Prompt(row, row + 1, ids) for row in range(rows)]
    positions = {"meta": settings.lanes * rows * (len(ids) + 2)}
    with _as_on(machine, settings.precision), patch.dict(generate.POSITIONS_A_BATCH, positions), tracker:
        base = meta_base(config, settings, machine)
        tracker.track_module(base.model)
        tracker.trace.append(("empty", 0, 0))
        with attached(base, [_job(base, settings).spec] * settings.lanes) as slots, _no_inference_mode():
            tracker.mark("lanes")
            generate.generate_lanes(
                generate.begin(slots), [prompts] * settings.lanes, generate.Sampling(2), pad_id=0, stop_ids=()
            )
            tracker.mark("answers")
    trace = tuple(tracker.trace)
    gc.collect()
    return Rehearsal(trace, machine)


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """It hides operators inside others from the tracker; no_grad allocates the same."""
    with patch.object(torch, "inference_mode", torch.no_grad):
        yield


def settle(plan: Plan, config: Mapping[str, Any]) -> Plan:
    """Rehearse a plan that is near the device's limit, or whose model the formulas don't know; take smaller ones until
    one fits for sure. Seconds; plans far from the limit are returned as they are.

    Raises DeviceError if even the smallest doesn't fit.
    """
    while plan.peak_bytes > SURE_SHARE * plan.free_bytes or not plan.job.shape.known:
        rehearsal = rehearse(config, plan.widths, plan.job.machine, evaluate_tokens=plan.evaluate_tokens)
        if rehearsal.replay(limit=plan.free_bytes - plan.job.machine.context_bytes).fits:
            return replace(plan, peak_bytes=min(rehearsal.used_bytes, plan.free_bytes))
        smaller = plan.smaller() or plan.smaller_evaluation()
        if smaller is None:
            raise DeviceError(
                f"nothing fits: rehearsed, {plan} needs {bytes_words(rehearsal.used_bytes)}",
                f"Set device.lanes to {max(1, plan.lanes // 2)}, or a lower data.max_tokens.",
            )
        plan = smaller
    return plan


def go_through(
    base: Base, settings: Settings, mark: Callable[[str], None], *, passes: int = 2, evaluate_tokens: int = 0
) -> None:
    """The steps themselves, on any device: `mark` is told the end of each phase."""
    job = _job(base, settings)
    with attached(base, [job.spec] * settings.lanes, checkpointed_layers=settings.checkpointed) as slots:
        optimizer = LaneAdamW(slots, [job.train] * settings.lanes)
        lanes = [Lane(job, [], (), 2) for _ in range(settings.lanes)]
        mark("lanes")
        batches = [_batch(settings, settings.micro_batch, dropout=settings.dropout)] * passes
        with _marked(mark, base, optimizer):
            for _ in range(2):
                training.train_step(slots, optimizer, lanes, batches)
        if evaluate_tokens:
            _evaluate(slots, settings, evaluate_tokens)
            mark("evaluation")


def meta_base(config: Mapping[str, Any], settings: Settings, machine: Machine) -> Base:
    """The base as `load_base` would leave it, without data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    known = AutoConfig.for_model(config["model_type"], **values)
    dtype = DTYPES[settings.precision]
    attention = "sdpa"
    if repeats_heads(machine, settings.precision):
        register()
        attention = REPEATED
    with META:
        model = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation=attention)
    base = Base(model, None, META, dtype, known.model_type)
    if settings.quantization != "none":
        quantize_linears(base, settings.quantization, double_quant=settings.double_quant)
    base.freeze()
    return base


def _job(base: Base, settings: Settings) -> LaneJob:
    names: str | Sequence[str] = [linear.name for linear in settings.targets] or "all-linear"
    lora = Lora(rank=settings.rank, dropout=0.1 if settings.dropout else 0.0)
    targets = resolve_targets(base, names)
    return LaneJob(0, 0, lora, Train(), Evaluate(), (0,), (), targets)


def _batch(settings: Settings, rows: int, *, dropout: bool = False) -> Batch:
    """A pass of the longest rows, each of whose tokens is a target."""
    lanes, width = settings.lanes, settings.tokens
    targets = (lanes, rows * (width - 1))
    keys = np.zeros((lanes, rows * width), np.int32) if dropout else None
    zeros = np.zeros(targets, np.int64)
    return Batch(
        np.zeros((lanes * rows, width), np.int64), None, zeros, zeros, np.zeros(targets, np.float32), zeros, keys,
        lanes * rows * width, PassSize(rows, width, rows * (width - 1)),
    )  # fmt: skip


@torch.no_grad()  # allocates what inference_mode does, which would hide operators inside others from the tracker
def _evaluate(slots: Slots, settings: Settings, tokens: int) -> None:
    """A batch as `score_lanes` makes it."""
    rows = max(1, tokens // (settings.lanes * settings.tokens))
    batch = training.DeviceBatch.of(_batch(settings, rows), slots.base.device)
    slots.begin_pass(None)
    hidden_NTH = slots.base.hidden(batch.ids_NT)
    training.head_loss(slots.base, hidden_NTH, batch.index_KS, batch.target_KS, batch.weight_KS)


@contextmanager
def _as_on(machine: Machine, precision: str) -> Iterator[None]:
    """Let code that asks for the device's type take the branch of this device."""
    with ExitStack() as stack:
        stack.enter_context(attention_of(machine, precision))
        for table in (head.CHUNK_BYTES, block.FUSED_ON):
            stack.enter_context(patch.dict(table, {"meta": table[machine.kind]}))
        kinds = {*elementwise.TRITON_ON, "meta"} if machine.kind == "cuda" else elementwise.TRITON_ON
        stack.enter_context(patch.object(elementwise, "TRITON_ON", kinds))
        yield


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
