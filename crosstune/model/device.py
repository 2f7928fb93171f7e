"""The device that training runs on: which, in what precision, with which attention kernel, and how many bytes it holds.

`crosstune.memory.visible` has said before torch was imported which GPUs there are; here torch is asked.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import psutil
import torch

from crosstune.errors import DeviceError
from crosstune.memory.gpus import Machine, free_ram_bytes, rates_of, this_cpu
from crosstune.memory.layout import Devices
from crosstune.memory.precision import Choice, attention_kernel, choose_precision
from crosstune.recipe.sections import Device


@dataclass(frozen=True, slots=True)
class Place:
    """A device with all that was decided about it."""

    device: torch.device
    machine: Machine
    precision: Choice
    attention: Choice
    ways: tuple[Devices | None, ...] = (None,)  # where the base may lie, in the order of preference; None: on `device`

    def __str__(self) -> str:
        return f"{self.machine.name}, {self.precision.value} ({self.precision.why}), {self.attention.value} attention"


def choose_device(section: Device) -> Place:
    """Where to run, from recipe.device. Raises DeviceError if that device isn't there: never a silent CPU run."""
    kind = section.kind
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if kind != "cuda" and section.gpus != "auto":
            raise DeviceError(
                f"device-unavailable: device.gpus is {list(section.gpus)}; torch {torch.__version__} sees no GPU "
                f"({_why_no_cuda()})",
                "Run 'crosstune doctor', or leave device.gpus out.",
            )
    device = torch.device(kind)
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise DeviceError(
                f"device-unavailable: device.kind is cuda; torch {torch.__version__} sees no GPU ({_why_no_cuda()})",
                "Run 'crosstune doctor', or set device.kind to auto or cpu.",
            )
        let_segments_grow()
        device = torch.device("cuda", torch.cuda.current_device())
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(
            "device-unavailable: device.kind is mps, which this computer lacks", "Set device.kind to auto."
        )
    if kind == "cpu":
        keep_freed_memory()
    machine = machine_of(device)
    precision = choose_precision(section.precision, machine)
    return Place(device, machine, precision, attention_kernel(machine, precision.value))


def named_device(name: str, section: Device | None = None) -> Place:
    """The device of a word: auto, cpu, mps, cuda or cuda:1; `section` has what else was asked (its precision)."""
    kind, _, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (number and not (kind == "cuda" and number.isdecimal())):
        raise DeviceError(f"the device {name!r} is not known", "Name one of auto, cpu, cuda, cuda:1, mps.")
    place = choose_device((section or Device()).model_copy(update={"kind": kind, "gpus": "auto"}))
    if not number:
        return place
    if int(number) >= torch.cuda.device_count():
        raise DeviceError(
            f"device-unavailable: there is no {name}; torch sees {torch.cuda.device_count()} GPU(s)",
            "Run 'crosstune doctor', or name another.",
        )
    return replace(place, device=torch.device(name), machine=machine_of(torch.device(name)))


@cache
def let_segments_grow() -> bool:
    """Turn PyTorch's expandable segments on, unless the user has set the allocator up; say whether they are on.

    With fixed segments 9% more than all tensors together is reserved in the median, with expandable ones 0.4%
    (rehearsals of 72 settings, 77% and 6% at most).
    """
    asked = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if asked is not None:
        return "expandable_segments:True" in asked
    with warnings.catch_warnings():  # deprecated in 2.13 for a name that older releases lack
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    return True


@cache
def keep_freed_memory() -> bool:
    """Have glibc keep large blocks that were freed, unless the user has set malloc up; say whether it does.

    By default it gives them back to the system, which hands them out again page by page, zeroed: 1 ms a MiB in a
    virtual machine, more than many an operation takes. `release` gives everything back.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has none
        return False
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    most, most_of_old = 2**31 - 1, 2**25  # glibc before 2.35 refuses more than 32 MiB
    return bool(
        (mallopt(mmap_threshold, most) or mallopt(mmap_threshold, most_of_old)) and mallopt(trim_threshold, most)
    )


def machine_of(device: torch.device) -> Machine:
    """The device as the planner knows it."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        flops, bandwidth, _ = rates_of(found.name, capability)
        return Machine(
            found.name, "cuda", found.total_memory, capability, flops, bandwidth, let_segments_grow(),
            found.multi_processor_count,
        )  # fmt: skip
    if device.type == "mps":
        return Machine("Apple GPU", "mps", torch.mps.recommended_max_memory(), (0, 0), 5e12, 200e9)
    return this_cpu()


def pinned_memory(size: int | torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers in memory that a GPU reads and writes by itself; in plain memory where no more can be pinned.

    Pinned pages take some of the device's memory, which may be full.
    """
    try:
        return torch.empty(size, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=dtype)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may use on the device in all: what is free, and what it holds already."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) + machine_of(device).context_bytes
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return free_ram_bytes() + psutil.Process().memory_info().rss


def live_bytes(device: torch.device) -> int:
    """Bytes of tensors on the device now (CPU: the process's resident memory)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return int(torch.mps.current_allocated_memory())
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device) -> int:
    """Most bytes since the process began: of tensors on a GPU, of resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def used_bytes(device: torch.device) -> int:
    """The most that the device held for this process, allocator and context together: what a plan's peak is."""
    if device.type != "cuda":
        return peak_bytes(device)
    return torch.cuda.max_memory_reserved(device) + outside_allocator(device)


def outside_allocator(device: torch.device) -> int:
    """Bytes that a GPU holds outside PyTorch's allocator; also other processes': exact on a GPU of one's own."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def make_workspaces(devices: Iterable[torch.device]) -> None:
    """Have cuBLAS allocate what it keeps for this thread and for autograd's, before anything that goes again.

    Among tensors that go they would leave memory in pieces: 2,536 MiB were reserved in place of 2,316 (H200, a 1B base
    in NF4, two rows of 1,024 tokens).
    """
    for device in devices:
        if device.type == "cuda":
            with torch.enable_grad():
                x = torch.ones(256, 256, device=device, requires_grad=True)
                (x @ x).sum().backward()


def release(device: torch.device) -> None:
    """Give back all that nothing refers to: cycles first, then the allocator's cached blocks."""
    gc.collect()
    empty_cache(device)


def empty_cache(device: torch.device) -> None:
    """Give back the allocator's cached blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif keep_freed_memory():
        ctypes.CDLL(None).malloc_trim(0)


def live_tensors(device_type: str) -> Counter[tuple[tuple[int, ...], str]]:
    """Bytes of every live storage, by the (shape, type) of a tensor that views it. Walks all objects: once a wave."""
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    seen = set()
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        try:
            storage = thing.untyped_storage()
        except RuntimeError:  # a sparse tensor, an undefined one, a wrapper: somebody else's
            continue
        if thing.device.type != device_type:
            continue
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[tuple(thing.shape), str(thing.dtype).removeprefix("torch.")] += storage.nbytes()
    return found


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return "no driver, no GPU, or CUDA_VISIBLE_DEVICES hides it"
