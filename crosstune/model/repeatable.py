"""Attention on a GPU whose gradients are the same bits each time.

PyTorch's fast kernels cut the backward pass into blocks of keys, and each block adds its share to the queries'
gradient atomically, in the order in which blocks happen to end. On an H200, 5 of 12 passes gave other gradients than
the first at 512 tokens a row, 10 of 12 at 2,048, and a run that went on after a kill wasn't the run without it. The
flash and the memory-efficient kernel can add in one order, for `torch.use_deterministic_algorithms`; cuDNN's can't in
PyTorch (docs/source/notes/randomness.rst). So forward passes take the kernel that PyTorch chooses, and backward ones
flash's in cuDNN's place: both keep the same log-sum-exp.

Shapes: B rows, h query heads, g key heads, T tokens, D head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import is_flash_attention_available
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

FLASH, CUDNN, EFFICIENT = (
    int(kernel.value)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
)
FUSED = (FLASH, CUDNN, EFFICIENT)
How = tuple[bool, float | None, int]  # causal, scale, kernel
ALIGNED = 8  # numbers: the memory-efficient kernel reads masks in such pieces, flash heads


@contextmanager
def in_one_order() -> Iterator[None]:
    """Kernels of this block add up in one order where they can; those that can't raise RuntimeError.

    PyTorch's setting is the process's: no other thread may compute meanwhile.
    """
    settings: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fills


def kernel_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> int:
    """The kernel that PyTorch's scaled_dot_product_attention takes for these."""
    grouped = query.shape[1] != key.shape[1]
    return int(torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped))


def fused_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> int | None:
    """That kernel, if `fused_attention` and `fused_gradients` know it. Not every build of torch has flash."""
    kernel = kernel_of(query, key, value, mask, causal, scale)
    is_there = kernel in FUSED and (kernel != CUDNN or is_flash_attention_available())
    return kernel if is_there else None


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool, scale: float | None
) -> Tensor:
    """scaled_dot_product_attention of (B, h, T, D) with g key heads, (B, h, T, D)."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    is_known = query.shape[-1] % ALIGNED == 0 and query.shape[-1] == value.shape[-1]
    may_take = learns and is_known and query.device.type != "cpu"
    kernel = fused_kernel(query, key, value, mask, causal, scale) if may_take else None
    if kernel is not None:
        return Repeatable.apply(query, key, value, mask, (causal, scale, kernel))
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


class Repeatable(torch.autograd.Function):
    """Attention by one of PyTorch's fused kernels, backward in one order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How
    ) -> Tensor:
        out, kept = fused_attention(query, key, value, mask, how)
        ctx.save_for_backward(query, key, value, out, *kept)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, *kept = ctx.saved_tensors
        with in_one_order():
            return *fused_gradients(grad, (query, key, value, out), kept, ctx.how), None, None


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How
) -> tuple[Tensor, list[Tensor | None]]:
    """(what attention gives, what its backward pass wants besides)."""
    causal, scale, kernel = how
    aten = torch.ops.aten
    if kernel == EFFICIENT:
        bias = None if mask is None else bias_of(mask, query, key)
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, causal, scale=scale
        )
        return out, [lse, seed, offset, bias]
    if kernel == CUDNN:
        out, lse, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return out, [lse.view(query.shape[:3]), seed, offset, None]
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scale
    )
    return out, [lse, seed, offset, None]


def fused_gradients(
    grad: Tensor, given: tuple[Tensor, Tensor, Tensor, Tensor], kept: Sequence[Tensor | None], how: How
) -> list[Tensor]:
    """Gradients of `given`'s queries, keys and values; the fourth is what attention gave."""
    query, key, *_ = given
    lse, seed, offset, bias = kept
    causal, scale, kernel = how
    aten = torch.ops.aten
    if kernel == EFFICIENT:
        wanted = [True, True, True, False]
        *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, *given[:3], bias, given[3], lse, seed, offset, 0.0, wanted, causal, scale=scale
        )
        return grads
    sizes = (None, None, query.shape[2], key.shape[2])
    return list(
        aten._scaled_dot_product_flash_attention_backward(
            grad, *given, lse, *sizes, 0.0, causal, seed, offset, scale=scale
        )
    )


def bias_of(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as numbers to add, laid out as the memory-efficient kernel reads it."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    length = key.shape[2]
    if length % ALIGNED:
        mask = pad(mask, (0, -length % ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)
