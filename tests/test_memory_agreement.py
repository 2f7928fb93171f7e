"""Closed form and rehearsal are two accounts of one thing: they must agree on the grid that is measured on GPUs.

The fast tests keep three layers of each model, which changes no term of either; the slow ones rehearse the whole grid.
"""

import logging
from dataclasses import replace

import pytest

from bench.memory.grid import MODELS, grid
from crosstune.memory.estimate import Settings, estimate
from crosstune.memory.gpus import MIB, find_gpu, flash_sums, this_cpu
from crosstune.memory.shape import ModelShape
from crosstune.memory.widths import evaluation_tokens
from crosstune.train.rehearse import rehearse

CELLS = list(grid(["1b", "qwen2-1.5b", "8b"], "all"))
EXTRA = {  # what the grid leaves out
    "one long row, whose gradient flash sums in several copies": ("qwen2-1.5b", Settings(1, 1, 8192, 28)),
    "few targets": ("1b", Settings(2, 2, 256, 1, targets=ModelShape.from_config(MODELS["1b"]).targets(["q_proj", "v_proj"]))),
    "fp16 on a T4": ("1b", Settings(1, 2, 256, 1, precision="fp16")),
    "fp32 on a GPU": ("1b", Settings(1, 2, 256, 1, precision="fp32")),
    "recorded passes, shorter than the longest": ("8b", Settings(5, 2, 256, 1, "nf4", recorded=5 * 2 * 128)),
    "copies of a 4-bit base": ("8b", Settings(2, 2, 128, 1, "nf4", copies=True)),
    "recorded passes over copies, dropout": ("qwen2-1.5b", Settings(2, 4, 128, 0, "nf4", copies=True, recorded=1024, dropout=True)),
    "nf4 without double quantisation": ("qwen2-1.5b", Settings(2, 1, 256, 1, "nf4", double_quant=False)),
}  # fmt: skip


def check(name, settings, machine, *, layers=None, tolerance=0.02):
    config = dict(MODELS[name])
    if layers is not None:
        share = settings.checkpointed / config["num_hidden_layers"]
        settings = replace(settings, checkpointed=round(share * layers))
        config["num_hidden_layers"] = layers
    shape = ModelShape.from_config(config)
    settings = replace(settings, targets=settings.targets or shape.linears)
    batch = evaluation_tokens(shape, settings, machine)
    logging.disable(logging.WARNING)  # bitsandbytes says at every product that it casts to fp16
    shown = rehearse(config, settings, machine, evaluate_tokens=batch).replay()
    found = estimate(shape, replace(settings, evaluate_tokens=batch), machine)
    miss = found.allocated_bytes - shown.peak_allocated
    assert abs(miss) < max(tolerance * shown.peak_allocated, 16 * MIB), (found.at, shown.at, miss / MIB)
    if settings.recorded:  # the graphs' pool shows in what is reserved only
        beyond = found.reserved_bytes - shown.peak_reserved
        assert abs(beyond) < max(2 * tolerance * shown.peak_reserved, 160 * MIB), beyond / MIB


def title(cell):
    name, s = cell
    return f"{name}-{s.quantization}-{s.lanes}x{s.micro_batch}x{s.tokens}-n{s.checkpointed}-r{s.rank}"


@pytest.mark.parametrize("cell", CELLS[::6], ids=title)
def test_closed_form_and_rehearsal_agree_within_2_percent(cell):
    check(*cell, find_gpu("h200"), layers=3)


@pytest.mark.parametrize("words", EXTRA)
def test_they_agree_beside_the_grid(words):
    check(*EXTRA[words], find_gpu("t4" if "T4" in words else "h200"), layers=3)


@pytest.mark.parametrize("blocks", [12, 32, 96, 128, 132, 160, 1000])
@pytest.mark.parametrize("multiprocessors", [40, 58, 108, 132])
def test_flash_makes_the_fewest_copies_that_keep_all_multiprocessors_busy(blocks, multiprocessors):
    assert flash_sums(blocks, multiprocessors) == next(n for n in range(1, 999) if n * blocks >= multiprocessors)


@pytest.mark.parametrize("checkpointed", [0, 1, 3])
def test_they_agree_on_a_cpu(checkpointed):
    check("1b", Settings(3, 1, 300, checkpointed, precision="fp32"), this_cpu(), layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=title)
def test_they_agree_on_the_whole_grid(cell):
    check(*cell, find_gpu("h200"))


def test_the_grid_holds_what_it_should():
    kinds = {(name, s.quantization) for name, s in CELLS}
    assert len(CELLS) >= 60
    assert {q for _, q in kinds} == {"none", "int8", "nf4"}
    for name, quantization in kinds:
        cells = [s for n, s in CELLS if (n, s.quantization) == (name, quantization)]
        layers = MODELS[name]["num_hidden_layers"]
        assert {s.lanes for s in cells} >= {1, 8}
        assert {s.rank for s in cells} == {8, 64}
        assert {s.checkpointed for s in cells} == {0, layers // 2, layers}
        assert {s.micro_batch * s.tokens for s in cells} >= {128, 512, 2048, 8192}
