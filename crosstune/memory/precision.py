"""Compute type of the base and attention kernel, chosen from what the device is, each with its reason.

Torch-free, so that `plan` and `doctor` say beforehand what a run will use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from crosstune.errors import DeviceError
from crosstune.memory.gpus import Machine, cpu_flags

NATIVE_BF16_CPU = ("amx_bf16", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Choice:
    """A value, and the sentence that says why."""

    value: str
    why: str


def choose_precision(wanted: str, machine: Machine) -> Choice:
    """bf16, fp16 or fp32 for `wanted` (device.precision). Raises DeviceError where the device can't."""
    low, high = machine.capability
    if machine.kind == "cuda":
        if wanted == "bf16" and machine.capability < (8, 0):
            raise DeviceError(
                f"bf16-unsupported: {machine.name} has compute capability {low}.{high}, and bf16 needs 8.0",
                "Set device.precision to fp16 or auto.",
            )
        if wanted != "auto":
            return Choice(wanted, f"device.precision: {wanted}")
        if machine.capability >= (8, 0):
            return Choice("bf16", f"compute capability {low}.{high} has bf16, which needs no loss scaling")
        return Choice("fp16", f"compute capability {low}.{high} has no bf16; each lane scales its own loss")
    if machine.kind == "mps":
        return Choice("fp32", "MPS") if wanted == "auto" else Choice(wanted, f"device.precision: {wanted}")
    if wanted == "fp16":
        raise DeviceError("fp16 on a CPU is slow and inexact", "Set device.precision to fp32, bf16 or auto.")
    native = native_cpu_bf16()
    if wanted == "bf16":
        return Choice("bf16", f"device.precision: bf16, which this processor has ({native})" if native
                      else "device.precision: bf16, which this processor only emulates: slower than fp32")  # fmt: skip
    hint = f"; device.precision: bf16 would halve the base ({native})" if native and wanted == "auto" else ""
    return Choice("fp32", f"exact, on a CPU{hint}" if wanted == "auto" else "device.precision: fp32")


def repeats_heads(machine: Machine, precision: str) -> bool:
    """Grouped keys and values are repeated for every query head, as only the flash kernel takes them as they are."""
    if machine.kind == "cpu":
        return not cpu_takes_groups()
    return machine.kind == "cuda" and (precision == "fp32" or machine.capability < (8, 0))


@cache
def cpu_takes_groups() -> bool:
    """PyTorch's flash kernel for CPUs takes grouped heads: 2.9's does; with 2.8 they go to plain, T x T products."""
    try:
        found = version("torch")
    except PackageNotFoundError:  # a plan without torch: for whichever comes
        return True
    return tuple(map(int, found.split(".")[:2])) >= (2, 9)


def attention_kernel(machine: Machine, precision: str, *, head_dim: int = 128, masked: bool = False) -> Choice:
    """The kernel that torch's scaled_dot_product_attention will take (its own preference, torch 2.8 to 2.13)."""
    if machine.kind != "cuda":
        return Choice("flash (CPU)" if machine.kind == "cpu" else "MPS", "the only one that keeps no T x T matrix")
    if masked:
        return Choice("memory-efficient", "packed rows need a mask, which the flash kernel doesn't take")
    if precision == "fp32":
        return Choice("memory-efficient", "the flash kernel takes only bf16 and fp16")
    if machine.capability < (8, 0):
        return Choice("memory-efficient", "the flash kernel needs compute capability 8.0")
    if head_dim > 256:
        return Choice("math", f"heads of {head_dim} numbers are too wide for the flash kernel, which ends at 256")
    return Choice("flash", "bf16 or fp16 without a mask")


def native_cpu_bf16() -> str | None:
    """The flag by which this processor multiplies bf16 without converting it first, if it does."""
    return next((flag for flag in NATIVE_BF16_CPU if flag in cpu_flags()), None)
