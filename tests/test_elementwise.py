"""A block's element-wise work against autograd; the Triton kernels, through Triton's interpreter, against both."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from crosstune.model import elementwise
from crosstune.model.elementwise import rms_norm, rms_norm_backward, rotate_, rotate_back, swiglu, swiglu_backward_
from crosstune.model.frozen import FourBit
from crosstune.model.head import _frozen_chunk
from crosstune.model.lora import Dropout, hashed_columns

B, T, H, D = 2, 5, 24, 8
HEADS = (3, 1, 1)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# the interpreter cuts a float off where it becomes bf16; a GPU rounds
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]


@pytest.fixture(autouse=True)
def triton_where_interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(elementwise, "TRITON_ON", {"cpu"})
        assert elementwise.triton_for(torch.zeros(1)) is not None


def randn(*shape: int, seed: int = 0, **options) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **options)


def turns(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = randn(rows, T, D // 2, seed=9)
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


@pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED, reason="needs Triton, which this process then interprets"
)
def test_the_triton_kernels_pass_every_test_of_this_file():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).parent.parent, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers(dtype):
    norm = LlamaRMSNorm(H, eps=1e-5).to(dtype)
    norm.weight.data = randn(H, seed=1).to(dtype)
    x = randn(B * T, H).to(dtype)
    y, inverse = rms_norm(x, norm.weight.data, 1e-5)
    torch.testing.assert_close(y, norm(x).detach(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    torch.testing.assert_close(inverse, x.float().square().mean(-1).add(1e-5).rsqrt())


@pytest.mark.parametrize("added", [True, False])
def test_rms_norm_backward_equals_autograd(added):
    norm = LlamaRMSNorm(H, eps=1e-5)
    norm.weight.data = randn(H, seed=1)
    x, g, past = randn(B * T, H).requires_grad_(), randn(B * T, H, seed=2), randn(B * T, H, seed=3)
    norm(x).backward(g)
    _, inverse = rms_norm(x.detach(), norm.weight.data, 1e-5)
    found = rms_norm_backward(g, x.detach(), norm.weight.data, inverse, past if added else None)
    torch.testing.assert_close(found, x.grad + past if added else x.grad)


@pytest.mark.parametrize("rows", [1, B], ids=["one for all rows", "one a row"])
def test_rotation_and_its_gradient_equal_transformers(rows):
    y = randn(B * T, sum(HEADS) * D)
    parts = [
        part.view(B, T, -1, D).transpose(1, 2).requires_grad_() for part in y.clone().split([n * D for n in HEADS], 1)
    ]
    leaves = [part.detach().requires_grad_() for part in parts]
    cos, sin = turns(rows)
    query, key = apply_rotary_pos_emb(leaves[0], leaves[1], cos, sin)
    turned = y.clone()
    flat = cos.reshape(-1, D), sin.reshape(-1, D)
    rotate_(turned, *flat, (HEADS[0] + HEADS[1]) * D)
    wanted = [part.transpose(1, 2).reshape(B * T, -1) for part in (query.detach(), key.detach(), leaves[2].detach())]
    torch.testing.assert_close(turned, torch.cat(wanted, 1))
    grads = tuple(randn(*part.shape, seed=4 + place) for place, part in enumerate(leaves))
    torch.autograd.backward((query, key, leaves[2] * 1), grads)
    back = torch.cat([leaf.grad.transpose(1, 2).reshape(B * T, -1) for leaf in leaves], 1)
    torch.testing.assert_close(rotate_back(grads, *flat), back)
    # as attention kernels lay their gradients out: (B, T, heads, D)
    laid_out = tuple(grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads)
    torch.testing.assert_close(rotate_back(laid_out, *flat), back)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_equals_transformers(dtype):
    y = randn(B * T, 2 * H).to(dtype)
    gate, up = y.chunk(2, 1)
    torch.testing.assert_close(swiglu(y), torch.nn.functional.silu(gate) * up)


def test_swiglu_backward_equals_autograd_and_makes_the_product_again():
    y, g = randn(B * T, 2 * H).requires_grad_(), randn(B * T, H, seed=1)
    gate, up = y.chunk(2, 1)
    product = torch.nn.functional.silu(gate) * up
    product.backward(g)
    in_place = y.detach().clone()
    swiglu_backward_(g, in_place)
    torch.testing.assert_close(in_place, y.grad)
    torch.testing.assert_close(g, product.detach())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_drops_the_same_elements_everywhere(dtype):
    lanes, tokens = 3, 40
    key = torch.randint(-(2**31), 2**31, (lanes, tokens), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    rates = [0.0, 0.1, 0.5]
    scale = torch.tensor([1 / (1 - rate) for rate in rates], dtype=dtype)
    dropout = Dropout(key.to(torch.int32), Dropout.thresholds(rates, torch.device("cpu")), scale)
    x, columns = randn(lanes, tokens, H).to(dtype), hashed_columns("layer", H, torch.device("cpu"))
    found = dropout.apply(x, columns)
    elementwise.TRITON_ON = set()  # undone by the fixture
    assert torch.equal(found, dropout.apply(x, columns))
    for lane, rate in enumerate(rates):
        assert abs((found[lane] == 0).float().mean() - rate) < 0.05


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_is_made_as_bitsandbytes_makes_it_to_the_bit(double_quant):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = randn(24, 5 * 64)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant)
    layer = SimpleNamespace(
        weight=SimpleNamespace(data=packed, quant_state=state), bias=None, in_features=5 * 64, out_features=24
    )
    whole = torch.zeros(48, 5 * 64)
    FourBit(layer, torch.float32).weight(whole[24:])
    assert torch.equal(whole[24:], functional.dequantize_4bit(packed, state)) and not whole[:24].any()


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_losses_hits_and_gradient_of_the_head_equal_autograd(factor):
    rows, width, vocabulary = 7, 16, 1000
    hidden = randn(rows, width).requires_grad_()
    weight, target = randn(vocabulary, width, seed=1), torch.arange(rows) * 100
    target[3] = int((hidden[3] @ weight.t()).argmax())
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(2))
    logits = hidden @ weight.t() * factor
    nll = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    (nll * weights).sum().backward()
    found_nll, hit, grad = _frozen_chunk((hidden.detach(), target, weights), weight, None, (factor, None))
    torch.testing.assert_close(found_nll, nll.detach())
    assert hit.tolist() == (logits.argmax(-1) == target).tolist() and hit[3]
    torch.testing.assert_close(grad, hidden.grad)
    scored, same, none = _frozen_chunk((hidden.detach(), target, None), weight, None, (factor, None))
    assert torch.equal(scored, found_nll) and torch.equal(same, hit) and none is None
