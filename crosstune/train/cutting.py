"""How a wave's steps are cut into passes, and how a pass lies: even, padded to a rectangle, or flat (data/flat.py).

Decided once for a wave and a plan, from all its rows: never from where a continued run goes on, so that it computes the
same passes to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crosstune.data.batches import Batch, PassSize, Unit, collate, cut_step, pass_size
from crosstune.data.flat import aligned, collate_flat, cut_flat, flat_size
from crosstune.data.tokens import Tokens
from crosstune.memory.speed import launch_tokens
from crosstune.memory.widths import LENGTH_MULTIPLE
from crosstune.model.attach import Slots
from crosstune.model.block import kind_of
from crosstune.model.device import machine_of
from crosstune.model.targets import linear_sizes
from crosstune.train.lane import Lane

FLAT_ON = {"cuda": True, "mps": False, "cpu": False, "cpu bf16": True}  # kinds of device
WASTE = 0.03  # share of padding from which on passes lie flat: attention and adapters have other kernels then
LOOK_AHEAD = 2000  # steps whose passes are looked at


@dataclass(frozen=True)
class Cutting:
    """Even passes of `micro_batch` units a lane, or flat ones of `most_tokens` tokens, no row above `longest`."""

    micro_batch: int
    multiple: int = 1
    most_tokens: int = 0  # 0: even
    longest: int = 0

    def cut(self, units_K: Sequence[Sequence[Unit]], tokens: Tokens) -> list[list[list[Unit]]]:
        """One step's units of every lane → passes."""
        if self.most_tokens:
            return cut_flat(units_K, tokens.lengths, self.most_tokens)
        return cut_step(units_K, tokens.lengths, self.micro_batch)

    def size(self, units_K: Sequence[Sequence[Unit]], tokens: Tokens) -> PassSize:
        """The smallest size that holds a pass."""
        if self.most_tokens:
            return flat_size(tokens, units_K, self.longest)
        return pass_size(tokens, units_K, self.multiple)

    def collate(
        self,
        tokens: Tokens,
        units_K: Sequence[Sequence[Unit]],
        *,
        weights_K: Sequence[float],
        dropout_K: Sequence[tuple[int, int]] | None,
        size: PassSize,
    ) -> Batch:
        """Arrays of one pass."""
        make = collate_flat if self.most_tokens else collate
        return make(tokens, units_K, weights_K=weights_K, dropout_K=dropout_K, size=size)


def choose_cutting(slots: Slots, lanes: Sequence[Lane], tokens: Tokens, micro_batch: int) -> Cutting:
    """Flat where that can be done and even passes would be padding for more than WASTE.

    Where only even ones can be recorded as CUDA graphs, a flat one costs as much as its launch at least.
    """
    device_type = slots.base.device.type
    even = Cutting(micro_batch, LENGTH_MULTIPLE[device_type])
    if not (FLAT_ON[kind_of(slots.base.device, slots.base.dtype)] and slots.takes_flat):
        return even
    only_even = slots.is_recordable(flat=False) and not slots.is_recordable(flat=True)
    least = launch_of(slots, lanes_apart=len(lanes)) if only_even else 0.0
    if not _is_packed_or_padded(lanes, tokens, even, least):
        return even
    every = [[int(tokens.lengths[row]) for row in unit] for lane in lanes for unit in lane.units]
    widest, longest = max(map(sum, every), default=1), max(map(max, every), default=1)
    return Cutting(micro_batch, even.multiple, len(lanes) * micro_batch * aligned(widest), longest)


def launch_of(slots: Slots, *, lanes_apart: int = 0) -> float:
    """Tokens that are computed while a pass is launched kernel by kernel; 0 on a CPU, which launches nothing."""
    if slots.base.device.type != "cuda":
        return 0.0
    parameters = sum(inputs * outputs for inputs, outputs in linear_sizes(slots.base).values())
    layers, machine = len(slots.base.decoder_layers), machine_of(slots.base.device)
    return launch_tokens(layers, parameters, machine, lanes_apart=lanes_apart)


def _is_packed_or_padded(lanes: Sequence[Lane], tokens: Tokens, even: Cutting, least: float) -> bool:
    """Rows share a unit, or even passes would be padding for more than WASTE. A flat pass counts as `least` or more."""
    if any(len(unit) > 1 for lane in lanes for unit in lane.units):
        return True
    real = computed = 0.0
    for units_K in steps_of_wave(lanes):
        for units in even.cut(units_K, tokens):
            size = even.size(units, tokens)
            computed += len(lanes) * size.rows * size.width
            real += max(least, sum(int(tokens.lengths[row]) for of_lane in units for unit in of_lane for row in unit))
    return computed > 0 and 1 - real / computed > WASTE


def sizes_of_wave(lanes: Sequence[Lane], tokens: Tokens, cutting: Cutting) -> Counter[PassSize]:
    """How often the passes of these lanes' steps, from the first one on, have which size."""
    passes = (units for units_K in steps_of_wave(lanes) for units in cutting.cut(units_K, tokens))
    return Counter(cutting.size(units, tokens) for units in passes)


def steps_of_wave(lanes: Sequence[Lane]) -> Iterator[list[list[Unit]]]:
    """The units of every lane, step by step, from the first one on."""
    for step in range(min(max((lane.last_step for lane in lanes), default=0), LOOK_AHEAD)):
        yield [lane.units_at(step) for lane in lanes]
