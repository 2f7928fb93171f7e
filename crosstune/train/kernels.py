"""What CUDA kernels allocate inside themselves, and which attention kernel CUDA would take: meta tensors show neither.

Read from the sources of PyTorch 2.11 and bitsandbytes 0.50, and held to an H200's readings in tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from crosstune.memory.gpus import Machine, flash_sums
from crosstune.memory.precision import repeats_heads
from crosstune.model import attention, repeatable
from crosstune.train.trace import Inside, StandIn, Temporaries


def four_bit_product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inside:
    """bitsandbytes::gemm_4bit beyond 4 rows: the statistics undone, then the weight in 16 bit, then a plain product.

    Up to 4 rows a fused kernel reads the 4-bit weight itself (bitsandbytes' _gemm_4bit_use_custom_cuda).
    """
    x, _, shape = args[:3]
    outputs, inputs = shape
    if x.numel() // inputs <= 4:
        return Inside(())
    nested = kwargs.get("absmax_8bit", args[7] if len(args) > 7 else None)
    statistics = [] if nested is None else [4 * nested.numel()] * 2
    return Inside([*statistics, outputs * inputs * x.element_size()], first=True)


def flash_backward(multiprocessors: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inside:
    """FlashAttention 2's backward pass: dq summed up in fp32, the softmax's row sums, dk and dv of every query head.

    In one order (model/repeatable.py) blocks of keys are dealt out to as many sums as keep all multiprocessors busy.
    """
    _, q, k = args[:3]
    batch, heads, length, width = q.shape
    rows, columns = -(-length // 128) * 128, max(32, -(-width // 32) * 32)
    sums = flash_sums(batch * heads, multiprocessors)
    found = [4 * batch * heads * rows, 4 * batch * heads * rows * columns * sums]
    if k.shape[1] != heads:  # grouped heads: gradients of each query head's own copy, summed afterwards
        found += [k.element_size() * batch * heads * k.shape[2] * width] * 2
    return Inside(found, stacked=True)


def int8_quantise(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inside:
    """bitsandbytes::int8_vectorwise_quant: |x| in fp16 and the mask of outliers."""
    return Inside([2 * args[0].numel(), args[0].numel()])


def int8_product(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inside:
    """bitsandbytes::int8_mixed_scaled_mm: the product in int32, then in fp16, then in the input's type."""
    x, quantised, weight = args[:3]
    count = quantised.numel() // quantised.shape[-1] * weight.shape[0]
    return Inside([4 * count] + [2 * count] * (x.dtype != torch.float16), first=True, stacked=True)


def int8_quantised(x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Its results, for an input without outliers (beyond 6.0: some columns in a thousand, in trained models)."""
    rows = x.numel() // x.shape[-1]
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(0, dtype=torch.int64),
    )


def int8_multiplied(x: Tensor, quantised: Tensor, weight: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """The result of int8_mixed_scaled_mm, without outliers."""
    return x.new_empty((*quantised.shape[:-1], weight.shape[0])), x.new_empty(0)


def log_sum_exp(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Inside:
    """aten::logsumexp: exp(x - max), as large as x (ATen/native/ReduceOps.cpp)."""
    return Inside([args[0].numel() * args[0].element_size()], first=True)


def four_bit_made(*_: Any, **__: Any) -> None:
    """dequantize_4bit into a tensor that is given: its stand-in for meta compares a list of sizes with a torch.Size."""


def added_in_place(into: Tensor, *_: Any) -> Tensor:
    """scatter_add of a gather's backward pass: into zeros of its own, in place but where a dispatch mode looks on."""
    return into


STAND_INS: dict[str, StandIn] = {
    "aten::scatter_add": added_in_place,
    "bitsandbytes::dequantize_4bit.out": four_bit_made,
    "bitsandbytes::int8_vectorwise_quant": int8_quantised,
    "bitsandbytes::int8_mixed_scaled_mm": int8_multiplied,
}
CPU_TEMPORARIES: dict[str, Temporaries] = {"aten::logsumexp": log_sum_exp}


def temporaries_of(machine: Machine) -> dict[str, Temporaries]:
    """Operator → what its kernel allocates inside itself on this device."""
    if machine.kind != "cuda":
        return CPU_TEMPORARIES
    return {
        **CPU_TEMPORARIES,
        "bitsandbytes::gemm_4bit": four_bit_product,
        "bitsandbytes::int8_vectorwise_quant": int8_quantise,
        "bitsandbytes::int8_mixed_scaled_mm": int8_product,
        "aten::_scaled_dot_product_flash_attention_backward": partial(flash_backward, machine.multiprocessors),
    }


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as CUDA dispatches it in 16 bit: flash without a mask, memory-efficient with one.

    On meta PyTorch would take the math kernel, whose T x T matrices CUDA never makes.
    """
    if attn_mask is not None:
        return efficient_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The same in fp32 and below compute capability 8.0."""
    bias = None if attn_mask is None else repeatable.bias_of(attn_mask, query, key)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]


def cpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as a CPU dispatches it: flash."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@contextmanager
def attention_of(machine: Machine, precision: str) -> Iterator[None]:
    """Let meta tensors take the attention kernel that the device would."""
    repeats = repeats_heads(machine, precision)
    is_cpu = machine.kind == "cpu"
    kernel = cpu_attention if is_cpu else efficient_attention if repeats else flash_attention

    def kernel_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any) -> int:
        if is_cpu:
            return int(SDPBackend.MATH.value)  # none that is made the same bits each time by us
        return repeatable.EFFICIENT if repeats or mask is not None else repeatable.FLASH

    with (
        patch.object(torch.nn.functional, "scaled_dot_product_attention", kernel),
        patch.object(repeatable, "scaled_dot_product_attention", kernel),
        patch.object(repeatable, "kernel_of", kernel_of),
        patch.object(attention, "takes_groups", lambda query: not repeats),
    ):
        yield
