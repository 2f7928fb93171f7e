"""bitsandbytes' int8 layers, taught that they are frozen.

bitsandbytes keeps the input of every product in an attribute of its own, out of autograd's sight, although a frozen
weight's gradient is never asked for (MatMul8bitLt and MatMul8bitFp, 0.48 to 0.50). So a checkpointed block lets go of
nothing: an 8B base keeps 55 KB a token and block. The layers here keep nothing, and give the same values and gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Product(torch.autograd.Function):
    """x Wᵀ by the layer's own kernel; the gradient of x by W undone to the gradient's type, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return _forward_of_bitsandbytes(layer)(layer, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        state = ctx.layer.state
        weight = state.CB.to(grad.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(grad, weight), None


def keep_no_inputs(model: nn.Module) -> list[nn.Module]:
    """Let every int8 layer of `model` keep nothing for the backward pass; returns them, for `keep_inputs_again`."""
    changed = [module for module in model.modules() if type(module).__name__ == "Linear8bitLt"]
    for module in changed:
        module.__class__ = _frozen_class(type(module))
    return changed


def keep_inputs_again(changed: list[nn.Module]) -> None:
    """Undo `keep_no_inputs`."""
    for module in changed:
        module.__class__ = type(module).__mro__[1]


_CLASSES: dict[type, type] = {}  # bitsandbytes' class → ours; made once, as importing bitsandbytes takes seconds


def _frozen_class(parent: type) -> type:
    if parent not in _CLASSES:

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            wanted = torch.is_grad_enabled() and x.requires_grad
            return _Product.apply(x, self) if wanted else _forward_of_bitsandbytes(self)(self, x)

        _CLASSES[parent] = type("FrozenLinear8bitLt", (parent,), {"forward": forward})
    return _CLASSES[parent]


def _forward_of_bitsandbytes(layer: nn.Module) -> Any:
    return type(layer).__mro__[1].forward  # type: ignore[attr-defined]
