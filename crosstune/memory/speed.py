"""How long a step takes, roughly: enough to rank plans, and said as "about".

Calibrated on one H200 (Llama-3-8B shape, NF4 and bf16, 1 to 8 lanes, 32 to 2,048 tokens): the largest of arithmetic at
65% of the card's rate and of kernel launches, plus what a quantised base costs to dequantise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from crosstune.memory.estimate import Settings
from crosstune.memory.gpus import Machine
from crosstune.memory.precision import native_cpu_bf16
from crosstune.memory.shape import ModelShape

# A fused block's forward and backward, launched kernel by kernel: 32 took 148–190 ms; those of transformers 213–225 ms,
# 295–310 ms with recomputation.
LAUNCH_SECONDS = 5.2e-3
RELAUNCH_SECONDS = 2.6e-3
# Where products of flat passes are made for one lane at a time (model/lanes.py): 33 a block and lane, 8 µs each.
LANE_LAUNCH_SECONDS = 0.26e-3
# The demo (SmolLM2-135M, 5 lanes) on 2 cores of an EPYC with AVX-512 BF16: 75 GFLOP/s a core in fp32, 180 in bf16.
CPU_BF16_GAIN = 2.4
# Products over few tokens don't fill a GPU: lanes of the 8B model reached 52, 66 and 69% of an H200's rate with 512,
# 2,560 and 10,240 tokens a pass in fused blocks, a fifth less in transformers' own. Nothing is gained beyond 16,000.
HALF_RATE_TOKENS, FULL_RATE_TOKENS = 300, 16384
ARITHMETIC_SHARE = {"cuda": 0.65, "mps": 0.4, "cpu": 0.6}


def pass_seconds(shape: ModelShape, settings: Settings, machine: Machine, tokens: float) -> float:
    """Forward and backward of one pass over `tokens` tokens, padding included."""
    again = settings.checkpointed / shape.layers
    weights = shape.block_parameters
    lane_weights = shape.lane_parameters(settings.targets or shape.linears, settings.rank)
    head = shape.vocab * shape.hidden
    # A product is 2 FLOP a weight and token; a frozen weight has a forward and an input gradient, an adapter a weight
    # gradient too. Attention: 2 products of length T forward, 5 backward, half of each under the causal mask.
    attention = shape.layers * 7 * settings.tokens * shape.queries
    flops = tokens * (2 * weights * (2 + again) + 6 * lane_weights + 4 * head + attention)
    rate = machine.flops * ARITHMETIC_SHARE[machine.kind]
    if machine.kind == "cpu" and settings.precision == "bf16" and native_cpu_bf16():
        rate *= CPU_BF16_GAIN
    if machine.kind == "cuda":
        wide = min(tokens, FULL_RATE_TOKENS)
        rate *= wide / (wide + HALF_RATE_TOKENS)
    arithmetic = flops / rate
    if machine.kind != "cuda":
        return arithmetic
    launches = shape.layers * (LAUNCH_SECONDS + again * RELAUNCH_SECONDS) if tokens > settings.recorded else 0.0
    # A quantised weight is read, then written and read again in 16 bit, for each product: about 5 bytes.
    made = settings.quantization != "none" and not settings.copies
    dequantise = (2 + again) * weights * 5 / machine.bandwidth if made else 0.0
    read = (2 + again) * weights * settings.number_bytes / machine.bandwidth
    return max(launches, arithmetic + dequantise, read)


def launch_tokens(layers: int, parameters: int, machine: Machine, *, lanes_apart: int = 0) -> float:
    """Tokens of a pass whose arithmetic takes as long as launching its kernels. `parameters`: of all products.

    `lanes_apart`: lanes whose products are made one by one.
    """
    seconds = layers * (LAUNCH_SECONDS + lanes_apart * LANE_LAUNCH_SECONDS)
    return seconds * machine.flops * ARITHMETIC_SHARE[machine.kind] / (4 * parameters)


def step_tokens(lengths: NDArray[np.integer], *, lanes: int, batch_size: int, micro_batch: int) -> tuple[float, int]:
    """(tokens of an optimizer step, padding included; its passes), as the mean of 32 random steps.

    Inside a step each lane's rows go longest first (data/batches.py), so that rows of like length share a pass.
    """
    draws = np.random.default_rng(0).choice(lengths, size=(32, lanes, batch_size))
    ordered = -np.sort(-draws, axis=-1)
    longest = ordered[:, :, ::micro_batch].max(axis=1)  # of each pass: all lanes are padded to it
    return float(longest.sum(axis=-1).mean()) * lanes * micro_batch, longest.shape[-1]


def step_seconds(
    shape: ModelShape, settings: Settings, machine: Machine, *, lengths: NDArray[np.integer], batch_size: int
) -> float:
    """One optimizer step of all lanes of a wave."""
    tokens, passes = step_tokens(lengths, lanes=settings.lanes, batch_size=batch_size, micro_batch=settings.micro_batch)
    return passes * pass_seconds(shape, settings, machine, tokens / passes)


def counts_near(total: int) -> Sequence[int]:
    """All distinct ceil(total / n): the widths worth trying when `total` things go in equal parts."""
    return sorted({math.ceil(total / parts) for parts in range(1, total + 1)}, reverse=True)
