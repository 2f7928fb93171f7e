"""Attention where the flash kernel isn't to be had: fp32, and GPUs below compute capability 8.0 (T4, V100).

transformers hands grouped heads to torch as they are (integrations/sdpa_attention.py, use_gqa_in_sdpa). The
memory-efficient kernel doesn't take those (aten/native/transformers/cuda/sdp_utils.cpp, supports_gqa = false), so torch
would fall back to plain products with T x T matrices. Repeating keys and values first keeps the efficient kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

REPEATED = "sdpa_repeated"


def attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """transformers' `attn_implementation` for a device and compute type."""
    if device.type != "cuda" or (dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)):
        return "sdpa"
    register()
    return REPEATED


def register() -> None:
    """Make the name known to transformers, with the masks of its own sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(REPEATED, repeated_attention)
    AttentionMaskInterface.register(REPEATED, sdpa_mask)


def repeated_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa_attention_forward with keys and values of every query head."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(module.is_causal) if is_causal is None else is_causal
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling,
        is_causal=causal and attention_mask is None and query.shape[2] > 1,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
