"""The plan of a base over several GPUs: how many layers lie where, and what that takes of each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from crosstune.errors import DeviceError
from crosstune.memory.block import Settings
from crosstune.memory.explain import explain
from crosstune.memory.gpus import GIB, find_gpu
from crosstune.memory.layout import Devices, lay_out, share, ways
from crosstune.memory.plan import plan_memory
from crosstune.memory.shape import ModelShape
from crosstune.model.spread import Spread, device_map, empty_model
from crosstune.recipe.recipe import Recipe

LLAMA = ModelShape.read("tests/cases/llama3-8b")


def planned(free, lengths=(1024,) * 50, **device):
    recipe = Recipe.build({"model": {"name": "tests/cases/llama3-8b"}, "data": "rows.jsonl", "device": device})
    machine, found = find_gpu("rtx-4090"), []
    for devices in ways(recipe.device.layers, recipe.device.offload, free, 64 * GIB):
        found.append(devices)
        try:
            return plan_memory(
                recipe=recipe, shape=LLAMA, lengths=np.array(lengths), num_lanes=5, ranks=[16], free_bytes=free[0],
                device_kind="cuda", precision="bf16", machine=machine, devices=devices,
            )  # fmt: skip
        except DeviceError as error:
            last = error
    raise last


def test_auto_takes_one_gpu_if_the_plan_fits_there_else_all():
    assert planned([80 * GIB, 80 * GIB], layers="auto").layout is None
    spread = planned([14 * GIB, 14 * GIB], layers="auto")  # the weights alone take 15
    assert (spread.layout.devices.kind, spread.layout.layers) == ("balanced", (16, 16))
    assert spread.fits and spread.free_bytes == 14 * GIB
    with pytest.raises(DeviceError, match="nothing fits"):
        planned([14 * GIB, 14 * GIB], layers="one")


def test_the_largest_share_decides_whether_a_plan_fits():
    found = planned([24 * GIB, 12 * GIB], layers="balanced")
    machine = find_gpu("rtx-4090")
    shares = [share(LLAMA, found.widths, machine, count).peak_bytes for count in found.layout.layers]
    assert shares[0] <= 24 * GIB and shares[1] <= 12 * GIB
    assert found.peak_bytes in shares


def test_sequential_fills_the_first_gpu():
    found = planned([12 * GIB, 24 * GIB], layers="sequential", lanes=1, micro_batch=1)
    first, last = found.layout.layers
    assert first > 0 < last and first + last == 32
    machine = find_gpu("rtx-4090")
    assert share(LLAMA, found.widths, machine, first).peak_bytes <= 12 * GIB
    assert share(LLAMA, found.widths, machine, first + 1).peak_bytes > 12 * GIB


def test_a_layout_and_accelerate_agree_on_how_many_layers_lie_where():
    """The room that the plan leaves for weights makes accelerate place as many layers as were planned."""
    from transformers import LlamaConfig

    config = json.loads(Path("tests/cases/llama3-8b/config.json").read_text())
    model = empty_model(
        LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"}), torch.bfloat16
    )
    for kind, free in [
        ("balanced", (24, 24)),
        ("balanced", (16, 16, 16)),
        ("sequential", (24, 24)),
        ("sequential", (10, 12, 24)),
    ]:
        for quantization in ("none", "nf4"):
            settings = Settings(2, 1, 1024, quantization=quantization, checkpointed=32)
            layout, _, _ = lay_out(
                LLAMA, settings, find_gpu("rtx-4090"),
                Devices(tuple(f"cuda:{at}" for at in range(len(free))), tuple(count * GIB for count in free), kind),
            )  # fmt: skip
            places = device_map(model, layout.room, dtype=torch.bfloat16, quantization=quantization)
            spread = Spread((torch.device("cpu"),) * len(free), places)
            homes = [spread.place(f"model.layers.{layer}") for layer in range(32)]
            counts = [homes.count(place) for place in range(len(free))]
            assert counts == list(layout.layers)


def test_crosstune_plan_tells_the_layers_of_each_gpu():
    recipe = Recipe.build(
        {"model": "tests/cases/llama3-8b", "data": "x.jsonl", "device": {"layers": "balanced", "gpus": [0, 1, 2]}}
    )
    told = explain(recipe, gpu="l4", lanes=5, lengths=[512] * 20).to_json()
    assert told["layers"] == {"cuda:0": 11, "cuda:1": 11, "cuda:2": 10}
    assert max(told["peaks"][name] for name in ("train", "evaluate", "generate")) <= told["free_bytes"]
    assert told["peaks"]["merge"] > 16e9  # of the whole model
