"""Numbers → places on a chart with axes, for the report's template to draw. Knows neither runs nor HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 800, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 46  # margins: labels of the axes stand in them
MOST_POINTS = 400  # of a line: more can't be told apart, and make the page heavy


@dataclass(frozen=True)
class Axis:
    """A range of values laid along pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, most: int = 6, *, whole: bool = False) -> list[dict[str, Any]]:
        """Round values in the range, with their pixels."""
        step = round_step((self.high - self.low) / most)
        step = max(1.0, step) if whole else step
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [{"at": self.at(n * step), "label": f"{n * step:,.{digits}f}"} for n in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50, … (and 0.5, 0.2, …) that isn't below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def value_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis with a little air around the values."""
    low, high = min(values), max(values)
    air = (high - low) * 0.04 or max(abs(high) * 0.04, 1e-6)
    return Axis(low - air, high + air, start, end)


def loss_chart(
    training: Mapping[int, Sequence[float | None]],
    held_out: Mapping[int, Sequence[tuple[int, float | None]]],
    base: float | None,
) -> dict[str, Any] | None:
    """Training losses by fold and step (from 1), held-out losses as (step, loss), and the untuned base's as a level.

    None where there is nothing to draw.
    """
    lines = {fold: thinned(losses) for fold, losses in training.items()}
    marks = {fold: finite(seen) for fold, seen in held_out.items()}
    points = [point for line in [*lines.values(), *marks.values()] for point in line]
    if not points:
        return None
    level = [loss for _, loss in finite([(0, base)])]
    across = Axis(0, max(step for step, _ in points), LEFT, WIDTH - RIGHT)
    up = value_axis([loss for _, loss in points] + level, HEIGHT - BOTTOM, TOP)

    def places(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(across.at(step), up.at(loss)) for step, loss in line]

    return {
        "lines": [{"fold": fold, "places": places(line)} for fold, line in lines.items()],
        "held_out": [{"fold": fold, "places": places(line)} for fold, line in marks.items()],
        "base": up.at(level[0]) if level else None,
        "steps": across.ticks(8, whole=True),
        "losses": up.ticks(6),
        "frame": {"left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM},
        "width": WIDTH,
        "height": HEIGHT,
    }


def interval_bars(rows: Sequence[Mapping[str, Any]], metric: str, width: int = 180) -> list[dict[str, float] | None]:
    """Each row's mean and interval as pixels of one common axis; None for a row without a score."""
    values = [row[name] for row in rows for name in (metric, "low", "high") if known(row[name])]
    if not values:
        return [None] * len(rows)
    axis = value_axis(values, 0, width)
    return [_bar(axis, row[metric], row["low"], row["high"]) if known(row[metric]) else None for row in rows]


def _bar(axis: Axis, mean: float, low: float | None, high: float | None) -> dict[str, float]:
    ends = (mean, mean) if low is None or high is None else (low, high)
    return {"mean": axis.at(mean), "low": axis.at(ends[0]), "high": axis.at(ends[1])}


def thinned(losses: Sequence[float | None]) -> list[tuple[float, float]]:
    """(step, loss) of a line; of a long one the means of as many neighbours as it takes."""
    each = math.ceil(len(losses) / MOST_POINTS)
    points = []
    for start in range(0, len(losses), max(each, 1)):
        if part := finite(enumerate(losses[start : start + each], start + 1)):
            points.append((sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)))
    return points


def finite(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """The points that can be drawn."""
    return [(step, loss) for step, loss in points if loss is not None and math.isfinite(loss)]


def known(value: float | None) -> bool:
    """Whether there is a number to draw."""
    return value is not None and math.isfinite(value)
