"""What Triton tells variants of a kernel apart by, launched ahead and in passes: `python -m tests.launch_keys FOLDER`.

Nothing is computed: what the passes of the model in FOLDER read is whatever lay there.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from crosstune.data.batches import Batch, collate
from crosstune.data.flat import collate_flat, flat_size
from crosstune.memory.shape import ModelShape
from crosstune.model import elementwise
from crosstune.model.attach import attached
from crosstune.model.base import Base, load_base
from crosstune.model.frozen import FourBit
from crosstune.model.launches import Launches
from crosstune.recipe.sections import Model
from crosstune.train.evaluate import score_base, score_lanes
from crosstune.train.step import DeviceBatch, run_pass
from tests.lanes import fold_job, random_tokens

TOKENS = random_tokens()
CHUNK_BYTES = 40_000  # a chunk of targets that begins where no 16 bytes do


def launched() -> dict[str, Any]:
    """The kernels that are launched, by name; `_halves` is a part of others."""
    from triton.runtime.jit import JITFunction

    from crosstune.model import triton_head, triton_kernels, triton_nf4

    modules = (triton_head, triton_kernels, triton_nf4)
    every = {name: it for module in modules for name, it in vars(module).items() if isinstance(it, JITFunction)}
    del every["_halves"]
    return every


def variants(device: int = 0) -> dict[str, int]:
    """How many variants of each kernel this process has for a device."""
    return {name: len(kernel.device_caches[device][0]) for name, kernel in launched().items()}


def run_passes(base: Base) -> None:
    """Training and evaluation in fused blocks: padded and flat, of several lengths, and of one token."""
    specs = [fold_job(base, fold, k=2).spec for fold in range(2)]
    held_out = list(range(8))
    score_base(base, TOKENS, held_out)
    with attached(base, specs) as slots:
        for units_K in ([[(0,), (1,)], [(2,), (3,)]], [[(4,)], [(5,)]], [[(6,), (7,), (8,)], [(9,), (1,), (2,)]]):
            for batch in _batches(units_K, slots.takes_flat):
                run_pass(slots, DeviceBatch.of(batch, base.device))
        score_lanes(slots, TOKENS, [held_out[:3], held_out[3:]])


def _batches(units_K: Sequence[Sequence[tuple[int, ...]]], takes_flat: bool) -> list[Batch]:
    given: dict[str, Any] = {"weights_K": [0.05] * 2, "dropout_K": [(1, 0), (2, 0)]}
    even = [collate(TOKENS, units_K, multiple=multiple, **given) for multiple in (1, 8)]
    return [*even, collate_flat(TOKENS, units_K, size=flat_size(TOKENS, units_K, 30), **given)] if takes_flat else even


def make_weights(shape: ModelShape) -> None:
    """Every layer's weight from NF4 as bitsandbytes lays it out, quantised once and twice."""
    from bitsandbytes.functional import quantize_4bit

    for linear in shape.linears:
        for nested in (False, True):
            weight = torch.randn(linear.outputs, linear.inputs)
            packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
            layer: Any = SimpleNamespace(weight=SimpleNamespace(data=packed, quant_state=state), bias=None)
            layer.in_features, layer.out_features = linear.inputs, linear.outputs
            FourBit(layer, torch.bfloat16).weight()


def main(folder: str) -> None:
    """Print both sets of keys; then compile a kernel for two widths, and print its count of variants after each."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from crosstune.model import head
    from tests.compile_kernels import Driver, every_launch

    driver.set_active(Driver(90))
    keys: defaultdict[str, set[str]] = defaultdict(set)

    def note(kernel: Any, grid: Any) -> Any:
        def note_it(*given: Tensor, **options: Any) -> None:
            *_, binder = kernel.device_caches[0]
            keys[kernel.fn.__name__].add(str(binder(*given, **options)[1:]))

        return note_it

    def noted() -> dict[str, list[str]]:
        found = {name: sorted(those) for name, those in keys.items()}
        keys.clear()
        return found

    launch, JITFunction.__getitem__ = JITFunction.__getitem__, note
    elementwise.TRITON_ON, head.CHUNK_BYTES = {"cpu"}, {"cpu": CHUNK_BYTES}
    base = load_base(Model(name=folder), None, device=torch.device("cpu"), precision="bf16")
    shape = ModelShape.from_config(base.model.config.to_dict())
    run_passes(base)
    make_weights(shape)
    passes = noted()
    for one in every_launch(shape, torch.bfloat16):
        one()
    JITFunction.__getitem__ = lambda kernel, grid: lambda *given, **options: kernel.warmup(*given, grid=grid, **options)
    counts = [variants()["_rms_norm_backward"]]
    for norms in (torch.bfloat16, torch.bfloat16, torch.float32):
        Launches(base.device, shape, base.dtype, norms, None, False).norm_back()
        counts.append(variants()["_rms_norm_backward"])
    JITFunction.__getitem__ = launch
    print(json.dumps({"passes": passes, "ahead": noted(), "counts": counts}))


if __name__ == "__main__":
    main(sys.argv[1])
