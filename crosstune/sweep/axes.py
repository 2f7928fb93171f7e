"""One swept option: the values to try, or a range to draw from, as a recipe writes them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Axis:
    """One swept option: the values to try, or a range to draw from."""

    name: str
    values: tuple[Any, ...] = ()
    low: float = math.nan
    high: float = math.nan
    log: bool = False
    whole: bool = False

    @property
    def is_range(self) -> bool:
        return not self.values

    @property
    def examples(self) -> tuple[Any, ...]:
        """Values that stand for all when the axis is checked."""
        return self.values or (self.cast(self.low), self.cast(self.high))

    def cast(self, value: float) -> Any:
        return round(value) if self.whole else float(value)

    def draw(self, rng: np.random.Generator) -> Any:
        if self.values:
            return self.values[int(rng.integers(len(self.values)))]
        # A whole number k is the rounding of [k - ½, k + ½): both ends are as likely as the law says (Optuna's, too).
        half = 0.5 if self.whole else 0.0
        low, high = self.low - half, self.high + half
        value = float(np.exp(rng.uniform(math.log(low), math.log(high)))) if self.log else rng.uniform(low, high)
        return min(max(self.cast(value), self.low), self.high)


def read_axis(name: str, value: Any, *, whole: bool) -> Axis | str:
    """The axis that a recipe's `value` means, or what is wrong with it."""
    if isinstance(value, list | tuple) and value:
        return Axis(name, values=tuple(value))
    if isinstance(value, Mapping) and len(value) == 1:
        word, inner = next(iter(value.items()))
        if word == "choice" and isinstance(inner, list | tuple) and inner:
            return Axis(name, values=tuple(inner))
        if word in ("log", "uniform"):
            return _read_range(name, word, inner, whole=whole)
        near = difflib.get_close_matches(str(word), ["log", "uniform", "choice"], n=1) or ["log, uniform or choice"]
        return f"sweep.{name}: unknown distribution {word!r}; did you mean {near[0]}?"
    return (
        f"sweep.{name}: a list of values or one of {{log: [a, b]}}, {{uniform: [a, b]}}, {{choice: […]}} is expected "
        f"(got {value!r})"
    )


def _read_range(name: str, word: str, inner: Any, *, whole: bool) -> Axis | str:
    numbers = isinstance(inner, list | tuple) and len(inner) == 2
    if not numbers or any(isinstance(end, bool) or not isinstance(end, int | float) for end in inner):
        return f"sweep.{name}: {word} takes two numbers, [low, high] (got {inner!r})"
    low, high = inner
    if not low < high:
        return f"sweep.{name}: low must be below high (got {inner!r})"
    if whole and not (float(low).is_integer() and float(high).is_integer()):
        return f"sweep.{name}: a whole number is drawn, so both ends must be whole (got {inner!r})"
    if word == "log" and low <= 0:
        return f"sweep.{name}: a log range starts above 0 (got {inner!r})"
    if whole:
        low, high = int(low), int(high)
    return Axis(name, low=low, high=high, log=word == "log", whole=whole)
