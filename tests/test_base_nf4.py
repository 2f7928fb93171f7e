"""Gradients go through a base in NF4 as through the same weights unpacked, also after it was used without gradients."""

from __future__ import annotations

import json

import pytest
import torch

from crosstune.memory.estimate import Settings
from crosstune.memory.gpus import find_gpu
from crosstune.memory.shape import ModelShape
from crosstune.model.base import load_base
from crosstune.recipe.asked import gather
from crosstune.recipe.sections import Model
from crosstune.train.rehearse import rehearse


def gradient(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    model(inputs_embeds=embedded, labels=ids).loss.backward()
    return embedded.grad


def test_evaluating_first_loses_no_gradient_on_the_cpu(tiny):
    pytest.importorskip("bitsandbytes")
    base = load_base(Model(name=str(tiny), quantization="nf4"), None, device=torch.device("cpu"), precision="fp32")
    ids = torch.randint(0, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base.model(ids)
    got = gradient(base.model, ids)
    want = gradient(base.model.dequantize(), ids)
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-6)


def test_a_rehearsal_leaves_nothing_that_hinders_or_changes_the_loading_after_it(tiny, monkeypatch):
    """bitsandbytes keeps the table it quantises with: a rehearsal once left a table without data there."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, place = Model(name=str(tiny), quantization="nf4"), {"device": torch.device("cpu"), "precision": "fp32"}
    want = load_base(model, None, **place).digest()
    monkeypatch.setattr(bitsandbytes.functional, "name2qmap", {})  # as in a process that has quantised nothing yet
    config = json.loads((tiny / "config.json").read_text())
    targets = ModelShape.from_config(config).targets("all-linear")
    rehearse(config, Settings(1, 1, 8, quantization="nf4", rank=4, targets=targets), find_gpu("h100"))
    assert load_base(model, None, **place).digest() == want


def test_a_quantised_model_in_memory_is_planned_for_as_what_it_is(tiny):
    pytest.importorskip("bitsandbytes")
    place = {"device": torch.device("cpu"), "precision": "fp32"}
    for asked in ({"quantization": "nf4"}, {"quantization": "nf4", "double_quant": False}, {"quantization": "none"}):
        model = load_base(Model(name=str(tiny), **asked), None, **place).model
        found = gather(None, data=[], model=model, tokenizer=object(), sections={}).recipe.model
        assert (found.quantization, found.double_quant) == (asked["quantization"], asked.get("double_quant", True))
