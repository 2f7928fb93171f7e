"""Generation's peak: the formula beside a rehearsal of the project's own code."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.memory.grid import MODELS
from crosstune.memory.block import Settings
from crosstune.memory.gpus import find_gpu
from crosstune.memory.peaks import cache_bytes, merge_bytes, peaks, rows_a_lane
from crosstune.memory.shape import ModelShape
from crosstune.memory.widths import Job, make_plan
from crosstune.train.rehearse import rehearse_answers


def plan_of(config, quantization, prompt, lanes, gpu="h200", free=None):
    shape, machine = ModelShape.from_config(config), find_gpu(gpu)
    like = Settings(1, 1, 1, quantization=quantization, targets=shape.linears)
    job = Job(shape, machine, free or machine.total_bytes, lanes, 4, 10, np.array([prompt]), like)
    return make_plan(job, lanes, 1, 0)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize(("prompt", "lanes", "rows"), [(512, 5, 8), (128, 2, 40), (2048, 1, 4)])
def test_formula_and_rehearsal_of_generation_agree(quantization, prompt, lanes, rows):
    config = MODELS["1b"]
    plan = plan_of(config, quantization, prompt, lanes)
    told = peaks(plan, new_tokens=2, rows=rows)["generate"]
    assert rows_a_lane(plan, prompt, 2, rows) == rows  # all at once, as they are rehearsed
    rehearsed = rehearse_answers(config, plan.widths, plan.job.machine, rows=rows, prompt=prompt, new_tokens=2)
    assert told == pytest.approx(rehearsed.used_bytes, rel=0.06)


def test_a_longer_answer_needs_its_cache():
    config = {**MODELS["1b"], "num_hidden_layers": 8}
    plan = plan_of(config, "none", 256, 2)
    near, far = (
        rehearse_answers(config, plan.widths, plan.job.machine, rows=16, prompt=256, new_tokens=new).replay()
        for new in (2, 258)
    )
    cache = 2 * 16 * 256 * cache_bytes(plan.job.shape, 2)
    assert far.peak_allocated - near.peak_allocated > cache


def test_rows_are_cut_to_what_the_base_and_the_lanes_leave_free():
    shape = ModelShape.read("tests/cases/llama3-8b")
    config = json.loads(Path("tests/cases/llama3-8b/config.json").read_text())
    plan = plan_of(config, "none", 1024, 1, gpu="rtx-4090")
    rows = rows_a_lane(plan, 1024, 512, 10_000)
    free = plan.free_bytes - 2 * shape.parameters
    assert 1 <= rows * 1536 * cache_bytes(shape, 2) <= free / 2
    assert rows_a_lane(plan, 1024, 512, 3) == min(3, rows)


def test_merging_needs_one_model_in_ram():
    shape = ModelShape.read("tests/cases/llama3-8b")
    assert 2 * shape.parameters < merge_bytes(shape) < 2.2 * shape.parameters
    small = replace(shape, layers=1, vocab=1000)
    assert merge_bytes(small) > 2 * small.parameters
