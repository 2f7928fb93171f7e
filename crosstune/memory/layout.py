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

from crosstune.errors import DeviceError
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


def ways(layers: str, offload: str, free: Sequence[int], ram: int) -> tuple[Devices | None, ...]:
    """Where a base may lie, in the order of preference, as device.layers and device.offload say; None: on one device.

    `free`: bytes free on each GPU. Raises DeviceError where there are too few GPUs.
    """
    names = tuple(f"cuda:{place}" for place in range(len(free)))
    found: list[Devices | None] = [None] if layers in ("one", "auto") else []
    if layers in ("balanced", "auto") and len(free) > 1:
        found.append(Devices(names, tuple(free), "balanced"))
    if offload == "cpu" and free:
        gpus = 1 if layers == "one" else len(free)
        found.append(Devices((*names[:gpus], "cpu"), (*free[:gpus], ram), "sequential"))
    elif layers == "sequential" and len(free) > 1:
        found.append(Devices(names, tuple(free), "sequential"))
    if not found:
        here = f"{len(free)} GPU{'s' * (len(free) != 1)}" if free else "no GPU"
        raise DeviceError(
            f"device.layers: {layers} spreads the base over several GPUs, and there is {here} to use",
            "Set device.layers: one, name the GPUs in device.gpus, such as [0, 1], or set device.offload: cpu.",
        )
    return tuple(found)


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
    if shape.known:
        room = room_for(shape, settings, counts)
    else:  # formulas that stand in for the block can't say what one weighs
        held = [sum(size for name, size in one.parts.items() if name.startswith("base")) for one in found]
        spare = [free - one.peak_bytes for free, one in zip(devices.free, found, strict=True)]
        room = tuple(max(base, base + left) for base, left in zip(held, spare, strict=True))
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


def room_for(shape: ModelShape, settings: Settings, counts: Sequence[int]) -> tuple[int, ...]:
    """Bytes for weights on each device: what the layers that are planned for it take, as accelerate counts them."""
    parts = base_parts(replace(shape, layers=1), settings)
    block = parts["base: linear layers"] + parts["base: norms and biases"]
    last = max(place for place, count in enumerate(counts) if count)
    room = []
    for place, count in enumerate(counts):
        ends = parts["base: embeddings"] * (place == 0) + parts["base: head"] * (place == last)
        room.append(count * block + block // 2 + ends if count or not place else 0)
    return tuple(room)
