"""Quantised linear layers without data, as transformers and bitsandbytes leave them after loading."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from crosstune.errors import MissingExtra
from crosstune.model.base import Base


def quantize_linears(base: Base, kind: str, *, double_quant: bool) -> None:
    """Replace every linear layer of a meta base but its head by a quantised one."""
    try:
        import bitsandbytes
    except ImportError:
        raise MissingExtra("bitsandbytes", "quant") from None
    # bitsandbytes keeps its table of 8-bit values for good, on the device that asked first: a meta table left there
    # makes every later quantisation in this process fail ("Cannot copy out of meta tensor").
    with patch.dict(bitsandbytes.functional.name2qmap):
        _replace_linears(base, kind, double_quant=double_quant)


def _replace_linears(base: Base, kind: str, *, double_quant: bool) -> None:
    linears = [name for name, module in base.model.named_modules() if isinstance(module, nn.Linear)]
    for name in linears:  # by name: the 16-bit weights go one after another, as while loading
        if name == base.head_name:
            continue
        module = base.model.get_submodule(name)
        new: Any = _eight_bit(module) if kind == "int8" else _four_bit(module, double_quant, base.dtype)
        new.bias = module.bias
        parent, _, leaf = name.rpartition(".")
        setattr(base.model.get_submodule(parent), leaf, new)
        del module


def _four_bit(linear: nn.Linear, double_quant: bool, dtype: torch.dtype) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    options: dict[str, Any] = {"compress_statistics": double_quant, "quant_type": "nf4"}
    new: Any = Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, device="meta", **options
    )
    weight: Any = Params4bit(linear.weight.data, requires_grad=False, module=new, **options)
    new.weight = weight._quantize(linear.weight.device)  # what .to("cuda") does; .to("meta") refuses
    new.compute_type_is_set = True  # else the first call looks at the values of its input
    return new  # type: ignore[no-any-return]


def _eight_bit(linear: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    new: Any = Linear8bitLt(
        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=6.0, device="meta"
    )  # 6.0: transformers' BitsAndBytesConfig
    numbers = torch.empty(linear.weight.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(linear.out_features, dtype=torch.float32, device="meta")
    new.weight = Int8Params(numbers, requires_grad=False, has_fp16_weights=False, CB=numbers, SCB=scales)
    return new  # type: ignore[no-any-return]
