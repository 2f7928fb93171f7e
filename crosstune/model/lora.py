"""K adapters on one frozen linear layer: all the mathematics of a lane, and nothing else.

A wave holds K lanes. A pass brings each lane the same number of tokens S (its rows, padded), so the input of a linear
layer is K equal blocks. Lane k's output is the frozen layer's plus its own low-rank update (LoRA, arXiv:2106.09685):

    y_k = W x_k + s_k · B_k A_k drop_k(x_k)          s_k = alpha / rank, or alpha / √rank (rsLoRA, arXiv:2312.03732)

W is applied once to all lanes' tokens; A and B are batched matrix products over the lanes. With g = ∂L/∂y and
low = s · drop(x) Aᵀ, which is kept, the gradients are

    ∂L/∂B = gᵀ low        ∂L/∂low = g B        ∂L/∂A = s · (g B)ᵀ drop(x)        ∂L/∂x += drop(s · g B A)

Nothing in them crosses lanes, and W needs none, so W's layer keeps no input for itself. The input x is shared by all
layers that read it (query, key, value), so K adapters cost one saved copy of x a layer, not one each.

Ranks that differ share a wave by zero padding to the largest, R: rows of A and columns of B beyond a lane's rank are
zero. If A's row and B's column are both zero, so are their gradients (low = 0 makes ∂B zero, B = 0 makes ∂A zero),
and AdamW leaves a zero weight with a zero gradient at zero. A lane without an adapter on this layer has rank 0 here.

Dropout draws nothing from a generator. Each element's mask is a hash of (lane seed, step, row, position, layer,
channel), so a lane's masks don't depend on the lanes beside it, on padding, or on how a step is cut into passes; the
backward pass computes the mask again in place of keeping it. `token_keys` (data/batches.py) has hashed all but layer
and channel; here the rest is mixed in with two rounds of multiply and xor-shift, as in MurmurHash3's finaliser
(github.com/aappleby/smhasher). Kept elements are scaled by 1 / (1 − p).

Shapes: K lanes, S tokens of a lane, I inputs, O outputs, R largest rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from crosstune.model.elementwise import runs_triton, triton_for
from crosstune.model.lanes import Lanes

# MurmurHash3's two finaliser constants, as signed 32-bit numbers: torch has no unsigned arithmetic on every device.
_MIX_1, _MIX_2 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


@dataclass
class Dropout:
    """What a pass knows of dropout: a hashed key a token, and each lane's rate."""

    key_KS: Tensor  # int32
    threshold_K: Tensor  # int32: an element is dropped if its hash lies below
    scale_K: Tensor  # compute type: 1 / (1 − p)

    @staticmethod
    def thresholds(rates: list[float], device: torch.device) -> Tensor:
        """int32 (K,): the hash, uniform over 2³² values, lies below with probability `rate`."""
        return torch.tensor([round(rate * 2**32) - 2**31 for rate in rates], dtype=torch.int32, device=device)

    def apply(self, x_KSI: Tensor, columns_I: Tensor) -> Tensor:
        """`x` with dropped elements zero and the others scaled."""
        if x_KSI.is_meta and runs_triton(x_KSI):
            return torch.empty_like(x_KSI)
        if kernels := triton_for(x_KSI):
            return kernels.dropout(x_KSI, self.key_KS, columns_I, self.threshold_K, self.scale_K)
        hash_KSI = self.key_KS[:, :, None] ^ columns_I
        hash_KSI.mul_(_MIX_1)
        hash_KSI.bitwise_xor_(hash_KSI >> 13)
        hash_KSI.mul_(_MIX_2)
        keep_KSI = hash_KSI >= self.threshold_K[:, None, None]
        return x_KSI * keep_KSI * self.scale_K[:, None, None]


def hashed_columns(name: str, size: int, device: torch.device) -> Tensor:
    """int32 (I,): a hash of the layer's name and the channel, the part of a dropout key that never changes."""
    column = torch.arange(size, dtype=torch.int64) * 0x9E3779B1 + zlib.crc32(name.encode())
    column = (column ^ (column >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    column = (column ^ (column >> 15)) * 0x846CA68B & 0xFFFFFFFF
    column = column ^ (column >> 16)
    return (column - 2**31).to(torch.int32).to(device)


@dataclass(frozen=True)
class Adapters:
    """A layer's adapters of all lanes, as views into the wave's flat tensors (attach.py)."""

    a_KRI: nn.Parameter  # fp32 masters
    b_KOR: nn.Parameter
    copies: tuple[Tensor, Tensor]  # the same in the compute type
    grads: tuple[Tensor, Tensor]  # fp32


class LaneProduct(torch.autograd.Function):
    """y + s · B A drop(x) for every lane.

    The gradients of A and B are added straight to their fp32 views: no copy in fp32, and accumulation over passes
    needs no further kernel. A is an input only so that autograd knows that the output has a gradient.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        y_KSO: Tensor,
        x_KSI: Tensor,
        _a_KRI: Tensor,
        adapters: Adapters,
        scale_K: Tensor,
        dropout: tuple[Dropout, Tensor] | None,
    ) -> Tensor:
        a, b = adapters.copies
        x = x_KSI if dropout is None else dropout[0].apply(x_KSI, dropout[1])
        low_KSR = torch.bmm(x, a.transpose(1, 2)).mul_(scale_K[:, None, None])
        ctx.save_for_backward(x_KSI, low_KSR, a, b, scale_K)
        ctx.dropout, ctx.grads = dropout, adapters.grads
        return torch.baddbmm(y_KSO, low_KSR, b.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, g_KSO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_KSI, low_KSR, a_KRI, b_KOR, scale_K = ctx.saved_tensors
        ctx.grads[1].add_(torch.bmm(g_KSO.transpose(1, 2), low_KSR))
        grad_low_KSR = torch.bmm(g_KSO, b_KOR).mul_(scale_K[:, None, None])
        x = x_KSI if ctx.dropout is None else ctx.dropout[0].apply(x_KSI, ctx.dropout[1])
        ctx.grads[0].add_(torch.bmm(grad_low_KSR.transpose(1, 2), x))
        grad_x_KSI = None
        if ctx.needs_input_grad[1]:
            grad_x_KSI = torch.bmm(grad_low_KSR, a_KRI)
            if ctx.dropout is not None:
                grad_x_KSI = ctx.dropout[0].apply(grad_x_KSI, ctx.dropout[1])
        return g_KSO, grad_x_KSI, None, None, None, None


class Pass:
    """What all adapted layers share while a pass runs. One object a wave; `Slots` (attach.py) writes it."""

    def __init__(self, scale_K: Tensor) -> None:
        self.scale_K = scale_K  # compute type
        self.dropout: Dropout | None = None
        self.lanes = Lanes(len(scale_K))
        self.bypass = False  # True: the bare base answers

    def dropout_of_training(self) -> Dropout | None:
        """None without autograd: nothing is dropped from what is scored."""
        return self.dropout if torch.is_grad_enabled() else None


class LaneLinear(nn.Module):
    """A frozen linear layer and its K adapters."""

    def __init__(self, base: nn.Module, name: str, now: Pass, adapters: Adapters) -> None:
        super().__init__()
        self.base = base
        self.name, self.now, self.adapters = name, now, adapters
        self.num_lanes, _, self.in_features = adapters.a_KRI.shape
        self.out_features = adapters.b_KOR.shape[1]
        # base and adapters as one node (bundle.py)
        self.alone: Callable[[Tensor, Dropout | None], Tensor] | None = None
        self._columns_I: Tensor | None = None

    def columns(self) -> Tensor:
        """The part of dropout's hash that is this layer's."""
        if self._columns_I is None:
            self._columns_I = hashed_columns(self.name, self.in_features, self.adapters.a_KRI.device)
        return self._columns_I

    def forward(self, x: Tensor) -> Tensor:
        if self.now.bypass:
            return self.base(x)
        # All lanes' tokens in equal blocks is what makes one batched product right. A layer that is called with some
        # of the tokens only (experts of a mixture) would mix lanes: attach.py refuses those by name, this by count.
        assert x.shape[0] % self.num_lanes == 0, f"{self.name} was given rows that don't divide among the lanes"
        dtype, dropout = self.adapters.copies[0].dtype, self.now.dropout_of_training()
        if self.alone is not None and x.dtype == dtype:
            return self.alone(x.reshape(-1, self.in_features), dropout).view(*x.shape[:-1], self.out_features)
        y = self.base(x)
        x_KSI = x.reshape(self.num_lanes, -1, self.in_features).to(dtype)
        y_KSO = y.reshape(self.num_lanes, -1, self.out_features).to(dtype)
        masked = None if dropout is None else (dropout, self.columns())
        out = LaneProduct.apply(y_KSO, x_KSI, self.adapters.a_KRI, self.adapters, self.now.scale_K, masked)
        return out.reshape(y.shape).to(y.dtype)


def joined(views_KRI: Sequence[Tensor]) -> Tensor | None:
    """Views of one tensor that lie next to each other, as one view along R; None where they don't."""
    for one, other in pairwise(views_KRI):
        if other.storage_offset() != one.storage_offset() + one.shape[1] * one.shape[2]:
            return None
    if not views_KRI:
        return None
    first, ranks = views_KRI[0], sum(view.shape[1] for view in views_KRI)
    return first.as_strided((first.shape[0], ranks, first.shape[2]), first.stride(), first.storage_offset())
