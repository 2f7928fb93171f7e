"""The project's own build and training step on meta tensors, traced: what a plan is checked against.

Nothing is loaded and nothing is computed, so any computer can rehearse any model in seconds; and as the functions that
run here are those that train, the plan can't drift from the code. The trace is replayed through a model of CUDA's
caching allocator (`memory/replay.py`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from crosstune.errors import DeviceError
from crosstune.memory.estimate import Settings, outside_bytes
from crosstune.memory.gpus import Machine
from crosstune.memory.plan import Plan
from crosstune.memory.replay import Event, Replay, replay
from crosstune.model import block, elementwise, head
from crosstune.model.attach import Slots, attached
from crosstune.model.attention import attention_name
from crosstune.model.base import DTYPES, Base
from crosstune.train import generate
from crosstune.train.drill import go_through, job_of
from crosstune.train.generate import Prompt
from crosstune.train.graph import Passes, Replayed
from crosstune.train.kernels import STAND_INS, attention_of, temporaries_of
from crosstune.train.quantized import quantize_linears
from crosstune.train.step import DeviceBatch, run_pass
from crosstune.train.trace import META, Tracker
from crosstune.units import bytes_words

# Formulas and rehearsals differ by 3% at most (tests/test_memory_agreement.py), and by fragmentation.
SURE_SHARE = 0.9


@dataclass(frozen=True)
class Rehearsal:
    """A trace of the base, the lanes, two optimizer steps and an evaluation."""

    trace: tuple[Event, ...]
    machine: Machine
    outside_bytes: int  # context and libraries

    def replay(self, *, expandable: bool | None = None, limit: int | None = None) -> Replay:
        """What PyTorch's allocator would show on the device."""
        half = self.machine.cublas_bytes // 2
        expandable = self.machine.expandable if expandable is None else expandable
        return replay(self.trace, expandable=expandable, limit=limit, first=(half, half) if half else ())

    @property
    def used_bytes(self) -> int:
        """What the device would show as used."""
        return self.replay().peak_reserved + self.outside_bytes


def rehearse(
    config: Mapping[str, Any], settings: Settings, machine: Machine, *, passes: int = 2, evaluate_tokens: int = 0
) -> Rehearsal:
    """Two optimizer steps of `passes` passes each, and a batch of an evaluation, as `settings` say.

    `config`: the mapping in the model's config.json.
    """
    tracker = Tracker(temporaries_of(machine), STAND_INS)
    with _traced(tracker, config, settings, machine) as base:
        tracker.mark("base")
        kind = partial(_SaidToBeRecorded, tracker)
        go_through(base, settings, tracker.mark, passes=passes, evaluate_tokens=evaluate_tokens, kind=kind)
    return _rehearsed(tracker, settings, machine)


def rehearse_answers(
    config: Mapping[str, Any], settings: Settings, machine: Machine, *, rows: int, prompt: int, new_tokens: int
) -> Rehearsal:
    """`rows` prompts of each lane, answered together: the prefill and the last token of the longest answer.

    The tokens between are left out: the prompts are longer by as many.
    """
    tracker = Tracker(temporaries_of(machine), STAND_INS, answer=False)
    ids = np.zeros(prompt + new_tokens - 2, np.int32)
    prompts = [Prompt(row, row + 1, ids) for row in range(rows)]
    positions = {"meta": settings.lanes * rows * (len(ids) + 2)}
    with (
        patch.dict(generate.POSITIONS_A_BATCH, positions),
        _traced(tracker, config, settings, machine) as base,
        attached(base, [job_of(base, settings).spec] * settings.lanes) as slots,
        _no_inference_mode(),
    ):
        tracker.mark("lanes")
        lanes, sampling = generate.begin(slots), generate.Sampling(2)
        generate.generate_lanes(lanes, [prompts] * settings.lanes, sampling, pad_id=0, stop_ids=())
        tracker.mark("answers")
    return _rehearsed(tracker, settings, machine)


@contextmanager
def _traced(tracker: Tracker, config: Mapping[str, Any], settings: Settings, machine: Machine) -> Iterator[Base]:
    """The base on meta tensors, and all that is done with it traced."""
    with _as_on(machine, settings.precision), tracker:
        base = meta_base(config, settings, machine)
        tracker.track_module(base.model)
        tracker.trace.append(("begin", 0, 0))
        yield base


def _rehearsed(tracker: Tracker, settings: Settings, machine: Machine) -> Rehearsal:
    trace = tuple(tracker.trace)
    gc.collect()
    return Rehearsal(trace, machine, outside_bytes(settings, machine))


class _SaidToBeRecorded(Passes):
    """A graph's memory without a graph: what its pass allocates comes from the graph's own pool."""

    def __init__(self, tracker: Tracker, *args: Any) -> None:
        super().__init__(*args)
        self._tracker = tracker

    def record(self, given: DeviceBatch) -> Replayed:
        return _Traced(self.slots, given, self._tracker)


class _Traced:
    """A recorded pass as the tracker sees it; torch.cuda.graph empties the cache before it records."""

    def __init__(self, slots: Slots, given: DeviceBatch, tracker: Tracker) -> None:
        self._given = given
        tracker.trace += [("empty", 0, 0), ("capture", 1, 0)]
        self._loss_K = run_pass(slots, given)
        tracker.trace.append(("captured", 1, 0))

    def replay(self, batch: DeviceBatch) -> torch.Tensor:
        self._given.take(batch)
        return self._loss_K


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
        if rehearsal.replay(limit=plan.free_bytes - rehearsal.outside_bytes).fits:
            return replace(plan, peak_bytes=min(rehearsal.used_bytes, plan.free_bytes))
        smaller = plan.smaller() or plan.smaller_evaluation()
        if smaller is None:
            raise DeviceError(
                f"nothing fits: rehearsed, {plan} needs {bytes_words(rehearsal.used_bytes)}",
                f"Set device.lanes to {max(1, plan.lanes // 2)}, or a lower data.max_tokens.",
            )
        plan = smaller
    return plan


def meta_base(config: Mapping[str, Any], settings: Settings, machine: Machine) -> Base:
    """The base as `load_base` would leave it, without data."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    known = AutoConfig.for_model(config["model_type"], **values)
    dtype = DTYPES[settings.precision]
    with META:
        model = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation="sdpa")
    base = Base(model, None, META, dtype, known.model_type)
    if settings.quantization != "none":
        quantize_linears(base, settings.quantization, double_quant=settings.double_quant)
    base.freeze()
    base.attend_as(attention_name(torch.device(machine.kind), dtype))
    return base


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
