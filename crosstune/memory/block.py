"""What one decoder block keeps for its backward pass and needs on top of it, in bytes.

Legend: N tokens of a pass; h hidden, f MLP width, q and k widths of all query and all key heads; c bytes of a number
in the compute type; R rank. `saved` is per token; the other figures are for a whole pass.

On CUDA known blocks run as four fused nodes (model/block.py), elsewhere as transformers wrote them:

    per token                      transformers' block               fused
    hidden states                  in fp32 for both norms  2·4h      as they are             2·c·h
    1/rms                          2·4                               2·4
    what q, k, v read              c·h                               made again
    q and k rotated, v             c·(q + 2k)                        c·(q + 2k)
    attention's output, logsumexp  c·q + 4·heads                     c·q + 4·heads
    what gate and up read          c·h                               made again
    gate, up                       c·2f                              c·2f
    silu(gate), the product        c·2f                              made again
    x Aᵀ of each adapted layer     c·R                               c·R

The backward pass needs most in the MLP. transformers' block then holds three gradients of width f, the product being
gone; the fused one holds a single one. A quantised base has a weight made in 16 bit at that time, the fused block that
of gate and up together. With few long rows it needs most in flash's attention, which sums the queries' gradient up in
fp32, in several copies (gpus.py, flash_sums), and makes the keys' and values' for every query head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from crosstune.memory.gpus import Machine, flash_sums
from crosstune.memory.precision import repeats_heads
from crosstune.memory.shape import Linear, ModelShape

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


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
    targets: tuple[Linear, ...] = ()  # none: all linear layers
    dropout: bool = False
    evaluate_tokens: int = 0  # of a batch without autograd
    copies: bool = False  # a 4-bit base's weights are also kept in the compute type, not made for each product
    recorded: int = 0  # tokens of the largest pass that is recorded as a CUDA graph; 0: none is

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass, padding included."""
        return self.lanes * self.micro_batch * self.tokens

    @property
    def recorded_row(self) -> int:
        """Tokens of each row of the largest recorded pass."""
        return -(-self.recorded // (self.lanes * self.micro_batch))

    @property
    def number_bytes(self) -> int:
        """Of the compute type."""
        return DTYPE_BYTES[self.precision]


@dataclass(frozen=True, slots=True)
class Block:
    """transformers' own block."""

    shape: ModelShape
    settings: Settings
    repeats_heads: bool = False  # keys and values are kept for every query head
    multiprocessors: int = 0  # of a GPU whose attention is flash's

    @property
    def saved(self) -> int:
        """Bytes kept for each token until the backward pass."""
        c, shape, read = self.settings.number_bytes, self.shape, self._read
        total = shape.norms * (4 * shape.hidden + 4)
        total += c * shape.hidden * (("hidden" in read) + ("normed" in read))
        total += self._attention
        if any(linear.name == "qkv_proj" for linear in shape.linears):
            total += c * (shape.queries + shape.keys)  # v is a view of the fused output and keeps all of it
        total += c * shape.intermediate * (3 + ("product" in read))
        return total + self._low

    @property
    def not_saved_first(self) -> int:
        """The first block's first norm reads the embeddings, which need no gradient."""
        return 4 * self.shape.hidden + 4

    @property
    def input_saved(self) -> int:
        """Of what is saved, the block's input itself, which a checkpoint keeps too: in fp32 the norm needs no copy."""
        return 4 * self.shape.hidden if self.settings.number_bytes == 4 else 0

    def backward(self, *, again: bool) -> tuple[int, int]:
        """(bytes beside what is saved, of them a weight made in 16 bit) where the backward pass needs most."""
        N, c, h, f = self._sizes
        product = c * f * ("product" in self._read)  # let go before the peak
        plain = N * (3 * c * f - product + 2 * c * h + c * self.settings.rank)
        plain += N * (2 * c * f + 5 * f) * self.settings.dropout  # int32 hashes, the mask, two masked copies
        if again and self.settings.quantization == "int8":  # the input in fp16, |it|, its mask, itself in int8
            plain = max(plain, N * f * (4 if self.settings.precision == "fp16" else 6))
        weight = weight_bytes(self.settings, max(linear.numel for linear in self.shape.linears))
        undone = N * (2 * c * f + c * h + c * self.settings.rank) + weight
        gone = N * (c * f * 3 + product + 4 * h)  # what the MLP kept
        attention = 2 * N * c * h + self._attention_backward - gone
        return max((undone, weight) if weight else (plain, 0), (plain, 0), (attention, 0))

    def final_norm(self) -> int:
        """The norm after the last block, backward: six copies in fp32."""
        N, c, h, _ = self._sizes
        return N * (6 * 4 * h + c * h)

    def after(self) -> int:
        """What the final norm keeps and gives, per token."""
        return 4 * self.shape.hidden + 4 + self.settings.number_bytes * self.shape.hidden

    def evaluation(self, tokens: int) -> int:
        """Without autograd: gate, up and their product, or int8's product in int32."""
        c, h, f = self.settings.number_bytes, self.shape.hidden, self.shape.intermediate
        weight = weight_bytes(self.settings, max(linear.numel for linear in self.shape.linears))
        wide = 3 * c * f if self.settings.quantization != "int8" else 2 * c * f + 6 * f
        return tokens * (wide + 2 * c * h) + weight

    @property
    def _attention(self) -> int:
        c, shape = self.settings.number_bytes, self.shape
        keys = shape.queries if self.repeats_heads else shape.keys
        norms = 4 * (shape.queries + shape.keys) if shape.head_norms else 0
        return c * (2 * shape.queries + 2 * keys) + 4 * shape.heads + norms

    @property
    def _attention_backward(self) -> int:
        """What comes into flash's backward pass, goes out of it, and is made on the way (train/kernels.py)."""
        if not self.multiprocessors:
            return 0
        N, c, _, _ = self._sizes
        shape, rows = self.shape, self.settings.lanes * self.settings.micro_batch
        grouped = shape.keys != shape.queries
        length, width = -(-self.settings.tokens // 128) * 128, -(-shape.head_dim // 32) * 32
        sums = flash_sums(rows * shape.heads, self.multiprocessors)
        made = 4 * rows * shape.heads * length * (1 + width * sums) + 2 * c * N * shape.queries * grouped
        return made + 2 * c * N * (shape.queries + shape.keys)

    @property
    def _low(self) -> int:
        return self.settings.number_bytes * self.settings.rank * len(self.settings.targets)

    @property
    def _read(self) -> set[str]:
        return {linear.reads for linear in self.settings.targets}

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.settings.pass_tokens, self.settings.number_bytes, self.shape.hidden, self.shape.intermediate


@dataclass(frozen=True, slots=True)
class FusedBlock(Block):
    """The four nodes of model/block.py."""

    @property
    def saved(self) -> int:
        """Bytes kept for each token until the backward pass."""
        c, shape = self.settings.number_bytes, self.shape
        repeated = c * 2 * shape.keys * self.repeats_heads  # queries are a view of one tensor with keys and values
        return c * (2 * shape.hidden + 2 * shape.intermediate) + 8 + self._attention + repeated + self._low

    @property
    def not_saved_first(self) -> int:
        """Nothing: the hidden states themselves are kept."""
        return 0

    @property
    def input_saved(self) -> int:
        """Of what is saved, the block's input itself, which a checkpoint keeps anyway."""
        return self.settings.number_bytes * self.shape.hidden

    def backward(self, *, again: bool) -> tuple[int, int]:
        """(bytes beside what is saved, of them a weight made in 16 bit) where the backward pass needs most."""
        N, c, h, f = self._sizes
        states = N * c * h * (2 + again)
        low = N * c * self.settings.rank
        down, wide = self._weights
        masked = N * c * f if self.settings.dropout else 0  # gone before the weight is made
        ways = [
            (states + N * c * f + low + max(down, masked), down if down > masked else 0),
            (states + N * c * h + low + wide, wide),
            (N * c * (h - 2 * f) + self._attention_backward, 0),  # the MLP's are gone by then
        ]
        if self.settings.quantization == "int8":  # forward: a product in int32, in fp16, in the compute type
            ways.append((N * (f * (6 if self.settings.precision == "fp16" else 8) + (2 + again) * c * h + h), 0))
        return max(ways)

    def final_norm(self) -> int:
        """Two copies of the states, and the gradient that the head made."""
        N, c, h, _ = self._sizes
        return 4 * N * c * h

    def after(self) -> int:
        """The last hidden states, their norm's input and output."""
        return 2 * self.settings.number_bytes * self.shape.hidden + 4

    def evaluation(self, tokens: int) -> int:
        """Without autograd: gate and up side by side, and their product, or int8's product in int32."""
        c, h, f = self.settings.number_bytes, self.shape.hidden, self.shape.intermediate
        states = 5 * c * h + c * (self.shape.queries + 2 * self.shape.keys)  # alive until the block is left
        if self.settings.quantization == "int8":
            return tokens * (2 * c * f + 8 * f + states + h)
        down, wide = self._weights
        return tokens * (2 * c * f + states) + max(tokens * c * f + down, wide)

    @property
    def _weights(self) -> tuple[int, int]:
        """down, and gate with up, made in the compute type; int8 makes one layer at a time. No statistics beside."""
        if self.settings.copies:
            return 0, 0
        one = self.shape.hidden * self.shape.intermediate * self.settings.number_bytes
        return {"none": (0, 0), "int8": (one, one), "nf4": (one, 2 * one)}[self.settings.quantization]


def block_of(shape: ModelShape, settings: Settings, machine: Machine) -> Block:
    """The kind of block that runs on the device."""
    settings = replace(settings, targets=settings.targets or shape.linears)
    kind = FusedBlock if machine.kind == "cuda" and shape.fusable else Block
    repeats = repeats_heads(machine, settings.precision)
    is_flash = machine.kind == "cuda" and not repeats
    return kind(shape, settings, repeats, machine.multiprocessors if is_flash else 0)


def weight_bytes(settings: Settings, numel: int) -> int:
    """A quantised weight made in the compute type for one product; NF4's statistics are made in fp32 first, twice."""
    if settings.quantization == "none":
        return 0
    statistics = 8 * -(-numel // 64) if settings.quantization == "nf4" and settings.double_quant else 0
    return numel * settings.number_bytes + statistics
