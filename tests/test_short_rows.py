"""The backward pass that bf16 attention takes for short rows on CPUs, against exact arithmetic and PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from crosstune.memory.precision import cpu_takes_groups
from crosstune.model.attention import ON_CPU, SHORT, ShortRows, attention_name
from tests.tiny import make_tiny

SCALE = 0.125


def gradients(attend, query, key, value, given):
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out = attend(*leaves)
    return out, torch.autograd.grad(out, leaves, given.to(out.dtype))


def torchs_own(query, key, value):
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE, enable_gqa=True)


@pytest.mark.parametrize("length", [2, 17, 60, SHORT])
@pytest.mark.parametrize(("heads", "key_heads"), [(9, 3), (4, 4), (4, 1)])
def test_gradients_are_as_near_to_the_exact_ones_as_those_of_pytorchs_kernel(length, heads, key_heads):
    torch.manual_seed(0)
    # Laid out as the model lays them out: heads of a token side by side.
    query, key, value, given = (
        2 * torch.randn(3, length, n, 64, dtype=torch.bfloat16).transpose(1, 2)
        for n in (heads, key_heads, key_heads, heads)
    )
    _, exact = gradients(torchs_own, *(x.double() for x in (query, key, value, given)))
    out, ours = gradients(lambda q, k, v: ShortRows.apply(q, k, v, SCALE), query, key, value, given)
    plain, theirs = gradients(torchs_own, query, key, value, given)
    assert torch.equal(out, plain), "the forward pass is the kernel's"
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        unit = 2.0**-8 * right.norm()
        assert (mine - right).norm() <= 1.5 * (other - right).norm() + unit


def test_only_bf16_on_a_cpu_takes_it():
    cpu = torch.device("cpu")
    assert attention_name(cpu, torch.bfloat16) == ON_CPU
    assert attention_name(cpu, torch.float32) == ("sdpa" if cpu_takes_groups() else ON_CPU)


def test_a_model_gives_the_same_logits_and_gradients_with_padding_too(tmp_path):
    make_tiny(tmp_path, dtype="bfloat16")
    ids = torch.arange(40).view(2, 20) % 300
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    for attention_mask in (None, mask):
        found = []
        for name in ("sdpa", attention_name(torch.device("cpu"), torch.bfloat16)):
            model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation=name)
            logits = model(ids, attention_mask=attention_mask).logits
            logits.float().square().mean().backward()
            found.append((logits, model.model.layers[0].self_attn.k_proj.weight.grad))
        if cpu_takes_groups() or attention_mask is not None:
            assert torch.equal(found[0][0], found[1][0])
        else:  # transformers' sdpa goes to plain products
            assert (found[0][0] - found[1][0]).norm() <= 2.0**-6 * found[0][0].norm()
        assert (found[0][1] - found[1][1]).norm() <= 2.0**-6 * found[0][1].norm()
