"""Mean scores with intervals that respect what the scores share: training rows among folds, groups among rows.

Plain numbers in; this module doesn't know what a score measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as distributions


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval. `std` is the spread of the `n` scores, not of their mean.

    Without a spread there is no interval: of one score `std`, `low` and `high` are nan, of equal ones `low` and `high`.
    """

    mean: float
    std: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            scores = "1 score" if self.n == 1 else f"{self.n} equal scores" if self.n else "0 scores"
            return f"{self.mean:.4g} (no interval from {scores})"
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def fold_interval(
    scores: ArrayLike,
    *,
    test_share: float,
    confidence: float = 0.95,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """The mean score over folds, with Nadeau and Bengio's corrected resampled t interval.

    Training sets of different folds share rows, so fold scores are not independent and the usual standard error s/√n
    is too small. The correction replaces 1/n by 1/n + n_test/n_train (Nadeau & Bengio, Machine Learning 52, 2003,
    eq. 9): `test_share` is n_test / (n_test + n_train), which is 1/K for K folds.
    Equal scores (five folds with nothing wrong) tell nothing of how far others may lie: no interval. `limits`: what a
    score can be; an interval ends there, and covers as much as one that doesn't.
    """
    values = _finite(scores)
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    if n < 2:
        return Interval(mean, math.nan, math.nan, math.nan, n)
    std = float(values.std(ddof=1))
    if is_flat(values, size=float(np.abs(values).max())):
        return Interval(mean, std, math.nan, math.nan, n)
    half = float(distributions.t.ppf(0.5 + confidence / 2, n - 1)) * std * math.sqrt(overlap_factor(n, test_share))
    return Interval(mean, std, max(mean - half, limits[0]), min(mean + half, limits[1]), n)


def is_flat(values: NDArray[np.float64], *, size: float) -> bool:
    """The values are equal but for rounding. `size`: of the numbers that they come from."""
    return float(np.ptp(values)) <= 1e-9 * size


def overlap_factor(n: int, test_share: float) -> float:
    """What the variance of one score is multiplied by to get the variance of a mean of `n`: 1/n + n_test/n_train."""
    assert n >= 1 and 0 < test_share < 1, (n, test_share)
    return 1 / n + test_share / (1 - test_share)


def _finite(scores: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64).ravel()
    assert np.isfinite(values).all(), f"scores must be finite; leave failed folds out first: {values}"
    return values


def held_out_share(sizes: Sequence[tuple[int, int]]) -> float:
    """The held-out share over folds given as (train rows, held-out rows): the mean, as sizes differ by a row or so."""
    return float(np.mean([held_out / (train + held_out) for train, held_out in sizes]))
