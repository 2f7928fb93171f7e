"""What a decoder block does element by element: RMSNorm, rotary position, SwiGLU, each forward and backward.

Every function here allocates its results and has them filled by a Triton kernel (triton_kernels.py) where there is one,
else by a few lines of PyTorch, which are also the kernels' oracle. Unfused, this work took 300 of the 795 ms of a step
(H200, 8B, 5 lanes x 2,048 tokens): each operation reads and writes its tensors again, and autograd keeps some in fp32.

Results are rounded where transformers' Llama rounds them.

Shapes: N tokens, H hidden, O outputs side by side, F width of the MLP, D head, B rows of T tokens.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

TRITON_ON = {"cuda"}  # kinds of device; Triton's interpreter also runs on a CPU


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(x: Tensor) -> bool:
    """`x` is worked on by Triton kernels. A rehearsal on meta tensors says so by adding "meta" to TRITON_ON."""
    return x.device.type in TRITON_ON and (x.is_meta or _has_triton())


def triton_for(x: Tensor) -> ModuleType | None:
    """triton_kernels, if it is to be used for `x`."""
    if x.is_meta or not runs_triton(x):
        return None
    from crosstune.model import triton_kernels

    return triton_kernels


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed (N, H), 1/rms (N) in fp32)."""
    y_NH, inverse_N = torch.empty_like(x_NH), x_NH.new_empty(len(x_NH), dtype=torch.float32)
    if x_NH.is_meta:
        return y_NH, inverse_N
    if kernels := triton_for(x_NH):
        kernels.rms_norm(x_NH, weight_H, eps, y_NH, inverse_N)
        return y_NH, inverse_N
    wide_NH = x_NH.float()
    torch.rsqrt(wide_NH.square().mean(-1) + eps, out=inverse_N)
    return torch.mul(weight_H, (wide_NH * inverse_N[:, None]).to(x_NH.dtype), out=y_NH), inverse_N


def rms_norm_backward(g_NH: Tensor, x_NH: Tensor, weight_H: Tensor, inverse_N: Tensor, add_NH: Tensor | None) -> Tensor:
    """Gradient of the input, plus `add_NH` (what reached the input on the way past the norm).

    With r = 1/rms: ∂x = r · (w g − x r² · mean(w g x)).
    """
    out_NH = torch.empty_like(x_NH)
    if x_NH.is_meta:
        return out_NH
    if kernels := triton_for(x_NH):
        kernels.rms_norm_backward(g_NH, x_NH, weight_H, inverse_N, add_NH, out_NH)
        return out_NH
    wide_NH, scaled_NH, r_N1 = x_NH.float(), g_NH.float() * weight_H, inverse_N[:, None]
    dx_NH = r_N1 * (scaled_NH - wide_NH * r_N1.square() * (scaled_NH * wide_NH).mean(-1, keepdim=True))
    return out_NH.copy_(dx_NH if add_NH is None else dx_NH + add_NH)


def rotate_(y_NO: Tensor, cos_ND: Tensor, sin_ND: Tensor, width: int) -> None:
    """Rotary position on the first `width` columns (queries, then keys), in place, head by head.

    `cos_ND` has one row a token, or T rows that every row of the batch shares.
    """
    if y_NO.is_meta:
        return
    if kernels := triton_for(y_NO):
        kernels.rotate_(y_NO, cos_ND, sin_ND, width)
        return
    heads = y_NO[:, :width].unflatten(1, (-1, cos_ND.shape[-1]))
    cos, sin = (part.repeat(len(y_NO) // len(part), 1)[:, None] for part in (cos_ND, sin_ND))
    first, second = heads.chunk(2, -1)
    heads.copy_(heads * cos + torch.cat([-second, first], -1) * sin)


def rotate_back(grads: tuple[Tensor, Tensor, Tensor], cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Gradients of queries, keys and values (B, heads, T, D) → that of the columns before `rotate_`, (N, O)."""
    rows, _, length, size = grads[0].shape
    widths = [grad.shape[1] * size for grad in grads]
    out_NO = grads[0].new_empty(rows * length, sum(widths))
    if out_NO.is_meta:
        return out_NO
    if kernels := triton_for(out_NO):
        kernels.rotate_back(grads, cos_ND, sin_ND, out_NO)
        return out_NO
    cos, sin = (part.view(-1, length, 1, size) for part in (cos_ND, sin_ND))
    for grad, part in zip(grads[:2], out_NO.split(widths, 1), strict=False):
        g = grad.transpose(1, 2)
        first, second = (g * sin).chunk(2, -1)
        part.unflatten(1, (-1, size)).copy_((g * cos + torch.cat([second, -first], -1)).flatten(0, 1))
    out_NO[:, -widths[2] :].unflatten(1, (-1, size)).copy_(grads[2].transpose(1, 2).flatten(0, 1))
    return out_NO


def swiglu(y_NO: Tensor) -> Tensor:
    """silu(gate) · up, of (N, 2F) with gate first."""
    out_NF = y_NO.new_empty(len(y_NO), y_NO.shape[1] // 2)
    if y_NO.is_meta:
        return out_NF
    if kernels := triton_for(y_NO):
        kernels.swiglu(y_NO, out_NF)
        return out_NF
    gate_NF, up_NF = y_NO.chunk(2, 1)
    return torch.mul(torch.nn.functional.silu(gate_NF), up_NF, out=out_NF)


def swiglu_backward_(g_NF: Tensor, y_NO: Tensor) -> None:
    """In place: `y` becomes the gradient of gate and up, `g` becomes silu(gate) · up.

    silu'(x) = σ(x) · (1 + x · (1 − σ(x))).
    """
    if y_NO.is_meta:
        return
    if kernels := triton_for(y_NO):
        kernels.swiglu_backward_(g_NF, y_NO)
        return
    gate_NF, up_NF = y_NO.chunk(2, 1)
    silu_NF = torch.nn.functional.silu(gate_NF)
    product_NF, grad_up_NF = silu_NF * up_NF, g_NF * silu_NF
    gate_NF.copy_(torch.ops.aten.silu_backward(g_NF * up_NF, gate_NF))
    up_NF.copy_(grad_up_NF)
    g_NF.copy_(product_NF)
