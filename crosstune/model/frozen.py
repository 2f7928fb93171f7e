"""A frozen linear layer's weight as a matrix: kept as it is, or made anew from 4 or 8 bits for one product.

The products with it are made here and in bundle.py rather than by the layer itself, so that adapters can be added in
the same pass over the output and nothing is kept for a weight that gets no gradient.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from crosstune.model.elementwise import triton_for


class Frozen(Protocol):
    """y = x Wᵀ + b, W of shape (outputs, inputs)."""

    in_features: int
    out_features: int
    bias: Tensor | None

    def weight(self, out: Tensor | None = None) -> Tensor:
        """W in the compute type; written to `out` if it must be made."""
        ...

    def add_product(self, y_NO: Tensor, x_NI: Tensor) -> None:
        """y += x Wᵀ."""
        ...


class Plain:
    """A weight in the compute type: nn.Linear, or GPT-2's Conv1D, which holds it transposed."""

    def __init__(self, weight_OI: Tensor, bias: Tensor | None) -> None:
        self.matrix, self.bias = weight_OI, bias
        self.out_features, self.in_features = weight_OI.shape

    def weight(self, out: Tensor | None = None) -> Tensor:
        """The parameter itself."""
        return self.matrix

    def add_product(self, y_NO: Tensor, x_NI: Tensor) -> None:
        """y += x Wᵀ."""
        y_NO.addmm_(x_NI, self.matrix.t())


class FourBit:
    """bitsandbytes' NF4 or FP4."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.layer, self.bias, self.dtype = layer, layer.bias, dtype
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def weight(self, out: Tensor | None = None) -> Tensor:
        """The weight made in 16 bit."""
        packed, state = self.layer.weight.data, self.layer.weight.quant_state
        if packed.is_meta:
            return packed.new_empty(state.shape, dtype=self.dtype) if out is None else out
        if triton_for(packed):
            from crosstune.model import triton_nf4

            if triton_nf4.fits(state):
                if out is None:
                    out = packed.new_empty(state.shape, dtype=self.dtype)
                return triton_nf4.make(packed, state, out)
        from bitsandbytes.functional import dequantize_4bit

        made = dequantize_4bit(packed, state)
        return made if out is None else out.copy_(made)

    def add_product(self, y_NO: Tensor, x_NI: Tensor) -> None:
        """y += x Wᵀ."""
        y_NO.addmm_(x_NI, self.weight().t())


class EightBit:
    """bitsandbytes' int8: its own product forward (outliers apart, in 16 bit), the weight made in 16 bit backward."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self.layer, self.dtype = layer, dtype
        self.bias: Tensor | None = None  # bitsandbytes adds it
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def weight(self, out: Tensor | None = None) -> Tensor:
        """The weight made in 16 bit, as bitsandbytes.autograd's MatMul8bitLt does for its backward pass."""
        packed, state = self.layer.weight, self.layer.state
        numbers, scale_O = (state.CB, state.SCB) if state.CB is not None else (packed.CB, packed.SCB)
        return numbers.to(self.dtype, copy=True).mul_(scale_O[:, None].mul(1 / 127))

    def add_product(self, y_NO: Tensor, x_NI: Tensor) -> None:
        """y += x Wᵀ + b."""
        with torch.no_grad():
            y_NO.add_(self.layer(x_NI))


def frozen(layer: nn.Module, dtype: torch.dtype) -> Frozen | None:
    """How to compute with `layer`'s weight in `dtype`; None for a kind of layer that only knows itself."""
    from transformers.pytorch_utils import Conv1D

    kind, device = type(layer).__name__, next(layer.parameters()).device
    if type(layer) is nn.Linear and layer.weight.dtype == dtype:
        return Plain(layer.weight.detach(), layer.bias)
    if isinstance(layer, Conv1D) and layer.weight.dtype == dtype:
        return Plain(layer.weight.detach().t(), layer.bias)
    # On a CPU bitsandbytes repacks a 4-bit weight for its own product in a way that only it can read.
    if kind == "Linear4bit" and device.type != "cpu":
        packed: Any = layer.weight
        return FourBit(layer, dtype) if packed.quant_state is not None and packed.quant_state.dtype == dtype else None
    if kind.endswith("Linear8bitLt"):  # frozen_int8.py's kind too
        return EightBit(layer, dtype)
    return None
