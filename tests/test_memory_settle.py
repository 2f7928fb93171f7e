"""A plan near the limit is rehearsed, and what is then said to fit does fit."""

from dataclasses import replace

import numpy as np
import pytest

from bench.memory.grid import MODELS
from crosstune.errors import DeviceError
from crosstune.memory.gpus import GIB, find_gpu
from crosstune.memory.plan import plan_memory
from crosstune.memory.shape import ModelShape
from crosstune.recipe.recipe import Recipe
from crosstune.train import rehearse as rehearse_module
from crosstune.train.rehearse import rehearse, settle

CONFIG = {**MODELS["1b"], "num_hidden_layers": 4}
SHAPE = ModelShape.from_config(CONFIG)


def plan(free, shape=SHAPE, **device):
    recipe = Recipe.build({"model": "x", "data": "y", "device": device})
    return plan_memory(
        recipe=recipe, shape=shape, lengths=np.full(40, 1024), num_lanes=4, ranks=[16], free_bytes=free, device_kind="cuda",
        precision="bf16", machine=find_gpu("l4"),
    )  # fmt: skip


def test_a_plan_far_from_the_limit_is_not_rehearsed(monkeypatch):
    found = plan(22 * GIB, lanes=1, micro_batch=1)
    monkeypatch.setattr(rehearse_module, "rehearse", None)
    assert settle(found, CONFIG) is found


def test_a_plan_near_the_limit_fits_after_it_is_settled():
    near = plan(int(3.6 * GIB))
    near = replace(near, free_bytes=int(1.02 * near.peak_bytes))
    found = settle(replace(near, job=replace(near.job, free_bytes=near.free_bytes)), CONFIG)
    limit = found.free_bytes - found.job.machine.context_bytes
    assert (
        rehearse(CONFIG, found.widths, found.job.machine, evaluate_tokens=found.evaluate_tokens)
        .replay(limit=limit)
        .fits
    )
    assert found.peak_bytes <= found.free_bytes


def test_a_plan_that_does_not_fit_is_made_smaller():
    tight = plan(12 * GIB, lanes=4, micro_batch=4, checkpointing="none")
    free = int(0.8 * tight.peak_bytes)
    found = settle(replace(tight, free_bytes=free, job=replace(tight.job, free_bytes=free)), CONFIG)
    assert (found.lanes, found.fits) == (4, True)
    assert (found.micro_batch, found.checkpointed_layers) != (4, 0)


def test_a_model_that_the_formulas_do_not_know_is_always_rehearsed():
    found = plan(22 * GIB, shape=replace(SHAPE, known=False), lanes=1)
    assert settle(found, CONFIG).peak_bytes != found.peak_bytes


def test_when_even_the_smallest_does_not_fit_it_says_so():
    found = plan(22 * GIB, lanes=4, micro_batch=1, checkpointing="all")
    with pytest.raises(DeviceError, match="nothing fits: rehearsed"):
        settle(replace(found, free_bytes=2 * GIB, job=replace(found.job, free_bytes=2 * GIB)), CONFIG)


def test_a_cpu_plan_is_taken_as_it_is_and_a_model_that_cannot_be_built_is_told(monkeypatch):
    from crosstune.progress import Quiet
    from crosstune.resources import settle_plan

    said = []
    progress = Quiet()
    monkeypatch.setattr(progress, "say", said.append)
    near = plan(int(3.6 * GIB))
    near = replace(near, free_bytes=near.peak_bytes)
    assert settle_plan(near, {"model_type": "mystery"}, progress) is near
    assert "can't be rehearsed" in said[0]
    on_cpu = replace(near, job=replace(near.job, machine=replace(near.job.machine, kind="cpu")))
    assert settle_plan(on_cpu, CONFIG, progress) is on_cpu
