"""A base over several devices: how many layers each may hold, so that the fullest has room. For a plan, without torch.

Each device holds its layers with their lanes and activations, and, as the others work one after another, all that comes
and goes with a pass: so the share of a device is the estimate of a model with as many layers. Embeddings and head are
counted on each, which errs on the safe side. Which module goes where is accelerate's decision (model/spread.py), within
the room for weights that is left here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from crosstune.memory.block import Settings
from crosstune.memory.estimate import Estimate, base_parts, estimate
from crosstune.memory.gpus import Machine, this_cpu
from crosstune.memory.shape import ModelShape


@dataclass(frozen=True)
class Devices:
    """Devices that a base may be spread over, as torch names them, in order, with the bytes that are free on each."""

    names: tuple[str, ...]
    free: tuple[int, ...]
    kind: Literal["balanced", "sequential"] = "balanced"


@dataclass(frozen=True)
class Layout:
    """A base over devices: bytes of weights that each may hold, and the layers that were planned for it."""

    devices: Devices
    room: tuple[int, ...]
    layers: tuple[int, ...]

    def __str__(self) -> str:
        shares = ", ".join(f"{count} on {name}" for name, count in zip(self.devices.names, self.layers, strict=True))
        return f"layers {self.devices.kind}: {shares}"


def lay_out(shape: ModelShape, settings: Settings, machine: Machine, devices: Devices) -> tuple[Layout, Estimate, int]:
    """(the layout, the estimate of the device that is nearest to its limit, the bytes free there)."""
    machines = [machine if name != "cpu" or machine.kind == "cpu" else this_cpu() for name in devices.names]
    if devices.kind == "balanced":
        least, more = divmod(shape.layers, len(machines))
        counts = [least + (place < more) for place in range(len(machines))]
    else:
        counts = _fill(shape, settings, machines, devices.free)
    found = [share(shape, settings, each, count) for each, count in zip(machines, counts, strict=True)]
    room = tuple(
        _room(shape, settings, one, count, free, first=not place and devices.kind == "sequential")
        for place, (one, count, free) in enumerate(zip(found, counts, devices.free, strict=True))
    )
    held = [place for place, count in enumerate(counts) if count]
    tight = max(held, key=lambda place: found[place].peak_bytes - devices.free[place])
    return Layout(devices, room, tuple(counts)), found[tight], devices.free[tight]


def share(shape: ModelShape, settings: Settings, machine: Machine, layers: int) -> Estimate:
    """One device with `layers` of the layers, of which as few are recomputed as can be: the first ones are."""
    kept = shape.layers - settings.checkpointed
    part = replace(settings, checkpointed=max(0, layers - kept))
    return estimate(replace(shape, layers=max(1, layers)), part, machine)


def _fill(shape: ModelShape, settings: Settings, machines: Sequence[Machine], free: Sequence[int]) -> list[int]:
    """As many layers as fit on the first device, then on the next; the last has what is left, room or not."""
    counts, left = [], shape.layers
    for place, machine in enumerate(machines):
        low, high = 0, left if place + 1 < len(machines) else 0
        while low < high:
            middle = (low + high + 1) // 2
            fits = share(shape, settings, machine, middle).peak_bytes <= free[place]
            low, high = (middle, high) if fits else (low, middle - 1)
        counts.append(low)
        left -= low
    counts[-1] += left
    return counts


def _room(shape: ModelShape, settings: Settings, found: Estimate, layers: int, free: int, *, first: bool) -> int:
    """Bytes for weights: all that nothing else takes, but for no more layers than were planned where order matters."""
    held = sum(size for name, size in found.parts.items() if name.startswith("base"))
    block = sum(base_parts(replace(shape, layers=1), settings).values())
    outside = 2 * shape.vocab * shape.hidden * settings.number_bytes
    block -= sum(base_parts(replace(shape, layers=1), settings)[f"base: {name}"] for name in ("embeddings", "head"))
    most = max(held, free - (found.peak_bytes - held))
    # accelerate keeps room for its largest layer free on the first device, in case it were to be off-loaded
    return min(most, layers * block + outside + block // 2 if layers else 0) + first * max(block, outside // 2)
