"""A value that is made once, by whichever thread asks first; the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Once(Generic[Value]):
    """Call it for the value."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: list[Value] = []

    def __call__(self) -> Value:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]
