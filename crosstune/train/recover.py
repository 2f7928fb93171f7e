"""Out of memory is survived: give back all that can be, take the next smaller plan, do the same again.

What is repeated must not have changed anything before it failed. A training step hasn't: `LaneAdamW.judge` makes all
that the update needs, and `apply` then works in place, where nothing is allocated. An evaluation only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from crosstune.errors import DeviceError
from crosstune.memory.plan import Plan
from crosstune.model.device import live_bytes, live_tensors, outside_allocator, release, used_bytes
from crosstune.train.lane import LaneJob
from crosstune.units import bytes_words

Result = TypeVar("Result")

# How torch and CUDA's libraries say it: CUDACachingAllocator, CPUAllocator, cuBLAS, cuDNN and the driver.
_WORDS = (
    "out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)  # fmt: skip
PEAK_SHARE = 0.05
LEAK_BYTES = 1 << 20  # what one wave may leave behind: caches of libraries, once


@dataclass(frozen=True)
class PlanChanged:
    """Memory ran out, and the wave went on with a smaller plan."""

    jobs: tuple[LaneJob, ...]
    step: int  # optimizer steps the wave had taken
    doing: str
    message: str
    before: Plan
    after: Plan

    def __str__(self) -> str:
        return f"out of memory in {self.doing} after step {self.step}: going on with {self.after}"


@dataclass(frozen=True)
class WaveSplit:
    """Memory ran out with the smallest plan: half of the wave's lanes go on first, the others from there afterwards."""

    jobs: tuple[LaneJob, ...]
    step: int
    doing: str
    message: str
    parts: tuple[tuple[LaneJob, ...], ...]

    def __str__(self) -> str:
        sizes = ", then ".join(str(len(part)) for part in self.parts)
        return f"out of memory in {self.doing} after step {self.step}: its {len(self.jobs)} lanes go on {sizes}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def survive(action: Callable[[], Result], shrink: Callable[[str], None], device: torch.device) -> Result:
    """`action()`, and again after `shrink(message)` as often as memory runs out. `shrink` raises if nothing is left."""
    while True:
        try:
            return action()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error).strip().split("\n")[0][:300] or type(error).__name__
        # Outside of the handler: the error's traceback holds the frames, and they hold the tensors.
        release(device)
        shrink(message)


def refuse_to_shrink(message: str) -> NoReturn:
    """For what can't be made smaller (loading, a checkpoint's copy)."""
    raise DeviceError(
        f"out of memory: {message}",
        "Lower device.lanes or lora.rank, set model.quantization: nf4, or free memory that other programs hold; "
        "what was finished is kept.",
    )


def smaller_plan(plan: Plan, doing: str, *, evaluating: bool, lanes: int | None = None) -> Plan:
    """The next smaller plan for what ran out. Raises DeviceError with the way out when there is none.

    `lanes`: of the wave, where it has fewer than the plan.
    """
    smaller = next_smaller(plan, evaluating=evaluating)
    if smaller is None:
        lanes = plan.lanes if lanes is None else lanes
        fix = (
            f"Go on with device.lanes: {lanes // 2}" if lanes > 1 else "Set data.max_tokens or model.quantization: nf4"
        )
        raise DeviceError(
            f"out of memory in {doing}, with nothing left to make smaller: {plan}",
            f"{fix}, or free memory that other programs hold; what was finished is kept.",
        )
    return smaller


def smaller_set_up(plan: Plan, doing: str) -> Plan:
    """The plan without copies of the base, all that a wave's setting up can do without. Raises DeviceError after it."""
    if plan.copies and (smaller := plan.thrifty()) is not None:
        return smaller
    raise DeviceError(
        f"out of memory in {doing}, of one lane: {plan}",
        "Lower lora.rank, choose fewer lora.targets, set model.quantization: nf4, or free memory that other programs "
        "hold; what was finished is kept.",
    )


def next_smaller(plan: Plan, *, evaluating: bool) -> Plan | None:
    """The next smaller plan for the same lanes, if there is one."""
    return plan.smaller_evaluation() if evaluating else plan.smaller()


def compare_peak(plan: Plan, device: torch.device) -> str:
    """A hint if the device's peak and the plan's differ by more than 5%; empty if not, and where it can't be told."""
    if device.type != "cuda" or plan.layout is not None:
        return ""  # of one device only is it known; a process's resident memory has its peak while the base is loaded
    machine = plan.job.machine
    then, now = machine.total_bytes - plan.free_bytes, outside_allocator(device) - machine.context_bytes
    used = used_bytes(device) - max(0, min(then, now))  # without what other programs held all along
    miss = used / plan.peak_bytes - 1
    if abs(miss) <= PEAK_SHARE:
        return ""
    less = "passes were smaller than the largest that could come"
    why = less if miss < 0 else "other programs may have taken more of the device since"
    held = f"this run held {bytes_words(used)} at most; the plan said {bytes_words(plan.peak_bytes)}"
    return f"{held} ({miss:+.0%}: {why})"


class LeakWatch:
    """Bytes alive after each wave. Growth from wave to wave is told once, with the tensors that grew."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.after: list[int] = []
        self._first: Any = None
        self._told = False

    def wave_ended(self) -> None:
        """Look after a wave."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:  # walking all objects takes half a second: only where more is held than after the wave before
            held = live_bytes(self.device)
            if not self.after or held <= self.after[-1] + LEAK_BYTES:
                self.after.append(held)
                return
        release(self.device)
        alive = live_tensors(self.device.type)
        self.after.append(live_bytes(self.device) if on_gpu else sum(alive.values()))
        if self._first is None:
            self._first = alive
        elif not self._told and len(self.after) > 2 and self._grows():
            grown = {key: size - self._first[key] for key, size in alive.items() if size > self._first[key]}
            most = sorted(grown.items(), key=lambda item: -item[1])[:3]
            words = ", ".join(f"{list(shape)} {kind} (+{bytes_words(size)})" for (shape, kind), size in most)
            self.say(
                f"warning: memory-leak: {bytes_words(self.after[-1] - self.after[0])} more are held after wave "
                f"{len(self.after)} than after the first: {words}"
            )
            self._told = True

    def _grows(self) -> bool:
        last: Sequence[int] = self.after[-3:]
        return last[0] + LEAK_BYTES < last[1] and last[1] + LEAK_BYTES < last[2]
