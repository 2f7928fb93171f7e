"""Which tokens of a pass belong to which lane, and the products whose matrix differs from lane to lane.

A pass is laid out in one of two ways. *Even*: every lane has the same number of tokens, rows padded to the longest, and
a product is batched over equal blocks. *Flat*: all rows one after another without padding, lane by lane; the tokens of
lane k end at `ends_K[k]`, and a product is a grouped one (torch._grouped_mm, made for mixtures of experts), which reads
the ends on the device. Where there is none, each lane's product is made by itself. Nothing in either crosses lanes.

Shapes: K lanes, N tokens of a pass, S tokens of a lane where even, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

# A grouped product reads rows and matrices in pieces of 16 bytes (aten/native/cuda/GroupedBlas.cpp).
ALIGNED = 8  # numbers of 16 bits


@dataclass(frozen=True)
class Lanes:
    """K lanes' tokens: in equal blocks, or where `ends_K` (int32) says; `lane_N` is then each token's lane.

    `ends` are the same numbers on the host, for products of one lane at a time: asking the device would wait for it.
    """

    num: int
    ends_K: Tensor | None = None
    lane_N: Tensor | None = None
    ends: Sequence[int] = ()

    @classmethod
    def flat(cls, ends_K: Tensor, ends: Sequence[int], num_tokens: int) -> Lanes:
        """Lanes of `num_tokens` tokens; those behind the last lane's end are padding, and count as the last lane's."""
        place_N = torch.arange(num_tokens, device=ends_K.device, dtype=ends_K.dtype)
        lane_N = torch.searchsorted(ends_K, place_N, right=True).clamp_(max=len(ends) - 1)
        return cls(len(ends), ends_K, lane_N, ends)

    def scale_(self, x_NR: Tensor, scale_K: Tensor) -> Tensor:
        """Multiply each lane's tokens by its number, in place."""
        if self.lane_N is None:
            x_NR.view(self.num, -1, x_NR.shape[1]).mul_(scale_K[:, None, None])
            return x_NR
        return x_NR.mul_(scale_K[self.lane_N][:, None])

    def times(self, x_NI: Tensor, m_KIO: Tensor) -> Tensor:
        """x m_k for the tokens of each lane k."""
        if self.ends_K is not None and groups_products(x_NI.device, x_NI.dtype):
            return torch._grouped_mm(x_NI, m_KIO, offs=self.ends_K)
        y_NO = x_NI.new_empty(len(x_NI), m_KIO.shape[2])
        self.times_into(y_NO, x_NI, m_KIO)
        return y_NO

    def times_into(self, y_NO: Tensor, x_NI: Tensor, m_KIO: Tensor) -> None:
        """The same, written to `y_NO`, which may be some columns of a tensor."""
        if self.ends_K is None:
            torch.bmm(self._blocks(x_NI), m_KIO, out=self._blocks(y_NO))
        elif groups_products(x_NI.device, x_NI.dtype):
            y_NO.copy_(torch._grouped_mm(x_NI, m_KIO, offs=self.ends_K))
        else:
            for k, part in enumerate(self._parts()):
                torch.mm(x_NI[part], m_KIO[k], out=y_NO[part])

    def outer(self, g_NO: Tensor, x_NI: Tensor) -> Tensor:
        """gᵀ x over each lane's tokens, (K, O, I)."""
        if g_NO.device.type == "cpu" and g_NO.shape[1] > x_NI.shape[1]:
            # torch copies the transposed one of the two: 1.9 ms for 1,536 columns, 0.2 ms for 8 (900 tokens)
            return self.outer(x_NI, g_NO).transpose(1, 2)
        if self.ends_K is None:
            return torch.bmm(self._blocks(g_NO).transpose(1, 2), self._blocks(x_NI))
        if groups_products(x_NI.device, x_NI.dtype):
            return torch._grouped_mm(g_NO.t(), x_NI, offs=self.ends_K)
        out_KOI = x_NI.new_empty(self.num, g_NO.shape[1], x_NI.shape[1])
        for k, part in enumerate(self._parts()):
            torch.mm(g_NO[part].t(), x_NI[part], out=out_KOI[k])
        return out_KOI

    def _blocks(self, x_NI: Tensor) -> Tensor:
        return x_NI.unflatten(0, (self.num, -1))

    def _parts(self) -> Iterator[slice]:
        return (slice(start, stop) for start, stop in pairwise((0, *self.ends)))


@cache
def groups_products(device: torch.device, dtype: torch.dtype) -> bool:
    """There is a kernel for the products of all lanes: bf16 from compute capability 9.0 (GroupedBlas.cpp)."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (9, 0)
