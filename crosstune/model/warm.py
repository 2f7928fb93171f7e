"""The kernels of a training, compiled and loaded by threads of their own while its base is loaded or its plan is made.

At their first use Triton's would be compiled one after another, inside the first passes: 5 to 7 s on an H200's host,
more on smaller ones. ptxas, gcc and MLIR's passes let go of Python's lock, so threads overlap. Nothing is kept but what
Triton keeps, and a kernel that doesn't compile says so where it is used, never here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress

import torch

from crosstune.model.block import FUSED_ON, kind_of
from crosstune.model.elementwise import runs_triton
from crosstune.model.launches import Launch, Launches

MOST_THREADS = 8  # what Python itself has to do for a kernel, one thread does at a time


def warm_up(launches: Launches) -> WarmUp | None:
    """Begin. None where passes launch none of these kernels: without a GPU, Triton, or fused blocks."""
    kind = kind_of(launches.device, launches.dtype)
    fused = launches.shape.fusable and FUSED_ON[kind] and runs_triton(torch.empty(0, device=launches.device))
    try:
        return WarmUp(launches) if fused else None
    except RuntimeError:  # no thread can be started
        return None


class WarmUp:
    """Kernels on their way. What scoring needs comes first, so that a base can be scored while the rest is compiled.

    No two threads are at one kernel, or at Triton's driver, which it compiles before any: its tables have no locks. A
    launch makes all variants of its kernel; the head's are apart, one for scoring and one for training.
    """

    def __init__(self, launches: Launches) -> None:
        self._device, self._is_over = launches.device, False
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="kernels")
        try:
            first, *others = self._submit(launches.of_libraries(), [])
            self._driver = self._pool.submit(_make_driver)
            self._scoring = [first, *self._submit(launches.of_scoring(), [self._driver])]
            self._training = [*others, *self._submit(launches.of_training(), self._scoring)]
        except RuntimeError:  # not every thread can be started: nobody would wait for those that were
            self.end()
            self._pool.shutdown()
            raise
        self._pool.shutdown(wait=False)  # the threads end with the work

    def _submit(self, launches: Sequence[Launch], after: Sequence[Future[None]]) -> list[Future[None]]:
        # Threads take work in order: what is waited for has a thread already
        return [self._pool.submit(self._launch, launch, after) for launch in launches]

    def _launch(self, launch: Launch, after: Sequence[Future[None]]) -> None:
        _finish(after)
        # A new thread begins on the first device. An error that is kept keeps the tensors it met.
        with suppress(Exception), _on(self._device):
            if not self._is_over:
                launch()

    def until_scoring(self) -> None:
        """Wait for what passes without autograd need."""
        _finish(self._scoring)

    def until_training(self) -> None:
        """Wait for everything: from here on nobody else allocates or launches on the device."""
        _finish(self._training)

    def end(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self._is_over = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def _finish(every: Sequence[Future[None]]) -> None:
    for each in every:
        with suppress(CancelledError):
            each.result()


def _make_driver() -> None:
    with suppress(Exception):
        from triton.runtime import driver

        driver.active.get_current_target()


def _on(device: torch.device) -> torch.cuda.device | nullcontext[None]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
