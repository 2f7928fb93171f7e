"""Workers that die or raise on purpose, for the tests of Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from crosstune.train.lane import Lane
from crosstune.workers.worker import Worker


class DyingWorker(Worker):
    """Is killed whenever it trains fold 1."""

    def train(self, order: Any, tokens: Any) -> Iterator[Any]:
        for item in super().train(order, tokens):
            if any(job.fold == 1 for job in order.jobs):
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


class BlindWorker(Worker):
    """Sees no file of the driver's machine."""

    def sees(self, path: str) -> bool:
        return False


class RaisingWorker(Worker):
    """Raises whenever it trains fold 1."""

    def train(self, order: Any, tokens: Any) -> Iterator[Any]:
        for item in super().train(order, tokens):
            if any(job.fold == 1 for job in order.jobs):
                raise RuntimeError("poisoned")
            yield item


class LosingWorker(Worker):
    """Can't find the rows of fold 1's second step."""

    def train(self, order: Any, tokens: Any) -> Iterator[Any]:
        real = Lane.next_units

        def next_units(lane: Lane, *ahead: int) -> Any:
            if lane.job.fold == 1 and lane.step == 1 and lane.is_fed:
                raise IndexError("no such row")
            return real(lane, *ahead)

        Lane.next_units = next_units  # type: ignore[method-assign]
        try:
            yield from super().train(order, tokens)
        finally:
            Lane.next_units = real  # type: ignore[method-assign]
