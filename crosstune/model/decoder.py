"""The decoder's own loop over fused blocks: embeddings, rotary positions, blocks, norm.

transformers' loop computes the same. It also makes masks and watches for outputs that somebody may want; and while a
CUDA graph is recorded it takes a causal mask for one that it can't leave out (masking_utils, is_tracing), so attention
would fall back to a kernel that reads a T x T mask: 689 against 594 ms a pass of 5 lanes x 2,048 tokens on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crosstune.model.packed import Rows


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder of the Llama family whose blocks are all fused. Every token sees all before it in its row."""

    embed: nn.Module
    rotary: nn.Module
    blocks: Sequence[nn.Module]
    norm: nn.Module
    window: int | None  # tokens that a block sees at most

    @classmethod
    def of(cls, decoder: Any) -> FusedDecoder:
        """`decoder` as it stands, its blocks replaced."""
        window = decoder.config.to_dict().get("sliding_window")
        return cls(decoder.embed_tokens, decoder.rotary_emb, list(decoder.layers), decoder.norm, window)

    def takes(self, ids_NT: Tensor, position_NT: Tensor | None, rows: Rows | None) -> bool:
        """Rows within the window need no mask but the causal one; rows side by side need to be told apart."""
        longest = ids_NT.shape[1] if rows is None else rows.longest
        return (position_NT is None or rows is not None) and (self.window is None or longest <= self.window)

    def __call__(self, ids_NT: Tensor, position_NT: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        """Last hidden states (N, T, H): of rows that begin at position 0, or of `rows` side by side in one."""
        hidden_NTH = self.embed(ids_NT)
        if position_NT is None:
            position_NT = torch.arange(ids_NT.shape[1], device=ids_NT.device)[None]
        turn = self.rotary(hidden_NTH, position_ids=position_NT)
        for block in self.blocks:
            hidden_NTH = block(hidden_NTH, position_embeddings=turn, rows=rows)
        normed: Tensor = self.norm(hidden_NTH)
        return normed
