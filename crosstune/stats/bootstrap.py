"""Intervals for pooled metrics: rows (or whole groups of rows) drawn again with replacement.

BCa intervals (Efron, JASA 82, 1987) at a level widened for small samples (Hesterberg, The American Statistician 69,
2015, section 3.3). Every out-of-fold row counts once, with the score that the lane which never saw it gave.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as distributions

from crosstune.stats.intervals import Interval

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
# Resamples drawn at a time: 64 MB of weights at 1,000 units.
CHUNK = 8_000_000


def ratio_interval(
    sums: ArrayLike,
    counts: ArrayLike | None = None,
    *,
    groups: ArrayLike | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Σ sums / Σ counts over rows: a token-mean loss (a row's loss sum, its tokens), or a mean (counts left out).

    `groups`: rows with equal values are drawn together.
    """
    top = np.asarray(sums, dtype=np.float64)
    bottom = np.ones_like(top) if counts is None else np.asarray(counts, dtype=np.float64)
    if groups is not None:
        unit = np.unique(np.asarray(groups), return_inverse=True)[1].ravel()
        top = np.bincount(unit, weights=top).astype(np.float64)
        bottom = np.bincount(unit, weights=bottom).astype(np.float64)
    n = len(top)
    mean = float(top.sum() / bottom.sum()) if n and bottom.sum() else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, math.nan, n)
    left_out = (top.sum() - top) / (bottom.sum() - bottom)
    rng = np.random.default_rng(seed)
    drawn = []
    for size in _chunks(resamples, n):
        picks = rng.integers(n, size=(size, n))
        drawn.append(top[picks].sum(axis=1) / bottom[picks].sum(axis=1))
    low, high = _bca(mean, np.concatenate(drawn), left_out, n, confidence)
    spread = float(np.std(top / np.maximum(bottom, 1e-300), ddof=1))
    return Interval(mean, spread, low, high, n)


def statistic_interval(
    statistic: Callable[[Indices], float],
    n: int,
    *,
    groups: ArrayLike | None = None,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Any metric of `n` rows, given as a function of the row positions to count (an F1 score, an area under a curve).

    A resample for which the metric isn't defined (a single class drawn, say) gives nan and is left out.
    `std` is the bootstrap's standard error here: a metric of all rows has no value for one row.
    """
    members = [np.array([row]) for row in range(n)]
    if groups is not None:
        unit = np.unique(np.asarray(groups), return_inverse=True)[1].ravel()
        members = np.split(np.argsort(unit, kind="stable"), np.cumsum(np.bincount(unit))[:-1])
    units = len(members)
    value = float(statistic(np.arange(n))) if n else math.nan
    if units < 2:
        return Interval(value, math.nan, math.nan, math.nan, units)
    rng = np.random.default_rng(seed)
    drawn = np.array(
        [statistic(np.concatenate([members[u] for u in rng.integers(units, size=units)])) for _ in range(resamples)]
    )
    # The jackknife's acceleration needs one evaluation a unit; 200 units drawn at random estimate it well enough.
    some = np.arange(units) if units <= 200 else rng.choice(units, 200, replace=False)
    left_out = np.array([statistic(np.concatenate([members[v] for v in range(units) if v != u])) for u in some])
    drawn, left_out = drawn[np.isfinite(drawn)], left_out[np.isfinite(left_out)]
    if len(drawn) < resamples / 2 or len(left_out) < 2:
        return Interval(value, math.nan, math.nan, math.nan, units)
    low, high = _bca(value, drawn, left_out, units, confidence)
    return Interval(value, float(drawn.std(ddof=1)), low, high, units)


def _chunks(resamples: int, n: int) -> list[int]:
    size = max(1, min(resamples, CHUNK // n))
    return [min(size, resamples - start) for start in range(0, resamples, size)]


def _bca(value: float, drawn: Floats, left_out: Floats, n: int, confidence: float) -> tuple[float, float]:
    """Bias-corrected and accelerated limits. `left_out`: the statistic without each of the `n` units, or of some."""
    if np.ptp(drawn) == 0:  # rows that are all right, say: drawing them again shows nothing of those that aren't there
        return math.nan, math.nan
    below = (np.mean(drawn < value) + np.mean(drawn <= value)) / 2
    bias = distributions.norm.ppf(min(max(below, 0.5 / len(drawn)), 1 - 0.5 / len(drawn)))
    pull = left_out.mean() - left_out
    # The acceleration falls as 1/√n: sums over some units alone are made those over all.
    scale = 6 * float((pull**2).mean()) ** 1.5 * math.sqrt(n)
    acceleration = float((pull**3).mean()) / scale if scale else 0.0
    # The plug-in variance of a bootstrap mean is (n-1)/n of the unbiased one, and z is used for t: widen for both.
    z = float(distributions.t.ppf(0.5 + confidence / 2, n - 1)) * math.sqrt(n / (n - 1))
    limits = []
    for end in (-z, z):
        shifted = bias + end
        limits.append(float(distributions.norm.cdf(bias + shifted / (1 - acceleration * shifted))))
    low, high = np.quantile(drawn, limits)
    return float(low), float(high)
