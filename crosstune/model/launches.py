"""One launch of each Triton kernel over one token, with the signature that the passes of a model give it.

A signature is types, whether pointers and widths are divisible by 16, and the constants that a wrapper chooses; nothing
in it depends on how many tokens there are. Where the passes launch a kernel in another way, change it here as well:
tests/test_warm.py compares the two.

Beside them attention by PyTorch's libraries, whose kernels are loaded at their first use: on an H200's host cuDNN's
took 0.9 s, flash's backward pass 2.4 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from crosstune.memory.shape import ModelShape
from crosstune.model.attention import as_taken, attention_as_taken
from crosstune.model.repeatable import fused_attention, fused_gradients, fused_kernel

Launch = Callable[[], None]


@dataclass(frozen=True)
class Launches:
    """The launches of a model in fused blocks. `nested`: of an NF4 base, whether it is doubly quantised."""

    device: torch.device
    shape: ModelShape
    dtype: torch.dtype
    norm_dtype: torch.dtype
    nested: bool | None
    dropout: bool  # of any lane

    def of_libraries(self) -> list[Launch]:
        """Those that nobody compiles."""
        return [self.attend, self.attend_back]

    def attend(self) -> None:
        """Attention without autograd."""
        query, key, value = self._heads(128)
        attention_as_taken(nn.Module(), query, key, value, None, is_causal=True)

    def attend_back(self) -> None:
        """Its backward pass, over whole blocks of tokens and over part of one.

        Not by autograd, which would have all that other threads compute meanwhile add in one order too.
        """
        for tokens in (128, 72):
            query, key, value = self._heads(tokens)
            key, value = as_taken(query, key, value, None)
            if (kernel := fused_kernel(query, key, value, None, True, None)) is not None:
                how = (True, None, kernel)
                out, kept = fused_attention(query, key, value, None, how)
                fused_gradients(out, (query, key, value, out), kept, how)

    def of_scoring(self) -> list[Launch]:
        """Those of a pass without autograd."""
        forward = [self.norm, self.turn, self.swiglu, self.judge]
        return forward if self.nested is None else [*forward, self.make_weight]

    def of_training(self) -> list[Launch]:
        """Those that a pass with autograd has beside them."""
        backward = [self.norm_back, self.turn_back, self.swiglu_back, self.judge_and_grade]
        return [*backward, self.drop] if self.dropout else backward

    def norm(self) -> None:
        """RMSNorm."""
        x_NH, inverse_N = self._zeros(1, self.shape.hidden), self._zeros(1, dtype=torch.float32)
        _kernels().rms_norm(x_NH, self._norm_weight(), 1e-5, torch.empty_like(x_NH), inverse_N)

    def norm_back(self) -> None:
        """Its gradient: of the last norm, then of those that a residual runs past."""
        x_NH, inverse_N = self._zeros(1, self.shape.hidden), self._zeros(1, dtype=torch.float32)
        for past_NH in (None, x_NH):
            out_NH = torch.empty_like(x_NH)
            _kernels().rms_norm_backward(x_NH, x_NH, self._norm_weight(), inverse_N, past_NH, out_NH)

    def turn(self) -> None:
        """Rotary position."""
        y_NO, turn_ND = self._queries_keys_values(), self._zeros(1, self.shape.head_dim)
        _kernels().rotate_(y_NO, turn_ND, turn_ND, self.shape.queries + self.shape.keys)

    def turn_back(self) -> None:
        """Its gradient, of queries, keys and values."""
        size, counts = self.shape.head_dim, (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
        grads, turn_ND = tuple(self._zeros(1, heads, 1, size) for heads in counts), self._zeros(1, size)
        _kernels().rotate_back(grads, turn_ND, turn_ND, self._queries_keys_values())

    def swiglu(self) -> None:
        """SwiGLU."""
        width = self.shape.intermediate
        _kernels().swiglu(self._zeros(1, 2 * width), self._zeros(1, width))

    def swiglu_back(self) -> None:
        """Its gradient."""
        width = self.shape.intermediate
        _kernels().swiglu_backward_(self._zeros(1, width), self._zeros(1, 2 * width))

    def drop(self) -> None:
        """Dropout of each tensor that adapters read."""
        for width in sorted({linear.inputs for linear in self.shape.linears}):
            key_KS, columns_I, threshold_K = (
                self._zeros(*size, dtype=torch.int32) for size in ((1, 1), (width,), (1,))
            )
            _kernels().dropout(self._zeros(1, 1, width), key_KS, columns_I, threshold_K, self._zeros(1))

    def judge(self) -> None:
        """Losses and hits."""
        self._judge(None)

    def judge_and_grade(self) -> None:
        """The same, and the logits' gradient."""
        self._judge(self._zeros(1, dtype=torch.float32))

    def _judge(self, weight_C: Tensor | None) -> None:
        from crosstune.model import triton_head

        target_C, nll_C, hit_C = (self._zeros(1, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.bool))
        triton_head.judge(self._zeros(1, self.shape.vocab), target_C, weight_C, 1.0, nll_C, hit_C)

    def make_weight(self) -> None:
        """16 bit from NF4: 64 blocks of 64 numbers, bitsandbytes' default."""
        from crosstune.model import triton_nf4

        code, code_2, absmax_2, offset = (self._zeros(*size, dtype=torch.float32) for size in ((16,), (256,), (1,), ()))
        absmax = self._zeros(64, dtype=torch.uint8 if self.nested else torch.float32)
        state: Any = SimpleNamespace(
            shape=torch.Size((64, 64)), blocksize=64, nested=self.nested, absmax=absmax, code=code, offset=offset,
            state2=SimpleNamespace(absmax=absmax_2, code=code_2, blocksize=256),
        )  # fmt: skip
        triton_nf4.make(self._zeros(64, 32, dtype=torch.uint8), state, self._zeros(64, 64))

    def _heads(self, tokens: int) -> list[Tensor]:
        """Queries, keys and values."""
        counts = (self.shape.heads, self.shape.kv_heads, self.shape.kv_heads)
        return [self._zeros(1, count, tokens, self.shape.head_dim) for count in counts]

    def _norm_weight(self) -> Tensor:
        return self._zeros(self.shape.hidden, dtype=self.norm_dtype)

    def _queries_keys_values(self) -> Tensor:
        return self._zeros(1, self.shape.queries + 2 * self.shape.keys)

    def _zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(size, dtype=dtype or self.dtype, device=self.device)


def _kernels() -> ModuleType:
    from crosstune.model import triton_kernels

    return triton_kernels
