"""Threads that write what lanes leave behind: work is begun for a lane, and waited for by its kind and lane.

Knows nothing of what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from crosstune.store.state import Lane

THREADS = 16  # adapters written while their lanes are scored, and folders made, at a time


class Writers:
    """`with Writers() as writers:`; however the block ends, no thread writes any more."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="crosstune-writer")
        self._under_way: dict[tuple[str, Lane], Future[Any]] = {}

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def begin(self, kind: str, lane: Lane, work: Callable[[], Any]) -> None:
        """Have `work` done for the lane, unless work of this kind is under way for it."""
        if (kind, lane) not in self._under_way:
            self._under_way[kind, lane] = self._threads.submit(work)

    def take(self, kind: str, lane: Lane) -> Future[Any] | None:
        """What was begun, if anything was: whoever takes it waits for it."""
        return self._under_way.pop((kind, lane), None)

    def result(self, kind: str, lane: Lane) -> Any:
        """What came of work that was begun; raises what it raised."""
        return self._under_way.pop((kind, lane)).result()

    def drop(self, lane: Lane) -> None:
        """Wait for all that was begun for a lane, whatever comes of it."""
        wait([self._under_way.pop(key) for key in list(self._under_way) if key[1] == lane])
