"""int8 layers that keep no inputs: bitsandbytes itself is the oracle."""

import pytest
import torch

from crosstune.model.frozen_int8 import keep_inputs_again, keep_no_inputs

bitsandbytes = pytest.importorskip("bitsandbytes")


def layer(inputs=64, outputs=48, *, device="cpu", dtype=torch.float16):
    torch.manual_seed(0)
    made = bitsandbytes.nn.Linear8bitLt(inputs, outputs, bias=False, has_fp16_weights=False, threshold=6.0)
    weight = torch.randn(outputs, inputs, dtype=dtype)
    made.weight = bitsandbytes.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return torch.nn.Sequential(made).to(device).eval()


def values(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y))
    return y.detach(), x.grad


def kept_bytes(model, x):
    """Bytes that autograd's graph of one product holds on to."""
    y = model(x.clone().requires_grad_())
    return sum(t.nbytes for t in getattr(y.grad_fn, "tensors", ()) or () if t is not None)


@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["plain", "outliers"])
def test_values_and_gradients_are_those_of_bitsandbytes(scale):
    model = layer()
    x = torch.randn(5, 64, dtype=torch.float16)
    x[:, 3] *= scale
    before = values(model, x)
    changed = keep_no_inputs(model)
    after = values(model, x)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    keep_inputs_again(changed)
    assert type(model[0]) is bitsandbytes.nn.Linear8bitLt


def test_nothing_is_kept_for_the_backward_pass():
    model = layer()
    x = torch.randn(5, 64, dtype=torch.float16)
    assert kept_bytes(model, x) >= x.nbytes
    keep_no_inputs(model)
    assert kept_bytes(model, x) == 0
