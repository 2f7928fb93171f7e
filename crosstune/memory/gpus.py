"""Which devices there are, and what each can do: GPUs by name, present GPUs through NVML, this computer's RAM.

Nothing here starts CUDA or loads torch, so `crosstune plan` and `crosstune doctor` answer at once, also without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from crosstune.errors import DeviceError
from crosstune.units import bytes_words

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """A device to plan for. Rates are the vendor's figures (dense bf16 or fp16 matrix product, memory bandwidth)."""

    name: str
    kind: str  # cuda | cpu | mps
    total_bytes: int
    capability: tuple[int, int] = (0, 0)
    flops: float = 0.0  # a second
    bandwidth: float = 0.0  # bytes a second
    expandable: bool = True  # CUDA: the allocator's segments grow in place (model/device.py turns it on)
    multiprocessors: int = 132  # CUDA

    @property
    def cublas_bytes(self) -> int:
        """cuBLAS keeps a workspace for each handle and stream: one of the forward, one of the backward thread.

        PyTorch asks for 32 MiB each on compute capability 9.0 and 8 MiB + 128 KiB elsewhere (an H200 showed 2 x 32).
        """
        if self.kind != "cuda":
            return 0
        return 2 * (32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024)

    @property
    def context_bytes(self) -> int:
        """What lies outside PyTorch's allocator. H200: 527 MiB for the context, 766–774 MiB with kernels loaded."""
        return {"cuda": 775 * MIB, "mps": 500 * MIB}.get(self.kind, 700 * MIB)  # cpu: Python, torch, transformers


def _gpu(name: str, gib: float, capability: tuple[int, int], tflops: float, gbps: float, processors: int) -> Machine:
    return Machine(
        name, "cuda", int(gib * GIB), capability, tflops * 1e12, gbps * 1e9, multiprocessors=processors
    )  # fmt: skip


# What the driver reports as total (nvidia-smi), which is below the number on the box; rates from the data sheets
# (H200's bandwidth of 4.26 TB/s and 800 TFLOP/s were measured, which the others are not).
GPUS: dict[str, Machine] = {
    "t4": _gpu("NVIDIA T4", 14.56, (7, 5), 65, 320, 40),
    "v100-16": _gpu("NVIDIA V100 16GB", 15.77, (7, 0), 112, 900, 80),
    "v100-32": _gpu("NVIDIA V100 32GB", 31.73, (7, 0), 112, 900, 80),
    "rtx-2080-ti": _gpu("NVIDIA GeForce RTX 2080 Ti", 10.75, (7, 5), 54, 616, 68),
    "rtx-3060": _gpu("NVIDIA GeForce RTX 3060", 11.76, (8, 6), 51, 360, 28),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090", 23.69, (8, 6), 71, 936, 82),
    "rtx-4060-ti-16": _gpu("NVIDIA GeForce RTX 4060 Ti", 15.70, (8, 9), 88, 288, 34),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090", 23.64, (8, 9), 165, 1008, 128),
    "rtx-5090": _gpu("NVIDIA GeForce RTX 5090", 31.36, (12, 0), 210, 1792, 170),
    "l4": _gpu("NVIDIA L4", 22.03, (8, 9), 121, 300, 58),
    "a10g": _gpu("NVIDIA A10G", 22.06, (8, 6), 70, 600, 80),
    "a40": _gpu("NVIDIA A40", 44.42, (8, 6), 150, 696, 84),
    "l40s": _gpu("NVIDIA L40S", 44.39, (8, 9), 362, 864, 142),
    "a100-40": _gpu("NVIDIA A100 40GB", 39.39, (8, 0), 312, 1555, 108),
    "a100-80": _gpu("NVIDIA A100 80GB", 79.25, (8, 0), 312, 2039, 108),
    "h100": _gpu("NVIDIA H100 80GB", 79.11, (9, 0), 800, 3350, 132),
    "h200": _gpu("NVIDIA H200", 139.80, (9, 0), 800, 4260, 132),
    "b200": _gpu("NVIDIA B200", 178.35, (10, 0), 2250, 8000, 148),
}
ALIASES = {
    "4060ti": "rtx-4060-ti-16", "v100": "v100-16", "a100": "a100-40", "h10080": "h100", "a10": "a10g",
}  # fmt: skip


def flash_sums(blocks: int, multiprocessors: int) -> int:
    """Copies of the queries' gradient that flash's backward pass sums up in one order, for rows × heads `blocks`.

    As many as keep all multiprocessors busy (aten/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd).
    """
    return (multiprocessors + blocks - 1) // blocks


def find_gpu(name: str) -> Machine:
    """A GPU by its short name, such as `l4`, `4090` or `a100-80`."""
    plain = _plain_name(name)
    plain = _plain_name(ALIASES.get(plain, plain))
    key = next((key for key in GPUS if _plain_name(key) == plain), None)
    if key is None:
        raise DeviceError(
            f"the GPU {name!r} is not known", f"Give --memory in its place, or one of: {', '.join(GPUS)}."
        )
    return GPUS[key]


def _plain_name(name: str) -> str:
    """'NVIDIA GeForce RTX 4090' and 'rtx-4090' → '4090'."""
    return re.sub(r"nvidia|geforce|rtx|[^a-z0-9]", "", name.lower())


def parse_bytes(text: str) -> int:
    """'16GiB' or '16 GB' or '16g' → bytes. GB and GiB are both taken as binary: a "16 GB" card has 16 GiB or less."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    amount = int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " ")) if match is not None else 0
    if amount < MIB:  # a number of bytes is taken, a forgotten unit isn't
        raise DeviceError(f"{text!r} is no amount of memory", "Write it like 16GiB, 500MiB or 1.5TiB.")
    return amount


@dataclass(frozen=True, slots=True)
class Present:
    """A GPU in this computer, as NVML sees it."""

    index: int
    machine: Machine
    free_bytes: int
    used_bytes: int
    driver: str
    uuid: str
    processes: tuple[tuple[int, int], ...] = ()  # (process id, bytes)

    def __str__(self) -> str:
        free = f"{bytes_words(self.free_bytes)} of {bytes_words(self.machine.total_bytes)} free"
        return f"GPU {self.index} {self.machine.name}, {free}"


def present_gpus() -> list[Present]:
    """NVIDIA GPUs in this computer, without starting CUDA. Empty where there is no driver (or no nvidia-ml-py)."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return [_read_gpu(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(nvml: Any, index: int, driver: str) -> Present:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = _text(nvml.nvmlDeviceGetName(handle))
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        processes = tuple((int(p.pid), int(p.usedGpuMemory or 0)) for p in running)
    except nvml.NVMLError:  # not permitted in some containers
        processes = ()
    flops, bandwidth, multiprocessors = rates_of(name, capability)
    machine = Machine(
        name, "cuda", int(memory.total), (int(capability[0]), int(capability[1])), flops, bandwidth,
        multiprocessors=multiprocessors,
    )  # fmt: skip
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    return Present(index, machine, int(memory.free), int(memory.used), driver, uuid, processes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def rates_of(name: str, capability: Sequence[int]) -> tuple[float, float, int]:
    """Rates and multiprocessors of the listed GPU whose name is nearest; else of a modest card of the generation."""
    words = set(re.findall(r"[a-z]*\d+[a-z]*|super|ti", name.lower()))
    ranked = sorted(
        GPUS.values(), key=lambda gpu: -len(words & set(re.findall(r"[a-z]*\d+[a-z]*|super|ti", gpu.name.lower())))
    )
    best = ranked[0]
    if words & set(re.findall(r"[a-z]*\d+[a-z]*", best.name.lower())):
        return best.flops, best.bandwidth, best.multiprocessors
    return (60e12, 500e9, 80) if tuple(capability) >= (8, 0) else (40e12, 400e9, 40)


def this_cpu() -> Machine:
    """This computer's processor and RAM (what the container may use, if that is less)."""
    total, _ = _ram_bytes()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    rate = 125e9 if "avx512f" in cpu_flags() else 40e9  # a core, in fp32; the first is measured (speed.py)
    return Machine("CPU", "cpu", total, (0, 0), cores * rate, 20e9)


@cache
def cpu_flags() -> frozenset[str]:
    """What the processor says it can, on Linux; elsewhere nothing is known."""
    if sys.platform != "linux":
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return frozenset(line.partition(":")[2].split())


def free_ram_bytes() -> int:
    """RAM that a new process could take: the system's own figure, cut to what the container's limit leaves."""
    return _ram_bytes()[1]


def _ram_bytes() -> tuple[int, int]:
    import psutil

    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_number(limit_file), _read_number(used_file)
        if limit is not None and used is not None and limit < total:
            # `used` counts the page cache, which the kernel gives back: so the free figure errs on the safe side.
            total, free = limit, min(free, max(0, limit - used))
    return total, free


def _read_number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # cgroup 2 writes 'max' for no limit
