"""Which GPUs this process may see: decided before torch starts, because CUDA reads CUDA_VISIBLE_DEVICES only once.

Setting it later is silently ignored (pytorch/pytorch#80876), so a process whose torch already runs on other devices is
refused. Numbers are those of nvidia-smi, or count among CUDA_VISIBLE_DEVICES where that was set from outside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from crosstune.errors import DeviceError
from crosstune.memory.gpus import Present, present_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


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
    outside = [name for name in environ.get(VISIBLE, "").split(",") if name]
    missing = [gpu for gpu in gpus if outside and gpu >= len(outside)]
    if missing or len(set(gpus)) != len(gpus):
        raise DeviceError(
            f"device.gpus is {list(gpus)}, and {VISIBLE} shows {len(outside)} GPUs ({environ.get(VISIBLE)})",
            f"Give different numbers from 0 to {max(0, len(outside) - 1)}, or change {VISIBLE}.",
        )
    value = ",".join(outside[gpu] if outside else str(gpu) for gpu in gpus)
    if value != environ.get(VISIBLE) and _cuda_has_started():
        now = environ.get(VISIBLE, "unset")
        raise DeviceError(
            f"device.gpus is {list(gpus)}, but torch has already started CUDA with {VISIBLE}={now}",
            f"Start a new process, or set {VISIBLE}={value} before anything uses CUDA.",
        )
    environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order; CUDA's own default is fastest first
    environ[VISIBLE] = value
    return Shown(value, "torch" in sys.modules)


def best_gpu(gpus: Sequence[Present] | None = None) -> Present | None:
    """The GPU with most free memory among those that this process may see; None without any."""
    return max(visible_gpus(gpus), key=lambda gpu: gpu.free_bytes, default=None)


def visible_gpus(gpus: Sequence[Present] | None = None) -> list[Present]:
    """Present GPUs that CUDA_VISIBLE_DEVICES (numbers or UUIDs) leaves, in its order."""
    gpus = present_gpus() if gpus is None else gpus
    if VISIBLE not in os.environ:
        return list(gpus)
    found = []
    for name in os.environ[VISIBLE].split(","):
        hit = [
            gpu
            for gpu in gpus
            if str(gpu.index) == name.strip() or (name.strip() and gpu.uuid.startswith(name.strip()))
        ]
        if not hit:
            break  # CUDA stops reading at the first name that it doesn't know
        found += hit
    return found


def _cuda_has_started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
