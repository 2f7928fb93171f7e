"""Attention with the same bits each time; PyTorch's own attention in fp64 is the oracle of its gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from crosstune.errors import ModelError
from crosstune.model import repeatable
from crosstune.model.attention import ON_CPU
from crosstune.model.base import adopt
from crosstune.model.packed import Rows, packed_attention
from crosstune.model.repeatable import CUDNN, EFFICIENT, FLASH, attend, in_one_order, kernel_of
from tests.tiny import make_tiny

LENGTH, WINDOW = 1000, 300


def modes():
    return torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize("before", ["default", "warn", "error"])
def test_pytorchs_settings_are_those_of_before_whatever_happens_inside(before):
    torch.set_deterministic_debug_mode(before)
    found = modes()
    try:
        with pytest.raises(ZeroDivisionError), in_one_order():
            assert modes() == (2, False)
            raise ZeroDivisionError
        assert modes() == found
    finally:
        torch.set_deterministic_debug_mode("default")


def test_without_a_gradient_or_a_fused_kernel_it_is_pytorchs_own():
    query, key, value = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    own = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(attend(query, key, value, causal=True, scale=None), own)
    assert torch.equal(attend(query.requires_grad_(), key, value, causal=True, scale=None), own)


@pytest.mark.parametrize("has_flash", [False, True])
def test_cudnns_pass_is_left_to_pytorch_where_flash_is_not_built_in(monkeypatch, has_flash):
    monkeypatch.setattr(repeatable, "kernel_of", lambda *_: CUDNN)
    monkeypatch.setattr(repeatable, "is_flash_attention_available", lambda: has_flash)
    query, key, value = (
        torch.zeros(2, heads, 9, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    out = attend(query, key, value, causal=True, scale=None)
    assert (type(out.grad_fn).__name__ == "RepeatableBackward") == has_flash


def test_a_mask_lies_as_the_memory_efficient_kernel_reads_it():
    query, key = torch.zeros(2, 4, 5, 16), torch.zeros(2, 4, 11, 16)
    seen = torch.ones(2, 1, 5, 11, dtype=torch.bool).tril()
    bias = repeatable.bias_of(seen, query, key)
    assert bias.shape == (2, 4, 5, 11)
    assert bias.stride(2) % 8 == 0
    assert torch.equal(bias == 0, seen.expand(2, 4, 5, 11))


def test_a_model_that_is_passed_in_gets_its_own_attention_back(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "tiny", dtype="bfloat16"), dtype=torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    base = adopt(model, None)
    assert model.config._attn_implementation == ON_CPU
    base.release()
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    base = adopt(model, None)
    assert model.config._attn_implementation == "eager", "chosen by whoever passed it in"
    base.release()


def test_a_model_that_is_refused_is_left_as_it_was(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "tiny", dtype="bfloat16"), dtype=torch.bfloat16)
    model.train()
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match="the base lies on"):
        adopt(model, None)
    assert model.config._attn_implementation == "sdpa"
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


def drawn(dtype, *, grouped):
    """Queries, keys, values side by side as a model makes them, and a gradient of what comes out."""
    torch.manual_seed(0)
    heads = (16, 4, 4) if grouped else (16, 16, 16)
    made = torch.randn(3, LENGTH, sum(heads) * 64, device="cuda", dtype=dtype)
    parts = made.split([count * 64 for count in heads], -1)
    qkv = [part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts]
    return qkv, torch.randn(3, LENGTH, 16, 64, device="cuda", dtype=dtype).transpose(1, 2)


def gradients(qkv, given, **how):
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves, scale=None, **how)
    return [out, *torch.autograd.grad(out, leaves, given)]


def exact(qkv, given, mask):
    leaves = [x.double().requires_grad_() for x in qkv]
    groups = leaves[0].shape[1] // leaves[1].shape[1]
    wide = [leaves[0], *(x.repeat_interleave(groups, 1) for x in leaves[1:])]
    out = scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=mask is None)
    return [out, *torch.autograd.grad(out, leaves, given.double())]


def window():
    place = torch.arange(LENGTH, device="cuda")
    return ((place[:, None] >= place) & (place[:, None] - place < WINDOW))[None, None]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "dtype", "masked"),
    [
        (FLASH, torch.bfloat16, False),
        (FLASH, torch.float16, False),
        (CUDNN, torch.bfloat16, False),
        (EFFICIENT, torch.float32, False),
        (EFFICIENT, torch.float16, False),
        (EFFICIENT, torch.bfloat16, True),
        (EFFICIENT, torch.float32, True),
    ],
)
def test_gradients_are_right_and_the_same_each_time(monkeypatch, kernel, dtype, masked):
    if kernel == CUDNN and not torch.backends.cudnn.is_available():
        pytest.skip("no cuDNN")
    monkeypatch.setattr(repeatable, "kernel_of", lambda *_: kernel)
    qkv, given = drawn(dtype, grouped=kernel != EFFICIENT)
    how = {"mask": window(), "causal": False} if masked else {"causal": True}
    first = gradients(qkv, given, **how)
    for mine, right in zip(first, exact(qkv, given, how.get("mask")), strict=True):
        unit = 2.0**-20 if dtype == torch.float32 else 2.0**-7
        assert (mine.double() - right).norm() <= unit * right.norm()
    for _ in range(10):
        again = gradients(qkv, given, **how)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
def test_rows_side_by_side_give_the_same_gradients_each_time():
    qkv, given = drawn(torch.bfloat16, grouped=True)
    flat = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in qkv]
    cuts = torch.tensor([0, 700, 1900, 3 * LENGTH], dtype=torch.int32, device="cuda")
    given = given.transpose(1, 2).flatten(0, 1).flatten(1)

    def found():
        leaves = [x.detach().requires_grad_() for x in flat]
        return torch.autograd.grad(packed_attention(*leaves, Rows(cuts, 1200), 0.125), leaves, given)

    first = found()
    for _ in range(10):
        assert all(torch.equal(one, other) for one, other in zip(first, found(), strict=True))


@pytest.mark.gpu
def test_pytorch_still_chooses_a_fused_kernel():
    qkv, _ = drawn(torch.bfloat16, grouped=True)
    assert kernel_of(*qkv, None, True, None) in (FLASH, CUDNN)
    qkv, _ = drawn(torch.float32, grouped=False)
    assert kernel_of(*qkv, None, True, None) == EFFICIENT
