"""What an adapter does to one weight of the base: the formulas of PEFT's merge, one weight at a time.

LoRA and DoRA on linear layers and embeddings, whole tensors trained in place of the base's, single token rows.

Shapes: R rank, I in, O out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """W + scale·B·A of one weight; DoRA then gives each output row the length in `magnitude_O`."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    is_transposed: bool = False  # Conv1D and embeddings store the weight as (in, out)
    magnitude_O: Tensor | None = None
    own_weight: Tensor | None = None  # the base's weight as PEFT saves it with the adapter after a resize

    def shape(self, base_shape: tuple[int, ...]) -> tuple[int, ...]:
        return base_shape if self.own_weight is None else tuple(self.own_weight.shape)

    def merged(self, weight: Tensor) -> Tensor:
        """The changed weight in fp32."""
        weight = weight if self.own_weight is None else self.own_weight
        delta = (self.b_OR.float() @ self.a_RI.float()) * self.scale
        changed = weight.float() + (delta.T if self.is_transposed else delta)
        if self.magnitude_O is None:
            return changed
        length = torch.linalg.norm(changed, dim=0 if self.is_transposed else 1)
        factor = self.magnitude_O.float() / length
        return changed * (factor if self.is_transposed else factor[:, None])


@dataclass(frozen=True)
class Replaced:
    """A whole tensor trained instead of adapted (modules_to_save, biases, a resized embedding)."""

    tensor: Tensor

    def shape(self, base_shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def merged(self, weight: Tensor) -> Tensor:
        return self.tensor.float()


@dataclass(frozen=True)
class Rows:
    """Some rows of an embedding trained (PEFT's trainable_token_indices)."""

    indices: tuple[int, ...]
    rows: Tensor

    def shape(self, base_shape: tuple[int, ...]) -> tuple[int, ...]:
        return base_shape

    def merged(self, weight: Tensor) -> Tensor:
        changed = weight.float().clone()
        changed[list(self.indices)] = self.rows.float()
        return changed


Change = LowRank | Replaced | Rows
