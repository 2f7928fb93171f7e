"""Gradients go through a base in NF4 as through the same weights unpacked, also after it was used without gradients."""

from __future__ import annotations

import pytest
import torch

from crosstune.model.base import load_base
from crosstune.recipe import Model


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
