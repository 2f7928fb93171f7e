"""Fused nodes and Triton kernels on a GPU, in bf16, against PyTorch's own operations and an fp32 model."""

from __future__ import annotations

import pytest
import torch

from bench.shapes import random_model
from crosstune.data.batches import collate
from crosstune.model import block, elementwise
from crosstune.model.attach import LaneSpec, attached
from crosstune.model.base import adopt
from crosstune.model.frozen import FourBit
from crosstune.model.head import _frozen_chunk
from crosstune.model.lora import Dropout, hashed_columns
from crosstune.model.targets import resolve_targets
from crosstune.recipe.sections import Lora
from crosstune.train.step import DeviceBatch, run_pass
from tests.lanes import random_tokens

pytestmark = pytest.mark.gpu
N, H, F = 96, 256, 704


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def with_and_without_triton(monkeypatch, work):
    found = work()
    assert elementwise.triton_for(torch.zeros(1, device="cuda")) is not None
    with monkeypatch.context() as patch:
        patch.setattr(elementwise, "TRITON_ON", set())
        return found, work()


def close(one, other) -> None:
    torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3)  # bf16 has 8 bits


def test_norms_and_swiglu_equal_their_twins(monkeypatch):
    x, w, g, past = randn(N, H), randn(H, seed=1), randn(N, H, seed=2), randn(N, H, seed=3)
    (y, r), (y_2, r_2) = with_and_without_triton(monkeypatch, lambda: elementwise.rms_norm(x, w, 1e-5))
    close(y, y_2)
    torch.testing.assert_close(r, r_2)
    close(*with_and_without_triton(monkeypatch, lambda: elementwise.rms_norm_backward(g, x, w, r, past)))
    wide, gf = randn(N, 2 * F, seed=4), randn(N, F, seed=5)
    close(*with_and_without_triton(monkeypatch, lambda: elementwise.swiglu(wide)))

    def backward():
        made, grad = wide.clone(), gf.clone()
        elementwise.swiglu_backward_(grad, made)
        return torch.cat([made, grad], 1)

    close(*with_and_without_triton(monkeypatch, backward))


@pytest.mark.parametrize("size", [64, 80, 128])
def test_rotation_equals_its_twin(size, monkeypatch):
    rows, length, heads = 2, 48, (8, 2, 2)
    y, angle = randn(rows * length, sum(heads) * size), randn(length, size // 2, dtype=torch.float32)
    turn = tuple(f(torch.cat([angle, angle], 1)).bfloat16() for f in (torch.cos, torch.sin))

    def forward():
        turned = y.clone()
        elementwise.rotate_(turned, *turn, (heads[0] + heads[1]) * size)
        return turned

    torch.testing.assert_close(*with_and_without_triton(monkeypatch, forward), rtol=2**-6, atol=2**-6)
    grads = tuple(randn(rows, length, n, size, seed=n).transpose(1, 2) for n in heads)
    found = with_and_without_triton(monkeypatch, lambda: elementwise.rotate_back(grads, *turn))
    torch.testing.assert_close(*found, rtol=2**-6, atol=2**-6)


def test_dropout_drops_the_same_elements_as_on_a_cpu(monkeypatch):
    key = torch.randint(-(2**31), 2**31, (3, N), generator=torch.Generator().manual_seed(0)).to("cuda", torch.int32)
    rates, device = [0.0, 0.1, 0.5], torch.device("cuda")
    scale = torch.tensor([1 / (1 - rate) for rate in rates], device=device, dtype=torch.bfloat16)
    dropout, x = Dropout(key, Dropout.thresholds(rates, device), scale), randn(3, N, H)
    columns = hashed_columns("layer", H, device)
    assert torch.equal(*with_and_without_triton(monkeypatch, lambda: dropout.apply(x, columns)))
    on_cpu = Dropout(key.cpu(), dropout.threshold_K.cpu(), scale.cpu())
    assert torch.equal(dropout.apply(x, columns).cpu(), on_cpu.apply(x.cpu(), columns.cpu()))


@pytest.mark.parametrize("double_quant", [True, False])
def test_nf4_is_made_as_bitsandbytes_makes_it_to_the_bit(double_quant):
    bnb = pytest.importorskip("bitsandbytes")
    weight = randn(H, F)
    layer = bnb.nn.Linear4bit(F, H, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=double_quant)
    layer.weight = layer.weight._quantize("cuda")
    made = FourBit(layer, torch.bfloat16).weight()
    assert torch.equal(made, bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))


def test_the_heads_losses_and_gradient_equal_their_twins(monkeypatch):
    hidden, weight = randn(N, H), randn(5000, H, seed=1) / 16
    target, weights = torch.arange(N, device="cuda") * 50, torch.rand(N, device="cuda")
    work = lambda: _frozen_chunk((hidden, target, weights), weight, None, (1.0, None))  # noqa: E731
    (nll, hit, grad), (nll_2, _, grad_2) = with_and_without_triton(monkeypatch, work)
    torch.testing.assert_close(nll, nll_2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, grad_2, rtol=2**-5, atol=1e-2)
    assert hit.dtype == torch.bool and hit.shape == (N,)


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_a_fused_model_is_as_near_to_fp32_as_transformers_blocks_are(quantization, monkeypatch):
    specs, device, found = [Lora(rank=8, dropout=rate) for rate in (0.0, 0.2)], torch.device("cuda"), {}
    for mode in ("fp32", "transformers", "fused"):
        monkeypatch.setitem(block.FUSED_ON, "cuda", mode == "fused")
        model = random_model("tiny", quantization, device, vocab=512)
        if mode == "fp32":
            model = fp32_of(model, quantization)
        base = adopt(model, None)
        with attached(base, [LaneSpec(lora, resolve_targets(base, "all-linear"), 1) for lora in specs]) as slots:
            with torch.no_grad():
                noise = torch.randn(slots.master_KP.shape, generator=torch.Generator().manual_seed(1))
                slots.master_KP.copy_(0.05 * noise)
            slots.refresh()
            units = [[(0,), (1,)], [(2,), (3,)]]
            batch = collate(random_tokens(), units, weights_K=[0.05] * 2, dropout_K=[(1, 0), (2, 0)], multiple=8)
            losses = run_pass(slots, DeviceBatch.of(batch, base.device))
            found[mode] = losses.clone(), slots.grad_KP.clone()
    error = {mode: torch.linalg.norm(found[mode][1] - found["fp32"][1]) for mode in ("transformers", "fused")}
    scale = torch.linalg.norm(found["fp32"][1])
    print(quantization, {mode: float(value / scale) for mode, value in error.items()})
    assert error["fused"] <= 1.3 * error["transformers"] + 1e-3 * scale
    torch.testing.assert_close(found["fused"][0], found["fp32"][0], rtol=2e-2, atol=0)


def fp32_of(model, quantization: str):
    """The same model with its weights made in fp32."""
    for name, module in list(model.named_modules()):
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            if quantization == "nf4":
                weight = FourBit(module, torch.bfloat16).weight()
            else:
                weight = module.weight.CB.float() * module.weight.SCB[:, None] / 127
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="cuda")
            plain.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, plain)
    return model.float()
