"""Compiles every Triton kernel for a kind of GPU that need not be here: `python -m tests.compile_kernels 75 float16`.

Prints, for each, its name and the shared memory of a block in bytes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from crosstune.memory.shape import ModelShape
from crosstune.model.launches import Launches

SHAPES = {"1b": (2048, 8192, 64), "8b": (4096, 14336, 128)}  # hidden, MLP, head


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


def llama(hidden: int, intermediate: int, size: int) -> ModelShape:
    """Llama 3 of these widths."""
    return ModelShape.from_config(
        {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": size, "vocab_size": 128256,
        }
    )  # fmt: skip


def every_launch(shape: ModelShape, dtype: torch.dtype) -> list[Any]:
    """All that a model of this shape may launch, of bases that are quantised once and twice too."""
    once, twice = (Launches(torch.device("cpu"), shape, dtype, dtype, nested, True) for nested in (False, True))
    return [*once.of_scoring(), *once.of_training(), twice.make_weight]


if __name__ == "__main__":
    driver.set_active(Driver(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_only
    for widths in SHAPES.values():
        for launch in every_launch(llama(*widths), getattr(torch, sys.argv[2])):
            launch()
