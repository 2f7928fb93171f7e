"""Where a cross-validation's time goes, read off what it tells a progress display."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from typing import Any


class StageClock:
    """A progress display that notes when stages begin and end and when a training step is over.

    A step's report comes after its losses were read back, so the device is done with it.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: Counter[str] = Counter()  # by stage, outermost or evaluation
        self.waves: list[list[float]] = []  # seconds of each step, by wave
        self.said: list[str] = []
        self._open: list[tuple[str, float]] = []
        self._mark = self.began

    def start(self, stage: str, total: int | None = None) -> None:
        self._open.append((stage, time.monotonic()))
        if stage == "train":
            self.waves.append([])
            self._mark = time.monotonic()

    def advance(self, n: int = 1, **facts: Any) -> None:
        if "losses" in facts:
            self.waves[-1].append(time.monotonic() - self._mark)
            self._mark = time.monotonic()

    def say(self, text: str) -> None:
        self.said.append(text)

    def stop(self) -> None:
        stage, began = self._open.pop()
        self._mark = time.monotonic()
        name = f"{self._open[-1][0]}: {stage}" if self._open else stage
        self.seconds[name] += self._mark - began

    def loading(self) -> float:
        """Seconds in which the base was loaded, inside whatever stage."""
        return sum(seconds for name, seconds in self.seconds.items() if name.rpartition(": ")[2] == "load")

    def aside(self) -> list[float]:
        """By wave, what its first step took beyond the median one: kernels compiled or loaded, graphs recorded."""
        return [max(0.0, steps[0] - statistics.median(steps)) if steps else 0.0 for steps in self.waves]

    def split(self) -> dict[str, Any]:
        """Seconds by stage, and of the newest wave's steps the first and the median."""
        steps = self.waves[-1] or [0.0]
        inside = sum(seconds for name, seconds in self.seconds.items() if ": " not in name)
        return {
            **self.seconds,
            "outside stages": time.monotonic() - self.began - inside,
            "first step": steps[0],
            "median step": statistics.median(steps),
        }
