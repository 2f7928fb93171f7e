"""Frozen linear layers that read one tensor, with their adapters: one product for all, one gradient of the input.

lora.py has the mathematics; here it is arranged so that large tensors are read and written as rarely as can be:

- Outputs lie side by side in one tensor (N, O). The adapters' part is written first, B (s · A drop(x)), and the base's
  product is added to it by the matrix product itself, then a bias or residual. Backward, ∂L/∂x is the adapters' part,
  glow A, to which the matrix product adds g W. Autograd adds nothing.
- The A of all the layers are read as one matrix where they lie next to each other (attach.py sees to it), so x is read
  once for all of them.
- A 4-bit weight is made in 16 bit once for all the layers, side by side.

A bundle keeps nothing between forward and backward; its caller does. Where x is a normed tensor, x = h · r ∘ w, the
caller needs to keep h only: ∂L/∂A = glowᵀ x = ((glow · r)ᵀ h) ∘ w.

Shapes: K lanes, N tokens of all lanes (lanes.py), I inputs, O outputs of all layers, R ranks of all adapted layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crosstune.model.frozen import EightBit, FourBit, Frozen, frozen
from crosstune.model.lora import Dropout, LaneLinear, Pass, joined


@dataclass(frozen=True)
class Part:
    """One layer of a bundle: its columns of the output, and its rows of the low-rank tensor if it has adapters."""

    frozen: Frozen
    columns: slice
    layer: LaneLinear | None
    ranks: slice


@dataclass(frozen=True)
class Normed:
    """What turns the tensor that was kept into the one that was read: x = h · r ∘ w."""

    inverse_N: Tensor
    weight_H: Tensor


class Bundle:
    """Frozen layers with one input, adapted or not."""

    def __init__(self, layers: Sequence[nn.Module], now: Pass, matrices: Sequence[Frozen]) -> None:
        self.now, self.parts = now, []
        outputs = ranks = 0
        for layer, matrix in zip(layers, matrices, strict=True):
            lane = layer if isinstance(layer, LaneLinear) else None
            rank = lane.adapters.a_KRI.shape[1] if lane else 0
            columns = slice(outputs, outputs + matrix.out_features)
            self.parts.append(Part(matrix, columns, lane, slice(ranks, ranks + rank)))
            outputs, ranks = columns.stop, ranks + rank
        self.inputs, self.outputs, self.ranks = matrices[0].in_features, outputs, ranks
        self.adapted = [(part, part.layer) for part in self.parts if part.layer is not None]
        self._kept_OI: Tensor | None = None
        self.a_KRI = joined([layer.adapters.copies[0] for _, layer in self.adapted])
        self.grad_a_KRI = joined([layer.adapters.grads[0] for _, layer in self.adapted])

    @classmethod
    def of(cls, layers: Sequence[nn.Module], now: Pass, dtype: torch.dtype) -> Bundle | None:
        """The layers as one bundle; None if one of them is of a kind that only computes by itself."""
        matrices = [frozen(layer.base if isinstance(layer, LaneLinear) else layer, dtype) for layer in layers]
        known = [matrix for matrix in matrices if matrix is not None]
        return cls(layers, now, known) if len(known) == len(matrices) else None

    @property
    def leaf(self) -> Tensor | None:
        """A parameter among the inputs of a node, by which autograd knows that its output has a gradient."""
        return self.adapted[0][1].adapters.a_KRI if self.adapted else None

    def forward(
        self, x_NI: Tensor, dropout: Dropout | None, add_NO: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(outputs side by side plus `add_NO`, the low-rank tensor that `backward` wants)."""
        low_NR = None if self.now.bypass or not self.adapted else self._low(x_NI, dropout)
        y_NO = self._adapters_part(x_NI, low_NR)
        for columns, matrix in self._weights():
            y_NO[:, columns].addmm_(x_NI, matrix.t())
        for part in self.parts:
            if not self._is_plain(part):
                part.frozen.add_product(y_NO[:, part.columns], x_NI)
            if part.frozen.bias is not None:
                y_NO[:, part.columns] += part.frozen.bias
        return y_NO if add_NO is None else y_NO.add_(add_NO), low_NR

    def backward(
        self,
        g_NO: Tensor,
        x_NI: Tensor,
        low_NR: Tensor | None,
        dropout: Dropout | None,
        *,
        normed: Normed | None = None,
        wants_input: bool = True,
    ) -> Tensor | None:
        """Add the gradients of A and B to theirs; return that of the input."""
        g_low_NR = self.low_gradient(g_NO, low_NR)
        self.add_a_gradient(g_low_NR, x_NI, dropout, normed)
        return self.input_gradient(g_NO, g_low_NR, dropout) if wants_input else None

    def low_gradient(self, g_NO: Tensor, low_NR: Tensor | None) -> Tensor | None:
        """The gradient of A drop(x); adds the gradient of B to its own on the way."""
        if low_NR is None:
            return None
        lanes, g_low_NR = self.now.lanes, torch.empty_like(low_NR)
        for part, layer in self.adapted:
            g = g_NO[:, part.columns]
            layer.adapters.grads[1].add_(lanes.outer(g, low_NR[:, part.ranks]))
            lanes.times_into(g_low_NR[:, part.ranks], g, layer.adapters.copies[1])
        return lanes.scale_(g_low_NR, self.now.scale_K)

    def add_a_gradient(
        self, g_low_NR: Tensor | None, x_NI: Tensor, dropout: Dropout | None, normed: Normed | None = None
    ) -> None:
        """Add the gradient of A to its own. `x_NI` is the input, or with `normed` what was normed into it."""
        if g_low_NR is None:
            return
        if normed is not None:
            g_low_NR = (g_low_NR * normed.inverse_N[:, None]).to(x_NI.dtype)
        together = dropout is None and self.grad_a_KRI is not None
        for part, layer in self.adapted[:1] if together else self.adapted:
            ranks, grad_KRI = part.ranks, layer.adapters.grads[0]
            if together and self.grad_a_KRI is not None:
                ranks, grad_KRI = slice(None), self.grad_a_KRI
            found_KRI = self.now.lanes.outer(g_low_NR[:, ranks], self._dropped(x_NI, dropout, layer))
            if normed is None:
                grad_KRI.add_(found_KRI)
            else:
                grad_KRI.addcmul_(found_KRI, normed.weight_H)

    def input_gradient(self, g_NO: Tensor, g_low_NR: Tensor | None, dropout: Dropout | None) -> Tensor:
        """glow A + g W."""
        gx_NI = g_NO.new_zeros(len(g_NO), self.inputs) if g_low_NR is None else self._through_a(g_low_NR, dropout)
        for columns, matrix in self._weights(backward=True):
            gx_NI.addmm_(g_NO[:, columns], matrix)
        return gx_NI

    def _low(self, x_NI: Tensor, dropout: Dropout | None) -> Tensor:
        lanes = self.now.lanes
        if dropout is None and self.a_KRI is not None:
            low_NR = lanes.times(x_NI, self.a_KRI.transpose(1, 2))
        else:
            low_NR = x_NI.new_empty(len(x_NI), self.ranks)
            for part, layer in self.adapted:
                x, a_KRI = self._dropped(x_NI, dropout, layer), layer.adapters.copies[0]
                lanes.times_into(low_NR[:, part.ranks], x, a_KRI.transpose(1, 2))
        return lanes.scale_(low_NR, self.now.scale_K)

    def _adapters_part(self, x_NI: Tensor, low_NR: Tensor | None) -> Tensor:
        """What the base's product is added to: the adapters' part, by itself.

        In 16 bit it would vanish beside anything large: an adapter starts at B = 0, and for many steps what it adds is
        less than half of the last bit of a residual. Beside the base's product, which isn't rounded yet, it isn't lost.
        """
        if low_NR is None:
            return x_NI.new_zeros(len(x_NI), self.outputs)
        whole = len(self.adapted) == len(self.parts)
        y_NO = (x_NI.new_empty if whole else x_NI.new_zeros)(len(x_NI), self.outputs)
        for part, layer in self.adapted:
            b_KRO = layer.adapters.copies[1].transpose(1, 2)
            self.now.lanes.times_into(y_NO[:, part.columns], low_NR[:, part.ranks], b_KRO)
        return y_NO

    def _through_a(self, g_low_NR: Tensor, dropout: Dropout | None) -> Tensor:
        lanes = self.now.lanes
        if dropout is None and self.a_KRI is not None:
            return lanes.times(g_low_NR, self.a_KRI)
        total_NI: Tensor | None = None
        for part, layer in self.adapted:
            gx_NI = lanes.times(g_low_NR[:, part.ranks], layer.adapters.copies[0])
            gx_NI = self._dropped(gx_NI, dropout, layer)
            total_NI = gx_NI if total_NI is None else total_NI.add_(gx_NI)
        assert total_NI is not None
        return total_NI

    def _dropped(self, x_NI: Tensor, dropout: Dropout | None, layer: LaneLinear) -> Tensor:
        """drop(x) for one layer: its own mask."""
        if dropout is None:
            return x_NI
        return dropout.apply(x_NI.view(*dropout.key_KS.shape, -1), layer.columns()).view(x_NI.shape)

    def keep_weights(self, keep: bool) -> None:
        """Keep the 16-bit copy of 4-bit weights from now on, or make it anew for each product."""
        self._kept_OI = self._made() if keep and self._is_four_bit else None

    @property
    def _is_four_bit(self) -> bool:
        return all(isinstance(part.frozen, FourBit) for part in self.parts)

    def _made(self) -> Tensor:
        scale_K = self.now.scale_K
        made_OI = torch.empty(self.outputs, self.inputs, dtype=scale_K.dtype, device=scale_K.device)
        for part in self.parts:
            part.frozen.weight(made_OI[part.columns])
        return made_OI

    def _is_plain(self, part: Part) -> bool:
        return not isinstance(part.frozen, EightBit)

    def _weights(self, *, backward: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Matrices (outputs, inputs) with their columns: all 4-bit ones as one."""
        if self._is_four_bit:
            yield slice(None), self._made() if self._kept_OI is None else self._kept_OI
            return
        for part in self.parts:
            if backward or self._is_plain(part):
                yield part.columns, part.frozen.weight()


class BundledLinear(torch.autograd.Function):
    """One adapted layer as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, bundle: Bundle, _leaf: Tensor, x_NI: Tensor, dropout: Dropout | None) -> Tensor:  # type: ignore[override]
        y_NO, low_NR = bundle.forward(x_NI, dropout)
        ctx.save_for_backward(x_NI, low_NR)
        ctx.bundle, ctx.dropout = bundle, dropout
        return y_NO

    @staticmethod
    def backward(ctx: Any, g_NO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_NI, low_NR = ctx.saved_tensors
        wants_input = ctx.needs_input_grad[2]
        gx_NI = ctx.bundle.backward(g_NO.contiguous(), x_NI, low_NR, ctx.dropout, wants_input=wants_input)
        return None, None, gx_NI, None
