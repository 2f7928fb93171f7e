"""Attention over rows that lie one after another without padding, each token seeing its own row only.

PyTorch's flash kernel for rows of different lengths (aten, what torch.nn.attention.varlen calls where torch has it),
with grouped heads. Elsewhere a row at a time.

Shapes: N tokens, R rows, h query heads, g key heads, D head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from crosstune.model.attention import ShortRows, as_taken, takes_short_rows
from crosstune.model.repeatable import in_one_order


@dataclass(frozen=True)
class Rows:
    """Where rows begin and end: int32 (R + 1,), on the device; `longest`: no row has more tokens."""

    cuts: Tensor
    longest: int


def packed_attention(query_1hND: Tensor, key_1gND: Tensor, value_1gND: Tensor, rows: Rows, scale: float) -> Tensor:
    """(N, h·D): causal attention within each row."""
    query, key, value = (x[0].transpose(0, 1) for x in (query_1hND, key_1gND, value_1gND))
    if query.device.type == "cuda":
        return _Flash.apply(query, key, value, rows, scale).flatten(1)
    return torch.cat(list(_each_row(query, key, value, rows, scale)))


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the flash kernel runs there: bf16 from compute capability 8.0, where torch was built with it."""
    if device.type != "cuda":
        return True
    is_new = torch.cuda.get_device_capability(device) >= (8, 0)
    return is_new and dtype == torch.bfloat16 and torch.backends.cuda.is_flash_attention_available()


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_NhD: Tensor, k_NgD: Tensor, v_NgD: Tensor, rows: Rows, scale: float) -> Tensor:  # type: ignore[override]
        given = (rows.cuts, rows.cuts, rows.longest, rows.longest, 0.0, True)
        out_NhD, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_NhD, k_NgD, v_NgD, *given, False, scale=scale
        )
        ctx.save_for_backward(q_NhD, k_NgD, v_NgD, out_NhD, lse, state, unused)
        ctx.given, ctx.scale = given, scale
        return out_NhD

    @staticmethod
    def backward(ctx: Any, g_NhD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, state, unused = ctx.saved_tensors
        with in_one_order():
            grads = torch.ops.aten._flash_attention_backward(
                g_NhD.contiguous(), *saved, *ctx.given, state, unused, scale=ctx.scale
            )
        return (*grads, None, None)


def _each_row(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float) -> Iterator[Tensor]:
    lengths = rows.cuts.diff().tolist()
    # split, not slices: the gradient of a slice is a tensor of all tokens
    for parts in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        is_short = takes_short_rows(q, k, v)
        k, v = as_taken(q, k, v, None)
        if is_short:
            seen = ShortRows.apply(q, k, v, scale)
        else:
            seen = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        yield seen[0].transpose(0, 1).flatten(1)
