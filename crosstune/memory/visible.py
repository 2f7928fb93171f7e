"""Which GPUs this process may see: decided before torch starts, because CUDA reads CUDA_VISIBLE_DEVICES only once.

Setting it later is silently ignored (pytorch/pytorch#80876), so a process whose torch already runs on other devices is
refused. Numbers are those of nvidia-smi, or count among CUDA_VISIBLE_DEVICES where that was set from outside.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from crosstune.errors import DeviceError
from crosstune.memory.gpus import Present, present_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
SHOWN = "CROSSTUNE_SHOWN_DEVICES"  # [what show_gpus set, what it found]


@dataclass(frozen=True, slots=True)
class Shown:
    """What was set, and whether torch had been imported by then."""

    value: str
    torch_was_imported: bool


def show_gpus(gpus: Sequence[int], environ: MutableMapping[str, str] | None = None) -> Shown:
    """Let this process, and those it starts, see only these GPUs. None at all for an empty sequence.

    Raises DeviceError if torch already runs on CUDA and sees other devices, or if a number isn't there.
    """
    environ = os.environ if environ is None else environ
    now = environ.get(VISIBLE, "unset")
    outside = [name for name in (_from_outside(environ) or "").split(",") if name]
    missing = [gpu for gpu in gpus if outside and gpu >= len(outside)]
    if missing or len(set(gpus)) != len(gpus):
        raise DeviceError(
            f"device.gpus is {list(gpus)}, and {VISIBLE} shows {len(outside)} GPUs ({','.join(outside)})",
            f"Give different numbers from 0 to {max(0, len(outside) - 1)}, or change {VISIBLE}.",
        )
    value = ",".join(outside[gpu].strip() if outside else str(gpu) for gpu in gpus)
    if value != environ.get(VISIBLE) and _cuda_has_started():
        raise DeviceError(
            f"device.gpus is {list(gpus)}, but torch has already started CUDA with {VISIBLE}={now}",
            f"Start a new process, or set {VISIBLE}={value} before anything uses CUDA.",
        )
    environ[SHOWN] = json.dumps([value, _from_outside(environ)])
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order; CUDA's own default is fastest first
    environ[VISIBLE] = value
    return Shown(value, "torch" in sys.modules)


def choose_gpu(kind: str, gpus: str | Sequence[int]) -> Present | None:
    """Let this process see one GPU only: the one that `gpus` (device.gpus) names, or the one with most free memory.

    Does nothing, and returns None, where no GPU would be used (`kind`), where there is no choice, and for "auto" where
    torch has started CUDA already. Call it before torch is imported.
    """
    if kind in ("cpu", "mps") or (gpus == "auto" and _cuda_has_started()):
        return None
    seen = visible_gpus()
    if gpus == "auto":
        if len(seen) < 2:
            return None
        best = max(range(len(seen)), key=lambda place: seen[place].free_bytes)
        show_gpus([best])
        return seen[best]
    wanted = [int(gpu) for gpu in gpus]
    if len(wanted) != 1:
        raise DeviceError(
            f"device.gpus names {len(wanted)} GPUs {wanted}, and device.layers: one puts the base on one",
            "Name one, such as [0]; to use several, set device.ray: auto, which gives each GPU its own waves, or for "
            "a base that needs them device.layers: balanced.",
        )
    _refuse_missing(wanted, seen)
    show_gpus(wanted)
    return seen[wanted[0]] if seen else None


def choose_gpus(gpus: str | Sequence[int]) -> list[Present]:
    """For a base over several GPUs: let this process see those that `gpus` names, or all, that with most free memory
    first. In the order in which torch numbers them."""
    seen = visible_gpus()
    if isinstance(gpus, str):
        numbers = sorted(range(len(seen)), key=lambda place: -seen[place].free_bytes)
    else:
        numbers = [int(gpu) for gpu in gpus]
    _refuse_missing(numbers, seen)
    if seen:
        show_gpus(numbers)
    return [seen[number] for number in numbers] if seen else []


def _refuse_missing(wanted: Sequence[int], seen: Sequence[Present]) -> None:
    if seen and max(wanted) >= len(seen):
        numbers = ", ".join(f"{place} ({gpu.machine.name})" for place, gpu in enumerate(seen))
        raise DeviceError(f"device.gpus is {list(wanted)}, and there is no such GPU", f"Choose from {numbers}.")


def best_gpu(gpus: Sequence[Present] | None = None) -> Present | None:
    """The GPU with most free memory among those that this process may see; None without any."""
    return max(visible_gpus(gpus), key=lambda gpu: gpu.free_bytes, default=None)


def visible_gpus(gpus: Sequence[Present] | None = None) -> list[Present]:
    """Present GPUs that CUDA_VISIBLE_DEVICES, as set from outside (numbers or UUIDs), leaves, in its order."""
    gpus = present_gpus() if gpus is None else gpus
    names = _from_outside(os.environ)
    if names is None:
        return list(gpus)
    found = []
    for name in names.split(","):
        hit = [
            gpu
            for gpu in gpus
            if str(gpu.index) == name.strip() or (name.strip() and gpu.uuid.startswith(name.strip()))
        ]
        if not hit:
            break  # CUDA stops reading at the first name that it doesn't know
        found += hit
    return found


def _from_outside(environ: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES before `show_gpus` narrowed it: numbers count in that, also the second time."""
    now = environ.get(VISIBLE)
    shown, before = json.loads(environ.get(SHOWN, "[null, null]"))
    return before if now is not None and now == shown else now


def _cuda_has_started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
