"""`crosstune doctor`: what this computer has, what a run would use and why, and what is missing, with the command.

CUDA isn't started and torch isn't imported: GPUs are asked through NVML, versions are read from the installed packages.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.errors import DeviceError
from crosstune.memory.gpus import Machine, Present, free_ram_bytes, present_gpus, this_cpu
from crosstune.memory.precision import attention_kernel, choose_precision, native_cpu_bf16
from crosstune.memory.visible import VISIBLE, visible_gpus
from crosstune.units import bytes_words

if TYPE_CHECKING:
    from rich.console import Console

NEEDED = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "scikit-learn", "pydantic")
# package → (extra that brings it, what it is for)
OPTIONAL = {
    "bitsandbytes": ("quant", "int8 and NF4 bases"),
    "datasets": ("hub", "data sets from the hub"),
    "pandas": ("pandas", "rows from data frames"),
    "gguf": ("demo", "GGUF models and the demo"),
    "matplotlib": ("plot", "the plan's picture as PNG"),
}
# The oldest driver that runs a CUDA release on Linux (docs.nvidia.com/cuda, release notes, table 3).
OLDEST_DRIVER = {13: 580, 12: 525, 11: 450}


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that would be needed, for what, and how to get it."""

    what: str
    why: str
    command: str
    stops: bool = False  # nothing trains without it


@dataclass(frozen=True)
class Checkup:
    """The findings of a look at this computer."""

    machine: Machine  # that a run would take
    free_bytes: int
    precision: str
    precision_why: str
    attention: str
    attention_why: str
    quantization: str
    gpus: tuple[Present, ...]
    visible: tuple[int, ...]
    versions: dict[str, str]
    system: dict[str, str]
    missing: tuple[Missing, ...]

    @property
    def exit_code(self) -> int:
        """0 if a run could start; 2 if something stops it."""
        return DeviceError.exit_code if any(thing.stops for thing in self.missing) else 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "device": {
                "name": self.machine.name, "kind": self.machine.kind, "total_bytes": self.machine.total_bytes,
                "free_bytes": self.free_bytes, "capability": list(self.machine.capability),
            },
            "precision": {"value": self.precision, "why": self.precision_why},
            "attention": {"value": self.attention, "why": self.attention_why},
            "quantization": self.quantization,
            "gpus": [_gpu_json(gpu, gpu.index in self.visible) for gpu in self.gpus],
            "versions": self.versions,
            "system": self.system,
            "missing": [
                {"what": m.what, "why": m.why, "command": m.command, "stops": m.stops} for m in self.missing
            ],
        }  # fmt: skip

    def show(self, console: Console) -> None:
        """Print it."""
        from rich.table import Table

        if self.gpus:
            table = Table("GPU", "name", "free", "used", "capability", "driver", "processes", box=None, pad_edge=False)
            for gpu in self.gpus:
                holders = ", ".join(f"{pid} ({bytes_words(size)})" for pid, size in gpu.processes) or "none"
                capability = ".".join(map(str, gpu.machine.capability))
                hidden = "" if gpu.index in self.visible else f" (hidden by {VISIBLE})"
                sizes = bytes_words(gpu.free_bytes), bytes_words(gpu.used_bytes)
                table.add_row(str(gpu.index), gpu.machine.name + hidden, *sizes, capability, gpu.driver, holders)
            console.print(table)
        rows = Table("", "", box=None, show_header=False, pad_edge=False)
        rows.add_row("device", f"{self.machine.name}, {bytes_words(self.free_bytes)} free")
        rows.add_row("precision", f"{self.precision}: {self.precision_why}")
        rows.add_row("attention", f"{self.attention}: {self.attention_why}")
        rows.add_row("quantisation", self.quantization)
        rows.add_row("system", ", ".join(f"{name} {value}" for name, value in self.system.items()))
        rows.add_row("packages", ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        console.print(rows)
        for thing in self.missing:
            console.print(f"missing: {thing.what}, for {thing.why}\n  {thing.command}", highlight=False, markup=False)
        if not self.missing:
            console.print("nothing is missing")


def look() -> Checkup:
    """Look at this computer. Takes tens of milliseconds and starts nothing."""
    gpus = present_gpus()
    seen = visible_gpus(gpus)
    best = max(seen, key=lambda gpu: gpu.free_bytes, default=None)
    cuda = torch_cuda()
    usable = best is not None and cuda is not None
    machine, free = (best.machine, best.free_bytes) if best and usable else (this_cpu(), free_ram_bytes())
    precision = choose_precision("auto", machine)
    kernel = attention_kernel(machine, precision.value)
    versions = {name: found for name in (*NEEDED, *OPTIONAL) if (found := _version(name)) is not None}
    system = {"Python": platform.python_version(), "on": platform.platform(terse=True)}
    if cuda is not None:
        system["CUDA"] = cuda
    if not usable and (flag := native_cpu_bf16()):
        system["bf16 in the processor"] = flag
    return Checkup(
        machine, free, precision.value, precision.why, kernel.value, kernel.why, _quantization(machine),
        tuple(gpus), tuple(gpu.index for gpu in seen), versions, system, tuple(_missing(gpus, seen, cuda)),
    )  # fmt: skip


def torch_cuda() -> str | None:
    """The CUDA release that the installed torch was built for, read from torch/version.py; None without."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b.*?=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _missing(gpus: list[Present], seen: list[Present], cuda: str | None) -> list[Missing]:
    found = [Missing(name, "training", f"pip install {name}", stops=True) for name in NEEDED if _version(name) is None]
    if gpus and cuda is None and _version("torch") is not None:
        command = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"
        found.append(Missing("a torch that was built with CUDA", f"using {gpus[0].machine.name}", command))
    if gpus and cuda is not None:
        oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]), 0)
        if int(gpus[0].driver.split(".")[0]) < oldest:
            why = f"CUDA {cuda}, which this torch was built for (the driver is {gpus[0].driver})"
            command = "Update the NVIDIA driver, or install a torch built for an older CUDA release."
            found.append(Missing(f"an NVIDIA driver of at least {oldest}", why, command))
    if gpus and not seen:
        why = f"{VISIBLE}={os.environ.get(VISIBLE, '')!r} hides every GPU"
        found.append(Missing("a visible GPU", why, f"unset {VISIBLE}"))
    for name, (extra, why) in OPTIONAL.items():
        if _version(name) is None:
            found.append(Missing(name, why, f"pip install 'crosstune[{extra}]'"))
    return found


def _quantization(machine: Machine) -> str:
    version = _version("bitsandbytes")
    if version is None:
        return "none: bitsandbytes is not installed"
    if machine.kind == "cuda" and machine.capability < (6, 0):
        return "none: bitsandbytes needs compute capability 6.0"
    slow = " (slow on a CPU)" if machine.kind == "cpu" else ""
    return f"NF4 and int8 by bitsandbytes {version}{slow}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpu_json(gpu: Present, visible: bool) -> dict[str, Any]:
    return {
        "index": gpu.index, "name": gpu.machine.name, "uuid": gpu.uuid, "visible": visible, "driver": gpu.driver,
        "capability": list(gpu.machine.capability), "total_bytes": gpu.machine.total_bytes,
        "free_bytes": gpu.free_bytes, "used_bytes": gpu.used_bytes,
        "processes": [{"pid": pid, "bytes": size} for pid, size in gpu.processes],
    }  # fmt: skip


def main() -> int:
    """For `python -m crosstune.doctor`."""
    from rich.console import Console

    checkup = look()
    checkup.show(Console())
    return checkup.exit_code


if __name__ == "__main__":
    sys.exit(main())
