# mypy: disable-error-code="no-untyped-def"
"""elementwise.py's functions and dropout as Triton kernels. Imported only where Triton is: never name it elsewhere.

Triton compiles a kernel anew for an integer that is 1 or divisible by 16 where it wasn't before, and for a pointer by
its alignment. What changes from pass to pass is exempt, so that no pass of another length compiles; widths are a
model's own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, y, inverse, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(value * value) / width + eps)
    normed = (value * r).to(y.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, scaled.to(y.dtype.element_ty), mask=inside)
    tl.store(inverse + row, r)


@triton.jit
def _rms_norm_backward(g, x, weight, inverse, add, out, width, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(g + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scaled *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(inverse + row)
    dx = r * (scaled - value * (r * r) * (tl.sum(scaled * value) / width))
    if ADD:
        dx += tl.load(add + row * width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, dx.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _halves(place, inside, SIZE: tl.constexpr):
    first = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(place + SIZE // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    y, cos, sin, stride, rows,
    SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's heads, BLOCK (a power of 2) of HEADS: both halves of each head at a time."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, HALF)[None, :]
    half = at < SIZE // 2
    inside = (head < HEADS) & half
    place = y + token * stride + head * SIZE + at
    turn = (token % rows) * SIZE + at
    cos_1, cos_2 = _halves(cos + turn, half, SIZE)
    sin_1, sin_2 = _halves(sin + turn, half, SIZE)
    first, second = _halves(place, inside, SIZE)
    tl.store(place, (first * cos_1 - second * sin_1).to(y.dtype.element_ty), mask=inside)
    tl.store(place + SIZE // 2, (second * cos_2 + first * sin_2).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["g_row", "g_head", "g_token", "start", "length", "rows"])
def _rotate_back(
    g, cos, sin, out, g_row, g_head, g_token, out_stride, start, length, rows,
    SIZE: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """`g_row`, `g_head`, `g_token` and `start` count whole heads, which says how they are aligned."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    at = tl.arange(0, HALF)[None, :]
    half = at < SIZE // 2
    inside = (head < HEADS) & half
    source = g + ((token // length) * g_row + (token % length) * g_token + head * g_head) * SIZE + at
    place = out + token * out_stride + (start + head) * SIZE + at
    first, second = _halves(source, inside, SIZE)
    if TURN:
        turn = (token % rows) * SIZE + at
        cos_1, cos_2 = _halves(cos + turn, half, SIZE)
        sin_1, sin_2 = _halves(sin + turn, half, SIZE)
        back = first * cos_1 + second * sin_2
        second = second * cos_2 - first * sin_1
        first = back
    tl.store(place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(place + SIZE // 2, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(y, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(y + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(g, y, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate_at, up_at, g_at = y + row * 2 * width + at, y + row * 2 * width + width + at, g + row * width + at
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g_at, mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    silu = (gate * sigma).to(y.dtype.element_ty).to(tl.float32)
    tl.store(gate_at, (grad * up * sigma * (1 + gate * (1 - sigma))).to(y.dtype.element_ty), mask=inside)
    tl.store(up_at, (grad * silu).to(y.dtype.element_ty), mask=inside)
    tl.store(g_at, (silu * up).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["key", "lane_tokens"])
def _dropout(x, key, columns, threshold, scale, out, lane_tokens, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    lane = token // lane_tokens
    mix = tl.load(key + token) ^ tl.load(columns + at, mask=inside, other=0)
    mix = mix * -2048144789  # lora.py's _MIX_1
    mix = mix ^ (mix >> 13)
    mix = mix * -1028477387  # lora.py's _MIX_2
    keep = mix >= tl.load(threshold + lane)
    value = tl.load(x + token * width + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(keep, value, 0.0) * tl.load(scale + lane).to(tl.float32)
    tl.store(out + token * width + at, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float, y_NH: Tensor, inverse_N: Tensor) -> None:
    """Fill `y_NH` and `inverse_N`."""
    rows, width = x_NH.shape
    _rms_norm[(rows,)](x_NH, weight_H, y_NH, inverse_N, width, eps, **_whole_row(width))


def rms_norm_backward(
    g_NH: Tensor, x_NH: Tensor, weight_H: Tensor, inverse_N: Tensor, add_NH: Tensor | None, out_NH: Tensor
) -> None:
    """Fill `out_NH`."""
    rows, width = x_NH.shape
    add = g_NH if add_NH is None else add_NH
    grid = (rows,)
    _rms_norm_backward[grid](
        g_NH, x_NH, weight_H, inverse_N, add, out_NH, width, ADD=add_NH is not None, **_whole_row(width)
    )


def rotate_(y_NO: Tensor, cos_ND: Tensor, sin_ND: Tensor, width: int) -> None:
    """Turn the first `width` columns in place."""
    size = cos_ND.shape[-1]
    grid, options = _by_heads(len(y_NO), width // size, size)
    _rotate[grid](y_NO, cos_ND, sin_ND, y_NO.stride(0), len(cos_ND), **options)


def rotate_back(grads: tuple[Tensor, Tensor, Tensor], cos_ND: Tensor, sin_ND: Tensor, out_NO: Tensor) -> None:
    """Fill `out_NO`."""
    length, size, start = grads[0].shape[2], cos_ND.shape[-1], 0
    for place, grad in enumerate(grads):
        grad = grad if _whole_heads(grad) else grad.contiguous()
        grid, options = _by_heads(len(out_NO), grad.shape[1], size)
        heads = (stride // size for stride in grad.stride()[:3])
        _rotate_back[grid](
            grad, cos_ND, sin_ND, out_NO, *heads, out_NO.stride(0), start, length, len(cos_ND), TURN=place < 2,
            **options,
        )  # fmt: skip
        start += grad.shape[1]


def _whole_heads(grad_BhTD: Tensor) -> bool:
    """Heads lie in one piece each, whole heads apart."""
    *strides, along = grad_BhTD.stride()
    return along == 1 and all(stride % grad_BhTD.shape[3] == 0 for stride in strides)


def _by_heads(tokens: int, heads: int, size: int) -> tuple[tuple[int, int], dict[str, Any]]:
    block = min(triton.next_power_of_2(heads), 8)
    options = {"SIZE": size, "HALF": triton.next_power_of_2(size // 2), "HEADS": heads, "BLOCK": block, "num_warps": 4}
    return (tokens, triton.cdiv(heads, block)), options


def swiglu(y_NO: Tensor, out_NF: Tensor) -> None:
    """Fill `out_NF`."""
    rows, width = out_NF.shape
    _swiglu[(rows, triton.cdiv(width, 2048))](y_NO, out_NF, width, BLOCK=2048, num_warps=8)


def swiglu_backward_(g_NF: Tensor, y_NO: Tensor) -> None:
    """Both in place."""
    rows, width = g_NF.shape
    _swiglu_backward[(rows, triton.cdiv(width, 2048))](g_NF, y_NO, width, BLOCK=2048, num_warps=8)


def dropout(x_KSI: Tensor, key_KS: Tensor, columns_I: Tensor, threshold_K: Tensor, scale_K: Tensor) -> Tensor:
    """lora.Dropout.apply."""
    lanes, tokens, width = x_KSI.shape
    x_KSI = x_KSI.contiguous()
    out_KSI = torch.empty_like(x_KSI)
    _dropout[(lanes * tokens, triton.cdiv(width, 2048))](
        x_KSI, key_KS.contiguous(), columns_I, threshold_K, scale_K, out_KSI, tokens, width, BLOCK=2048, num_warps=8
    )
    return out_KSI


def _whole_row(width: int) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
