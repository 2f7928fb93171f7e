"""Workers that die or raise on purpose, for the tests of Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

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
