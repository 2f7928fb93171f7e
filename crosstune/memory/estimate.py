"""Bytes by part, in closed form: no torch, no weights, under a millisecond.

A training step holds its most at one of a few moments, each of which is a sum of parts; the peak is the largest.
Legend: K lanes, M rows a lane and pass, T tokens of the longest row, N = K·M·T tokens of a pass; h hidden, f MLP width,
q and k widths of all query and all key heads, V vocabulary, L layers, n of them checkpointed; c bytes of a number in
the compute type; P numbers in one lane's adapter; R rank, tau targets a block.

What stays from step to step
  base        c · numbers, or for NF4 half a byte each + a byte per 64 (+ 4 bytes per 16,384) of statistics
  adapters    4·K·P in fp32, and c·K·P as cast for the pass where c < 4
  gradient    4·K·P;   AdamW's two moments 8·K·P

What a token of a pass leaves in a block for the backward pass (transformers' Llama block, SDPA, all linears adapted)
  2 RMSNorms      keep their input in fp32 and 1/rms                            2·(4h + 4)
  q, k, v         read one tensor                                               c·h
  attention       q and k after rotary, v, output (which o_proj reads), logsumexp   c·(2q + 2k) + 4·heads
  gate, up        read one tensor                                               c·h
  SwiGLU          gate, silu(gate), up, their product (which down_proj reads)   4·c·f
  adapters        x·A of each target                                            c·R·tau
A checkpointed block leaves its input, c·h, and makes the rest again when the backward pass gets there.

The moments
  head      all blocks' share + the final norm + one chunk of logits + the gradient of the hidden states
  recompute the lowest not yet passed blocks' share + one block made again + its backward temporaries
  optimizer the states + AdamW's temporaries
On top: cuBLAS workspaces (inside the allocator), fragmentation, context and libraries (outside it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crosstune.memory.gpus import MIB, Machine
from crosstune.memory.precision import repeats_heads
from crosstune.memory.shape import Linear, ModelShape

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
EVALUATE_TOKENS = {"cpu": 4096, "mps": 8192, "cuda": 32768}  # a batch without autograd, at most
HEAD_CHUNK_BYTES = {"cpu": 64 * MIB, "mps": 128 * MIB, "cuda": 512 * MIB}  # fp32 logits that exist at one time


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decides a pass's bytes besides the model and the device."""

    lanes: int
    micro_batch: int
    tokens: int  # of the longest row of a pass: every row is padded to it
    checkpointed: int = 0
    quantization: str = "none"
    double_quant: bool = True
    precision: str = "bf16"
    rank: int = 16
    targets: tuple[Linear, ...] = ()
    dropout: bool = False
    evaluate_tokens: int = 0  # of a batch without autograd
    repeats_heads: bool = False  # keys and values are kept for every query head (precision.repeats_heads)

    @property
    def pass_tokens(self) -> int:
        return self.lanes * self.micro_batch * self.tokens

    @property
    def number_bytes(self) -> int:
        return DTYPE_BYTES[self.precision]


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
        """What PyTorch's tensors hold at the peak (torch.cuda.max_memory_allocated)."""
        return self.reserved_bytes - self.parts["fragmentation"]


def estimate(shape: ModelShape, settings: Settings, machine: Machine) -> Estimate:
    """The whole process on the device, by part, for training with `settings`."""
    repeats = repeats_heads(machine, settings.precision)
    settings = replace(settings, targets=settings.targets or shape.linears, repeats_heads=repeats)
    kept = {**base_parts(shape, settings), **lane_parts(shape, settings)}
    moments = {
        "head": _head(shape, settings, head_chunk(shape.vocab, machine.kind)),
        "final norm": _final_norm(shape, settings),
    }
    n = settings.checkpointed
    if n < shape.layers:
        moments["block"] = _block(shape, settings, shape.layers - n, n, again=False)
    if n:
        moments["recomputed block"] = _block(shape, settings, 0, n, again=True)
    if settings.evaluate_tokens:
        tokens = settings.evaluate_tokens
        moments["evaluation"] = {"evaluation": evaluation_bytes(shape, settings, tokens, machine.kind)}
    at = max(moments, key=lambda name: sum(moments[name].values()))
    parts = {**kept, **moments[at], "batch": batch_bytes(settings), "cuBLAS workspaces": machine.cublas_bytes}
    transient = sum(moments[at].values())
    parts["fragmentation"] = fragmentation_bytes(transient, machine)
    parts["context and libraries"] = machine.context_bytes
    return Estimate(parts, at, {name: sum(part.values()) for name, part in moments.items()})


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
    return {
        "base: linear layers": blocks,
        "base: quantisation statistics": statistics,
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


def saved_per_token(shape: ModelShape, settings: Settings) -> int:
    """Bytes that a block which isn't checkpointed keeps for each token until the backward pass."""
    keys = shape.queries if settings.repeats_heads else shape.keys
    c, h, f = settings.number_bytes, shape.hidden, shape.intermediate
    targets = settings.targets
    read = {linear.reads for linear in targets}
    total = shape.norms * (4 * h + 4)  # RMSNorm computes in fp32
    total += c * h * (("hidden" in read) + ("normed" in read))
    total += c * (2 * shape.queries + 2 * keys) + 4 * shape.heads
    if shape.head_norms:
        total += 4 * (shape.queries + shape.keys)
    if any(linear.name == "qkv_proj" for linear in shape.linears):
        total += c * (shape.queries + shape.keys)  # v is a view of the fused output and keeps all of it
    total += c * f * (3 + ("product" in read))
    total += c * settings.rank * len(targets)
    return total  # dropout keeps nothing: its masks are computed again


def head_chunk(vocab: int, kind: str) -> int:
    """Target positions whose logits exist at one time."""
    return max(8, HEAD_CHUNK_BYTES[kind] // (4 * vocab))


def _stash(shape: ModelShape, settings: Settings, whole: int, inputs: int) -> dict[str, int]:
    """What `whole` blocks and the inputs of `inputs` checkpointed ones keep for the backward pass."""
    N, c = settings.pass_tokens, settings.number_bytes
    saved = whole * saved_per_token(shape, settings)
    if whole and not settings.checkpointed:
        saved -= 4 * shape.hidden + 4  # the first norm reads the embeddings, which need no gradient
    return {
        "activations: saved": N * saved,
        "activations: inputs of checkpointed layers": N * inputs * c * shape.hidden,
        "activations: rotary": 2 * c * shape.head_dim * settings.tokens,
    }


def _head(shape: ModelShape, settings: Settings, chunk: int) -> dict[str, int]:
    N, c, h = settings.pass_tokens, settings.number_bytes, shape.hidden
    return {
        **_stash(shape, settings, shape.layers - settings.checkpointed, settings.checkpointed),
        "activations: final norm": N * (4 * h + 4 + c * h),
        "head: hidden states of the targets and their gradient": 2 * N * c * h,
        "head: logits of a chunk": 8 * min(N, chunk) * shape.vocab,  # fp32, and as much again inside logsumexp
    }


def _final_norm(shape: ModelShape, settings: Settings) -> dict[str, int]:
    """The first thing that the backward pass meets, all blocks' share still there: six fp32 copies of the states."""
    N, c, h = settings.pass_tokens, settings.number_bytes, shape.hidden
    return {
        **_stash(shape, settings, shape.layers - settings.checkpointed, settings.checkpointed),
        "backward: final norm": N * (6 * 4 * h + c * h),
    }


def _block(shape: ModelShape, settings: Settings, whole: int, inputs: int, again: bool) -> dict[str, int]:
    """The MLP's backward pass in the topmost of these blocks."""
    N, c, h, f = settings.pass_tokens, settings.number_bytes, shape.hidden, shape.intermediate
    product = c * f * any(linear.reads == "product" for linear in settings.targets)  # let go before the peak
    low = c * settings.rank
    plain = N * (3 * c * f - product + 2 * c * h + low)
    masked = N * (2 * c * f + 5 * f) if settings.dropout else 0  # int32 hashes, the mask, two masked copies
    weight = dequantized_bytes(shape, settings)
    undone = N * (2 * c * f + c * h + low) + weight if weight else 0
    parts = _stash(shape, settings, whole, inputs)
    if again:
        parts["activations: layer made again"] = N * saved_per_token(shape, settings)
    if settings.quantization == "int8":  # in the forward pass: the input in fp16, |it|, its mask, itself in int8
        plain = max(plain, N * f * (4 if settings.precision == "fp16" else 6))
    at_weight = undone > plain
    parts["backward: temporaries of a layer"] = masked + (undone - weight if at_weight else plain)
    parts["dequantised weight"] = weight if at_weight else 0
    return parts


def evaluation_bytes(shape: ModelShape, settings: Settings, tokens: int, kind: str) -> int:
    """A batch of `tokens` tokens without autograd: an MLP's three wide tensors, or the head's chunk."""
    c, h, f = settings.number_bytes, shape.hidden, shape.intermediate
    block = tokens * (3 * c * f + 2 * c * h) + dequantized_bytes(shape, settings)
    if settings.quantization == "int8":
        block += tokens * 5 * f  # the product in int32, the input in int8
    return max(block, 2 * tokens * c * h + 8 * min(tokens, head_chunk(shape.vocab, kind)) * shape.vocab)


def dequantized_bytes(shape: ModelShape, settings: Settings) -> int:
    """The largest linear layer's weights in the compute type, which a quantised base makes for one matrix product."""
    if settings.quantization == "none":
        return 0
    largest = max(linear.numel for linear in shape.linears)
    statistics = 8 * -(-largest // 64) if settings.quantization == "nf4" and settings.double_quant else 0
    return largest * settings.number_bytes + statistics


def batch_bytes(settings: Settings) -> int:
    """Ids, places of targets, targets, weights, losses and hits of a pass; with dropout a key a token."""
    return (8 + 8 + 8 + 4 + 4 + 1 + 4 * settings.dropout) * settings.pass_tokens


def fragmentation_bytes(transient: int, machine: Machine) -> int:
    """Bytes reserved beyond those allocated. H200, 184 settings: 0.2 to 12% of what comes and goes with a step."""
    return transient // 10 + (64 * MIB if machine.kind == "cuda" else 0)


def _lane_numbers(shape: ModelShape, settings: Settings) -> int:
    return shape.lane_parameters(settings.targets, settings.rank)


def _round(count: int) -> int:
    """PyTorch's CUDA allocator hands out multiples of 512 bytes."""
    return -(-count // 512) * 512
