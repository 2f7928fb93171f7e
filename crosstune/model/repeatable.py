"""Attention on a GPU whose gradients are the same bits each time.

PyTorch's fast kernels cut the backward pass into blocks of keys, and each block adds its share to the queries' gradient
atomically, in the order in which blocks happen to end: on an H200 one pass in five gave other gradients at 512 tokens a
row, two in five at 2,048. A run that goes on after a kill would not be the run without it. The flash and the
memory-efficient kernel can add in one order, for `torch.use_deterministic_algorithms`; cuDNN's can't in PyTorch
(docs/source/notes/randomness.rst). So forward passes take the kernel that PyTorch chooses, and backward ones flash's in
cuDNN's place: both keep the same log-sum-exp.

Shapes: B rows, h query heads, g key heads, T tokens, D head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

FLASH, CUDNN, EFFICIENT = (
    int(kernel.value)
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
)
ALIGNED = 8  # numbers: the memory-efficient kernel reads masks in such pieces, flash heads


@contextmanager
def in_one_order() -> Iterator[None]:
    """Kernels of this block add up in one order where they can; those that can't raise RuntimeError."""
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


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool, scale: float | None
) -> Tensor:
    """scaled_dot_product_attention of (B, h, T, D) with g key heads, (B, h, T, D)."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    is_known = query.shape[-1] % ALIGNED == 0 and query.shape[-1] == value.shape[-1]
    if learns and is_known and query.device.type != "cpu":
        kernel = kernel_of(query, key, value, mask, causal, scale)
        if kernel in (FLASH, CUDNN, EFFICIENT):
            return Repeatable.apply(query, key, value, mask, (causal, scale, kernel))
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


class Repeatable(torch.autograd.Function):
    """Attention by one of PyTorch's fused kernels, backward in one order."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: tuple[bool, float | None, int]
    ) -> Tensor:
        causal, scale, kernel = how
        aten, bias = torch.ops.aten, None
        if kernel == EFFICIENT:
            bias = None if mask is None else _bias(mask, query, key)
            out, lse, *random = aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, 0.0, causal, scale=scale
            )
        elif kernel == CUDNN:
            out, lse, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, causal, False, scale=scale
            )
            lse, random = lse.view(query.shape[:3]), [seed, offset]
        else:
            out, lse, *_, seed, offset, _ = aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, causal, False, scale=scale
            )
            random = [seed, offset]
        ctx.save_for_backward(query, key, value, bias, out, lse, *random)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, bias, out, lse, *random = ctx.saved_tensors
        causal, scale, kernel = ctx.how
        aten = torch.ops.aten
        with in_one_order():
            if kernel == EFFICIENT:
                grads = aten._scaled_dot_product_efficient_attention_backward(
                    grad, query, key, value, bias, out, lse, *random, 0.0, [True, True, True, False], causal,
                    scale=scale,
                )[:3]  # fmt: skip
            else:
                sizes = (None, None, query.shape[2], key.shape[2])
                grads = aten._scaled_dot_product_flash_attention_backward(
                    grad, query, key, value, out, lse, *sizes, 0.0, causal, *random, scale=scale
                )
        return *grads, None, None


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as numbers to add, laid out as the memory-efficient kernel reads it."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    length = key.shape[2]
    mask = pad(mask, (0, -length % ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], length)
