"""Ctrl-C and SIGTERM: while lanes train, the step is finished and kept before the run ends; elsewhere it ends at once.

Spot nodes, Slurm and Kubernetes send SIGTERM and wait some 30 seconds. A second signal waits for nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to end. `exit_code` as shells count: 130 for SIGINT, 143 for SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.exit_code = 128 + number


class Interrupts:
    """The signals of this process while a run is under way. `asked` is the number of the one that came, or 0."""

    def __init__(self) -> None:
        self.asked = 0
        self._patient = False

    @contextmanager
    def caught(self) -> Iterator[Interrupts]:
        """Take SIGINT and SIGTERM while the block runs. No effect outside the main thread, where Python can't."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._take) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def waiting_for_a_step(self) -> Iterator[None]:
        """A signal inside the block only sets `asked`: whoever runs steps looks at it and calls `stop`."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
        if self.asked:
            self.stop()

    def stop(self) -> None:
        """Raise for the signal that came."""
        raise Interrupted(self.asked)

    def _take(self, number: int, frame: FrameType | None) -> Any:
        second, self.asked = self.asked, number
        if second or not self._patient:
            raise Interrupted(number)
