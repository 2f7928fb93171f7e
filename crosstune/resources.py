"""What a training needs beside its inputs: a run folder, someone to train, a plan that fits, checkpoints.

The door to torch, with crossval.py and fitting/fit.py: imported inside functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstune.data.load import Rows
from crosstune.data.tokens import Tokens
from crosstune.errors import DeviceError, MissingExtra, RecipeError
from crosstune.inputs import Inputs
from crosstune.interrupt import Interrupted, Interrupts
from crosstune.memory.gpus import Present
from crosstune.memory.layout import Devices, Layout
from crosstune.memory.plan import Plan, plan_memory
from crosstune.progress import Progress
from crosstune.recipe.asked import Asked
from crosstune.recipe.recipe import Recipe
from crosstune.splits.splits import Fold
from crosstune.store.run import Run
from crosstune.sweep.sweep import Trial

if TYPE_CHECKING:
    from crosstune.model.base import Base
    from crosstune.model.device import Place
    from crosstune.train.checkpoint import Checkpoints
    from crosstune.train.lane import LaneJob
    from crosstune.workers.local import LocalWorkers
    from crosstune.workers.ray import RayWorkers

WIDTHS = ("device.lanes", "device.micro_batch", "device.checkpointing", "device.graphs")


def open_run(recipe: Recipe, rows: Rows, tokens: Tokens | None = None) -> Run:
    """The run folder of these rows; refuses that of another recipe, of other rows, or of another tokenizer."""
    numbers = [row.number for row in rows.rows]
    prints = {} if tokens is None else {"the tokenizer or its template": tokens.fingerprint}
    return Run.open(recipe.output, recipe=recipe, data_hashes=rows.hashes, rows=numbers, prints=prints)


def _choose_place(asked: Asked) -> Place:
    """Device and precision: as the recipe asks, or those of a model that was passed in."""
    from crosstune.memory.precision import Choice, attention_kernel
    from crosstune.memory.visible import choose_gpu, choose_gpus

    gpus: list[Present] = []
    if _spreads(asked):
        gpus = choose_gpus(asked.recipe.device.gpus)  # before torch is imported
    elif asked.model is None:
        choose_gpu(asked.recipe.device.kind, asked.recipe.device.gpus)
    from crosstune.model.base import DTYPES, adopt
    from crosstune.model.device import Place, choose_device, machine_of

    if asked.model is None:
        place = choose_device(asked.recipe.device)
        return replace(place, ways=_ways(asked.recipe, place, gpus)) if _spreads(asked) else place
    base = adopt(asked.model, asked.tokenizer)
    base.release()
    precision = next(name for name, dtype in DTYPES.items() if dtype == base.dtype)
    machine = machine_of(base.device)
    why = "as the model that was passed in"
    return Place(base.device, machine, Choice(precision, why), attention_kernel(machine, precision))


def _spreads(asked: Asked) -> bool:
    """The base may be spread over devices. Refuses that where it can't be."""
    device = asked.recipe.device
    if device.layers == "one" and device.offload == "none":
        return False
    words = f"device.layers: {device.layers}" if device.layers != "one" else f"device.offload: {device.offload}"
    if asked.model is not None:
        raise DeviceError(f"{words}, and a model in memory was passed", "Save it to a folder and pass its name.")
    if device.ray is not None:
        raise DeviceError(f"{words}, and device.ray gives each worker one GPU", "Set one of the two.")
    if device.offload == "cpu" and asked.recipe.model.quantization != "none":
        raise DeviceError(
            f"device.offload: cpu with model.quantization: {asked.recipe.model.quantization}, which only GPUs compute",
            "Set model.quantization: none, or device.offload: none.",
        )
    if device.kind in ("cpu", "mps"):
        raise DeviceError(f"{words} is about GPUs, and device.kind is {device.kind}", "Leave one of the two out.")
    return True


def _ways(recipe: Recipe, place: Place, gpus: Sequence[Present]) -> tuple[Devices | None, ...]:
    import torch

    from crosstune.memory.gpus import free_ram_bytes
    from crosstune.memory.layout import ways

    device = recipe.device
    free = [gpu.free_bytes + torch.cuda.memory_reserved(at) for at, gpu in enumerate(gpus)]
    if place.device.type != "cuda":
        free = []
    elif not free:  # a driver that NVML doesn't show
        from crosstune.model.device import free_bytes

        free = [free_bytes(torch.device("cuda", at)) for at in range(torch.cuda.device_count())]
    if not free and device.layers in ("one", "auto"):
        return (None,)
    return ways(device.layers, device.offload, free, free_ram_bytes())


def open_workers(asked: Asked, tokenizer: Any, progress: Progress, interrupts: Interrupts) -> LocalWorkers | RayWorkers:
    """Who trains: this process, or the workers of a Ray cluster."""
    if asked.recipe.device.ray is None:
        from crosstune.workers.local import LocalWorkers

        return LocalWorkers(
            _choose_place(asked),
            lambda place, layout: _base(asked, tokenizer, place, layout, progress),
            progress,
            asked.model,
        )
    _spreads(asked)
    if asked.model is not None:
        raise RecipeError(
            "device.ray is set, and a model in memory was passed", "Save the model to a folder and pass its name."
        )
    try:
        from crosstune.workers.ray import RayWorkers
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("ray", "ray") from None
    import torch

    return RayWorkers(asked.recipe, tokenizer, progress, interrupts, threads=torch.get_num_threads())


def _base(asked: Asked, tokenizer: Any, place: Place, layout: Layout | None, progress: Progress) -> Base:
    from crosstune.model.base import adopt, load_base

    if asked.model is not None:
        return adopt(asked.model, tokenizer)
    progress.start("load")
    try:
        precision = place.precision.value
        return load_base(asked.recipe.model, tokenizer, device=place.device, precision=precision, layout=layout)
    finally:
        progress.stop()


def make_plan(
    workers: LocalWorkers | RayWorkers,
    recipe: Recipe,
    inputs: Inputs,
    trials: Sequence[Trial],
    folds: Sequence[Fold],
    progress: Progress,
    planned: Mapping[str, Any] | None = None,
) -> Plan:
    """How many lanes, rows and recomputed layers fit on the workers' device; the base is laid out for it.

    planned    the plan with which the run began: taken if it still fits, as others give the same results to rounding
    """
    place, free = workers.place()
    progress.say(f"device: {place}")
    # Not before the free bytes were read: what is compiled takes some of the device
    workers.warm_up(recipe.model, inputs.shape, dropout=any(trial.recipe.lora.dropout for trial in trials))
    plan = _plan_as_before(planned, recipe, inputs, trials, folds, place, free, progress)
    plan = settle_plan(plan, inputs.config, progress)
    workers.lay_out(plan)
    progress.say(f"plan: {plan}")
    return plan


def _plan_as_before(
    planned: Mapping[str, Any] | None,
    recipe: Recipe,
    inputs: Inputs,
    trials: Sequence[Trial],
    folds: Sequence[Fold],
    place: Place,
    free: int,
    progress: Progress,
) -> Plan:
    if planned:
        before = {name.removeprefix("device."): value for name, value in planned.items() if name in WIDTHS}
        kept = {name: value for name, value in before.items() if getattr(recipe.device, name) == "auto"}
        device = recipe.device.model_copy(update=kept)
        try:
            return _plan_lanes(recipe.model_copy(update={"device": device}), inputs, trials, folds, place, free)
        except DeviceError as error:
            progress.say(f"the plan with which this run began no longer fits: {error.problem}")
    return _plan_lanes(recipe, inputs, trials, folds, place, free)


def _plan_lanes(
    recipe: Recipe, inputs: Inputs, trials: Sequence[Trial], folds: Sequence[Fold], place: Place, free: int
) -> Plan:
    tokens = inputs.tokens
    lengths = np.array([tokens.max_tokens]) if recipe.data.packing else tokens.lengths
    for left, devices in zip(reversed(range(len(place.ways))), place.ways, strict=True):
        try:
            return plan_memory(
                recipe=recipe,
                shape=inputs.shape,
                lengths=lengths,
                num_lanes=len(trials) * len(folds),
                ranks=[trial.recipe.lora.rank for trial in trials],
                free_bytes=free,
                device_kind=place.device.type,
                precision=place.precision.value,
                machine=place.machine,
                devices=devices,
            )
        except DeviceError:
            if not left:
                raise
    raise AssertionError("a place has a way")


def settle_plan(plan: Plan, config: Mapping[str, Any], progress: Progress) -> Plan:
    """On CUDA: rehearse a plan that is near the device's limit, and take a smaller one until one surely fits.

    A rehearsal knows one device only: a base over several goes by the formulas.
    """
    if plan.job.machine.kind != "cuda" or plan.layout is not None:
        return plan
    from crosstune.train.rehearse import settle

    try:
        return settle(plan, config)
    except (ValueError, KeyError) as error:  # transformers' own words for a model type that it can't build by itself
        progress.say(f"note: the plan can't be rehearsed ({error}); formulas made it")
        return plan


def checkpoints_of(
    run: Run, recipe: Recipe, interrupts: Interrupts, progress: Progress
) -> Callable[[Sequence[LaneJob]], Checkpoints]:
    """Where and how often the state of a wave is kept."""
    from crosstune.train.checkpoint import Checkpoints
    from crosstune.workers.waves import key

    def checkpoints(wave: Sequence[LaneJob]) -> Checkpoints:
        folder = run.checkpoint_folder([key(job) for job in wave])
        return Checkpoints(folder, recipe.train.checkpoint_every, interrupts, progress.say)

    return checkpoints


@contextmanager
def end_recorded(run: Run, began: float) -> Iterator[None]:
    """However training ends, the journal has it: the signal that interrupted it, and the seconds since `began`."""
    try:
        yield
    except Interrupted as end:
        run.record("interrupted", signal=end.number)
        raise
    finally:
        run.record("closed", seconds=time.monotonic() - began)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The caller's global random states are the same afterwards: libraries draw from them while loading."""
    import random

    import torch

    before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.random.set_rng_state(before[2])
