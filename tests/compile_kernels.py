"""Compiles every Triton kernel for a kind of GPU that need not be here: `python -m tests.compile_kernels 75 float16`.

Prints, for each, its name and the shared memory of a block in bytes.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from crosstune.model import triton_head, triton_kernels, triton_nf4

SHAPES = {"1b": (2048, 8192, 64), "8b": (4096, 14336, 128)}  # hidden, MLP, head
HEADS, VOCAB, TOKENS = (32, 8, 8), 128256, 16


class Driver:
    """All that a compilation asks of a GPU's driver."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compile_only(kernel: Any, grid: Any) -> Any:
    """In place of a launch."""

    def compile_it(*given: Any, **options: Any) -> None:
        made = kernel.warmup(*given, grid=grid, **options)
        print(kernel.fn.__name__, made.metadata.shared)

    return compile_it


def launch_all(dtype: torch.dtype, hidden: int, wide: int, size: int) -> None:
    """Every kernel as a model of this shape calls it."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    inverse = zeros(TOKENS, dtype=torch.float32)
    x, weight = zeros(TOKENS, hidden), zeros(hidden)
    triton_kernels.rms_norm(x, weight, 1e-5, x.clone(), inverse)
    for add in (None, x):
        triton_kernels.rms_norm_backward(x, x, weight, inverse, add, x.clone())
    turned, turn = zeros(TOKENS, sum(HEADS) * size), zeros(TOKENS, size)
    triton_kernels.rotate_(turned, turn, turn, (HEADS[0] + HEADS[1]) * size)
    grads = [zeros(1, heads, TOKENS, size) for heads in HEADS]
    triton_kernels.rotate_back((grads[0], grads[1], grads[2]), turn, turn, turned)
    both, product = zeros(TOKENS, 2 * wide), zeros(TOKENS, wide)
    triton_kernels.swiglu(both, product)
    triton_kernels.swiglu_backward_(product, both)
    columns, threshold = zeros(hidden, dtype=torch.int32), zeros(2, dtype=torch.int32)
    triton_kernels.dropout(zeros(2, 8, hidden), zeros(2, 8, dtype=torch.int32), columns, threshold, zeros(2))
    for nested in (False, True):
        triton_nf4.make(zeros(64, 32, dtype=torch.uint8), _statistics(nested), zeros(64, 64))
    for weights in (None, zeros(8, dtype=torch.float32)):
        target, hit = zeros(8, dtype=torch.int64), zeros(8, dtype=torch.bool)
        triton_head.judge(zeros(8, VOCAB), target, weights, 1.0, zeros(8, dtype=torch.float32), hit)


def _statistics(nested: bool) -> Any:
    """bitsandbytes' QuantState of 64 blocks."""
    second = SimpleNamespace(absmax=torch.zeros(1), code=torch.zeros(256), blocksize=256)
    absmax = torch.zeros(64, dtype=torch.uint8 if nested else torch.float32)
    return SimpleNamespace(
        shape=torch.Size((64, 64)), blocksize=64, nested=nested, absmax=absmax, code=torch.zeros(16),
        offset=torch.zeros(()), state2=second,
    )  # fmt: skip


if __name__ == "__main__":
    driver.set_active(Driver(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_only
    for shape in SHAPES.values():
        launch_all(getattr(torch, sys.argv[2]), *shape)
