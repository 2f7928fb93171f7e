"""Bytes by part, in closed form: no torch, no weights, under a millisecond.

A training step holds its most at one of a few moments, each of which is a sum of parts; the peak is the largest.
Legend: K lanes, M rows a lane and pass, T tokens of the longest row, N = K·M·T tokens of a pass; h hidden, V
vocabulary, L layers, n of them checkpointed; c bytes of a number in the compute type; P numbers in a lane's adapter.

What stays from step to step
  base        c · numbers, or for NF4 half a byte each + a byte per 64 (+ 4 bytes per 16,384) of statistics; where
              memory is plenty, copies of those weights, c · numbers
  adapters    4·K·P in fp32, and c·K·P as cast for the pass where c < 4
  gradient    4·K·P;   AdamW's two moments 8·K·P

What a pass leaves for its backward pass: (L − n) · N times what a block keeps of a token (memory/block.py), and for
each checkpointed block its input, c·h·N; it makes the rest again when the backward pass gets there.

The moments
  head        all of that + the final norm + the targets' states and their gradient + one chunk of logits
  final norm  all of that + the norm's backward pass
  block       all of that + the backward pass of the topmost block, if that isn't checkpointed
  recomputed  the n inputs + one block made again + its backward pass
  evaluation  a batch without autograd: one block, or one chunk of logits
The optimizer needs nothing beside its state. On top lie cuBLAS's workspaces (inside the allocator), fragmentation, and
context and libraries (outside it). A CUDA graph keeps what its pass needed at most as long as it lives, beside all that
other passes and evaluations need; it is recorded on a stream of its own, which has workspaces of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crosstune.memory.block import DTYPE_BYTES as DTYPE_BYTES
from crosstune.memory.block import Block, block_of
from crosstune.memory.block import Settings as Settings  # also offered here
from crosstune.memory.gpus import MIB, Machine
from crosstune.memory.shape import Linear, ModelShape

EVALUATE_TOKENS = {"cpu": 4096, "mps": 8192, "cuda": 32768}  # a batch without autograd, at most
COPIES, POOL = "copies of the base", "CUDA graphs"  # parts by name
HEAD_CHUNK_BYTES = {"cpu": 64 * MIB, "mps": 128 * MIB, "cuda": 512 * MIB}  # fp32 logits that exist at one time


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of the device by part, at the moment (`at`) that needs most. The parts add up to `peak_bytes`."""

    parts: Mapping[str, int]
    at: str
    moments: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """What the device shows as used."""
        return sum(self.parts.values())

    @property
    def reserved_bytes(self) -> int:
        """What PyTorch's allocator holds."""
        return self.peak_bytes - self.parts["context and libraries"]

    @property
    def transient_bytes(self) -> int:
        """What comes and goes with a step, at the moment of the peak."""
        return self.moments[self.at]

    @property
    def allocated_bytes(self) -> int:
        """What PyTorch's tensors hold at the peak (torch.cuda.max_memory_allocated); none stays in a graph's pool."""
        return self.reserved_bytes - self.parts["fragmentation"] - self.parts[POOL]


def estimate(shape: ModelShape, settings: Settings, machine: Machine) -> Estimate:
    """The whole process on the device, by part, for training with `settings`."""
    settings = replace(settings, targets=settings.targets or shape.linears)
    block = block_of(shape, settings, machine)
    moments = training_moments(block, machine)
    if settings.evaluate_tokens:
        moments["evaluation"] = {"evaluation": evaluation_bytes(block, settings.evaluate_tokens, machine.kind)}
    at = max(moments, key=lambda name: sum(moments[name].values()))
    transient = sum(moments[at].values())
    parts = {
        **base_parts(shape, settings),
        **lane_parts(shape, settings),
        **moments[at],
        "batch": batch_bytes(settings),
        POOL: pool_bytes(shape, settings, machine),
        "cuBLAS workspaces": machine.cublas_bytes * (2 if settings.recorded else 1),
        "fragmentation": fragmentation_bytes(transient, machine),
        "context and libraries": outside_bytes(settings, machine),
    }
    return Estimate(parts, at, {name: sum(part.values()) for name, part in moments.items()})


def training_moments(block: Block, machine: Machine) -> dict[str, dict[str, int]]:
    """What comes and goes with a pass, by part, at each moment that may be the peak."""
    shape, settings, n = block.shape, block.settings, block.settings.checkpointed
    everything = _stash(block, whole=shape.layers - n, inputs=n)
    moments = {
        "head": {**everything, **_head(block, machine)},
        "final norm": {**everything, "backward: final norm": block.final_norm()},
    }
    if n < shape.layers:
        moments["block"] = {**everything, **_backward(block, again=False)}
    if n:
        made = {"activations: layer made again": settings.pass_tokens * (block.saved - block.input_saved)}
        moments["recomputed block"] = {**_stash(block, whole=0, inputs=n), **made, **_backward(block, again=True)}
    return moments


def pool_bytes(shape: ModelShape, settings: Settings, machine: Machine) -> int:
    """What the recorded passes' common pool holds: the largest one's peak."""
    if not settings.recorded:
        return 0
    like = replace(settings, tokens=settings.recorded_row, recorded=0)
    moments = training_moments(block_of(shape, like, machine), machine)
    return max(sum(parts.values()) for parts in moments.values())


def base_parts(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """The frozen weights by kind."""
    c = settings.number_bytes
    blocks, statistics = shape.block_parameters * c, 0
    if settings.quantization != "none":
        per_linear = [quantized_bytes(linear, settings) for linear in shape.linears]
        blocks = shape.layers * sum(weights for weights, _ in per_linear)
        statistics = shape.layers * sum(stats for _, stats in per_linear)
    norms = (shape.layers * shape.norms + 1) * _round(c * shape.hidden)
    norms += shape.layers * (2 * _round(c * shape.head_dim) if shape.head_norms else 0)
    biases = shape.layers * sum(_round(c * linear.outputs) for linear in shape.linears if linear.bias)
    copies = shape.block_parameters * c if settings.copies else 0
    return {
        "base: linear layers": blocks,
        "base: quantisation statistics": statistics,
        COPIES: copies,
        "base: embeddings": shape.embedding_parameters * c,
        "base: head": shape.head_parameters * c,
        "base: norms and biases": norms + biases,
    }


def quantized_bytes(linear: Linear, settings: Settings) -> tuple[int, int]:
    """(weights, statistics) of one linear layer as bitsandbytes holds it."""
    if settings.quantization == "int8":
        return _round(linear.numel), _round(4 * linear.outputs)  # a scale in fp32 for each output
    blocks = -(-linear.numel // 64)
    if not settings.double_quant:
        return _round(linear.numel // 2), _round(4 * blocks) + 512  # + the 16 code values
    # absmax as uint8 with its own fp32 absmax per 256, an offset; both code tables (16 and 256 values) are shared
    return _round(linear.numel // 2), _round(blocks) + _round(4 * -(-blocks // 256)) + 512


def lane_parts(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """The adapters and all that training keeps for them."""
    numbers = settings.lanes * _lane_numbers(shape, settings)
    cast = settings.number_bytes if settings.number_bytes < 4 else 0
    return {
        "lanes: adapters (fp32)": 4 * numbers,
        "lanes: adapters in the compute type": cast * numbers,
        "lanes: gradients": 4 * numbers,
        "lanes: optimizer state": 8 * numbers,
    }


def head_chunk(vocab: int, kind: str) -> int:
    """Target positions whose logits exist at one time."""
    return max(8, HEAD_CHUNK_BYTES[kind] // (4 * vocab))


def evaluation_bytes(block: Block, tokens: int, kind: str) -> int:
    """A batch of about `tokens` tokens without autograd: a block, or the head's chunk."""
    row = block.settings.lanes * block.settings.tokens
    tokens = row * max(1, tokens // row)  # whole rows, as many of each lane (train/evaluate.py)
    states = 2 * tokens * block.settings.number_bytes * block.shape.hidden
    chunk = min(tokens, head_chunk(block.shape.vocab, kind))
    return max(block.evaluation(tokens), states + logits_bytes(block, chunk, kind))


def _stash(block: Block, *, whole: int, inputs: int) -> dict[str, int]:
    """What `whole` blocks and the inputs of `inputs` checkpointed ones keep for the backward pass."""
    settings, shape = block.settings, block.shape
    N, c = settings.pass_tokens, settings.number_bytes
    saved = whole * block.saved - (block.not_saved_first if whole and not settings.checkpointed else 0)
    return {
        "activations: saved": N * saved,
        "activations: inputs of checkpointed layers": N * inputs * c * shape.hidden,
        "activations: rotary": 2 * c * shape.head_dim * settings.tokens,
    }


def _head(block: Block, machine: Machine) -> dict[str, int]:
    N, c, shape = block.settings.pass_tokens, block.settings.number_bytes, block.shape
    chunk = min(N, head_chunk(shape.vocab, machine.kind))
    return {
        "activations: final norm": N * block.after(),
        "head: hidden states of the targets and their gradient": 2 * N * c * shape.hidden,
        "head: logits of a chunk": logits_bytes(block, chunk, machine.kind),
    }


def logits_bytes(block: Block, chunk: int, kind: str) -> int:
    """A chunk's logits. On CUDA one kernel turns them into their gradient where they lie (model/triton_head.py).

    Elsewhere they are made in fp32, and as large a tensor again lies inside logsumexp; a soft cap keeps a third.
    """
    if kind == "cuda" and not block.shape.capped:
        return block.settings.number_bytes * chunk * (block.shape.vocab + block.shape.hidden)
    return (12 if block.shape.capped else 8) * chunk * block.shape.vocab


def _backward(block: Block, *, again: bool) -> dict[str, int]:
    needed, weight = block.backward(again=again)
    return {"backward: temporaries of a layer": needed - weight, "dequantised weight": weight}


def batch_bytes(settings: Settings) -> int:
    """Ids, places of targets, targets, weights, losses and hits of a pass; with dropout a key a token."""
    return (8 + 8 + 8 + 4 + 4 + 1 + 4 * settings.dropout) * settings.pass_tokens


def outside_bytes(settings: Settings, machine: Machine) -> int:
    """What lies outside PyTorch's allocator. On an H200, int8's kernels took 66 MiB more, recorded passes 78 MiB."""
    more = 66 * MIB * (settings.quantization == "int8") + 78 * MIB * (settings.recorded > 0)
    return machine.context_bytes + (more if machine.kind == "cuda" else 0)


def fragmentation_bytes(transient: int, machine: Machine) -> int:
    """Bytes reserved beyond those allocated.

    Expandable segments: an H200 showed 6 to 1,084 MiB in 72 settings, 38 in the median (docs/memory.md). Fixed ones: in
    rehearsals up to 77% of all, 9% in the median. On a CPU, glibc's heap held 20% and 31% more than the
    tensors of a step with 2,400 and 5,120 tokens (135M, fp32).
    """
    if machine.kind != "cuda":
        return transient // 3
    return transient // 80 + 80 * MIB if machine.expandable else transient // 4 + 256 * MIB


def _lane_numbers(shape: ModelShape, settings: Settings) -> int:
    return shape.lane_parameters(settings.targets, settings.rank)


def _round(count: int) -> int:
    """PyTorch's CUDA allocator hands out multiples of 512 bytes."""
    return -(-count // 512) * 512
