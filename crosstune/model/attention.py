"""Attention as transformers' models call it, where PyTorch's own choice is slow or not the same each time.

*On a GPU* gradients are the same bits each time (repeatable.py). In fp32 and below compute capability 8.0 (T4, V100)
the flash kernel isn't to be had, and transformers hands grouped heads to torch as they are (integrations/
sdpa_attention.py, use_gqa_in_sdpa). The memory-efficient kernel doesn't take those (aten/native/transformers/cuda/
sdp_utils.cpp, supports_gqa = false), so torch would fall back to plain products with T x T matrices. Repeating keys and
values first keeps the efficient kernel.

*On a CPU* PyTorch 2.8's flash kernel takes no grouped heads either: the same is done there.

*bf16 on a CPU*: the forward pass of torch's flash kernel is good, its backward pass isn't for short rows (torch 2.13:
16.8 ms against 4.9 ms by plain products for 15 rows of 60 tokens, 9 heads of 64, one core of an AMD EPYC with
avx512_bf16; at 128 tokens 38 against 20 to 30 ms).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from crosstune.memory.precision import cpu_takes_groups
from crosstune.model.repeatable import attend

ON_GPU = "sdpa_on_gpu"
ON_CPU = "sdpa_on_cpu"
SHORT = 128  # tokens; longer rows take torch's own backward pass
FLASH_WIDTH = 256  # of a head, at most, that the flash kernel takes


def attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """transformers' `attn_implementation` for a device and compute type."""
    if device.type == "cpu" and (dtype == torch.bfloat16 or not cpu_takes_groups()):
        register()
        return ON_CPU
    if device.type != "cuda":
        return "sdpa"
    register()
    return ON_GPU


def register() -> None:
    """Make the names known to transformers, with the masks of its own sdpa."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, attention in ((ON_GPU, attention_as_taken), (ON_CPU, cpu_attention)):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, sdpa_mask)


def attention_as_taken(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa_attention_forward; keys and values of every query head where the kernel needs them so.

    A frozen base has no dropout. transformers' own is called for what it alone knows: biases of a model's, what it
    refuses, and one token more after a cache, whose query heads it packs rather than repeat the whole cache.
    """
    one_more = query.shape[2] == 1 and attention_mask is not None
    if one_more or any(kwargs.get(name) is not None for name in ("position_bias", "softcap")):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs
        )
    key, value = as_taken(query, key, value, attention_mask)
    causal = bool(module.is_causal) if is_causal is None else is_causal
    causal = causal and attention_mask is None and query.shape[2] > 1
    out = attend(query, key, value, mask=attention_mask, causal=causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def takes_groups(query: Tensor) -> bool:
    """The flash kernel is to be had, and takes fewer key heads than query heads."""
    if query.device.type == "cpu":
        return cpu_takes_groups()
    return query.dtype != torch.float32 and torch.cuda.get_device_capability(query.device) >= (8, 0)


def as_taken(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values as the kernel takes them: of every query head, where it takes no groups."""
    may_group = mask is None and query.shape[-1] == value.shape[-1] <= FLASH_WIDTH
    if may_group and takes_groups(query):
        return key, value
    return for_every_head(query, key), for_every_head(query, value)


def for_every_head(query: Tensor, key: Tensor) -> Tensor:
    """Keys or values of every query head."""
    groups = query.shape[1] // key.shape[1]
    return key.repeat_interleave(groups, 1) if groups > 1 else key


def cpu_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa_attention_forward: the same kernel forward, another one backward where rows are short."""
    causal = bool(module.is_causal) if is_causal is None else is_causal
    if causal and attention_mask is None and not dropout and takes_short_rows(query, key, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        key, value = as_taken(query, key, value, None)
        return ShortRows.apply(query, key, value, scale).transpose(1, 2).contiguous(), None
    if not takes_groups(query):
        return attention_as_taken(module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def takes_short_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Rows (B, heads, T, D) whose backward pass is better done by `ShortRows`."""
    is_short = 1 < query.shape[2] == key.shape[2] <= SHORT and query.shape[-1] == value.shape[-1]
    return is_short and query.dtype == torch.bfloat16 and query.device.type == "cpu" and torch.is_grad_enabled()


class ShortRows(torch.autograd.Function):
    """Causal attention, (B, h, T, D) with g heads of keys. Keeps no T x T matrix.

    With p = softmax(s · q kᵀ), made again: ∂v = pᵀ ∂out, ∂p = ∂out vᵀ,
    ∂(q kᵀ) = s · p (∂p − rowsum(p ∂p)). The scores are made in fp32, as the kernel makes them.
    """

    @staticmethod
    def forward(ctx: Any, q_BhTD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        out_BhTD = scaled_dot_product_attention(
            q_BhTD, k_BgTD, v_BgTD, is_causal=True, scale=scale, enable_gqa=k_BgTD.shape[1] != q_BhTD.shape[1]
        )
        ctx.save_for_backward(q_BhTD, k_BgTD, v_BgTD)
        ctx.scale = scale
        return out_BhTD

    @staticmethod
    def backward(ctx: Any, grad_BhTD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BhTD, k_BgTD, v_BgTD = ctx.saved_tensors
        shape, groups = (*q_BhTD.shape[:3], q_BhTD.shape[2]), q_BhTD.shape[0] * k_BgTD.shape[1]
        # Query heads of one key head lie one after another: their tokens are rows of one product.
        q, k, v, grad = (x.reshape(groups, -1, x.shape[-1]) for x in (q_BhTD, k_BgTD, v_BgTD, grad_BhTD))
        p_BhTT = torch.bmm(q.float().mul_(ctx.scale), k.float().transpose(1, 2)).view(shape)
        # softmax is vectorised, exp isn't everywhere: 0.4 against 1.7 ms for 0.5 million numbers, torch 2.13
        p_BhTT = p_BhTT.add_(p_BhTT.new_full(shape[2:], -torch.inf).triu_(1)).softmax(-1)
        p = p_BhTT.to(q.dtype).view(groups, -1, shape[3])
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        grad_p_BhTT = torch.bmm(grad, v.transpose(1, 2)).view(shape).float()
        grad_s_BhTT = torch.ops.aten._softmax_backward_data(grad_p_BhTT, p_BhTT, -1, torch.float32)
        grad_s = grad_s_BhTT.mul_(ctx.scale).to(q.dtype).view(p.shape)
        grad_q, grad_k = torch.bmm(grad_s, k), torch.bmm(grad_s.transpose(1, 2), q)
        return grad_q.view_as(q_BhTD), grad_k.view_as(k_BgTD), grad_v.view_as(v_BgTD), None
