# mypy: disable-error-code="no-untyped-def"
"""NF4 → 16 bit in one Triton kernel, statistics included. Imported only where Triton is.

bitsandbytes takes three kernels (statistics, their offset, the weight) and reached half of an H200's memory bandwidth.
Same values to the bit: the statistics' product is rounded before the offset is added, so fused multiply-add is off.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = 64  # statistics blocks a program: 64 x 32 bytes read, 64 x 64 numbers written


@triton.jit(do_not_specialize=["blocks"])
def _nf4(
    packed, absmax, code, absmax_2, code_2, offset, out, blocks,
    NESTED: tl.constexpr, BLOCKS: tl.constexpr, BYTES: tl.constexpr, BLOCKS_2: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    scale = tl.load(absmax + block, mask=inside, other=0)
    if NESTED:
        scale = tl.load(code_2 + scale.to(tl.int32)) * tl.load(absmax_2 + block // BLOCKS_2, mask=inside, other=0.0)
        scale = scale + tl.load(offset)
    at = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(packed + at, mask=inside[:, None], other=0).to(tl.int32)
    first = (tl.load(code + (byte >> 4)) * scale[:, None]).to(out.dtype.element_ty)
    second = (tl.load(code + (byte & 15)) * scale[:, None]).to(out.dtype.element_ty)
    to = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(out + to, tl.interleave(first, second), mask=inside[:, None])


def fits(state: Any) -> bool:
    """This kernel reads such a weight: whole blocks, statistics as they are or quantised once."""
    nested_well = not state.nested or (state.state2.blocksize & (state.state2.blocksize - 1) == 0)
    return state.quant_type == "nf4" and state.shape.numel() % state.blocksize == 0 and nested_well


def make(packed: Tensor, state: Any, out: Tensor) -> Tensor:
    """Fill `out` (contiguous, the weight's shape) from bitsandbytes' packed bytes and QuantState."""
    blocks = state.shape.numel() // state.blocksize
    second = (state.state2.absmax, state.state2.code, state.offset) if state.nested else (state.absmax,) * 3
    _nf4[(triton.cdiv(blocks, _BLOCKS),)](
        packed, state.absmax, state.code, *second, out, blocks, NESTED=state.nested, BLOCKS=_BLOCKS,
        BYTES=state.blocksize // 2, BLOCKS_2=state.state2.blocksize if state.nested else 1, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
