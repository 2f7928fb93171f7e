"""Two trials on the same folds: is one better, are they as good as equal, or can't one tell?

Differences are taken fold by fold, so what a fold's rows have in common cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as distributions

from crosstune.stats.intervals import Interval, fold_interval, is_flat, overlap_factor


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first trial against the second. `difference` is first − second, in units of the metric.

    `p`: two-sided corrected resampled t-test. `better`, `equivalent`, `worse`: posterior probabilities of the Bayesian
    correlated t-test that the first is better by more than `rope`, within it, or worse by more. All nan where the
    difference is the same on every fold: that of a metric which counts rows easily is by chance, and no test can tell.
    """

    difference: Interval
    t: float
    p: float
    rope: float
    better: float
    equivalent: float
    worse: float


def compare_folds(
    first: ArrayLike,
    second: ArrayLike,
    *,
    test_share: float,
    rope: float = 0.0,
    higher_is_better: bool = False,
    confidence: float = 0.95,
) -> Comparison:
    """Compare two trials by their scores on the same folds, in the same order.

    Corrected resampled t-test: t = mean(d) / (s √(1/n + n_test/n_train)), n − 1 degrees of freedom
    (Nadeau & Bengio, Machine Learning 52, 2003). Bayesian correlated t-test: the posterior of the mean difference is a
    Student distribution with that location, scale and degrees of freedom, ρ = n_test / n
    (Corani & Benavoli, Machine Learning 100, 2015; Benavoli et al., JMLR 18(77), 2017, eq. 8).
    """
    one, two = np.asarray(first, dtype=np.float64).ravel(), np.asarray(second, dtype=np.float64).ravel()
    assert len(one) == len(two), f"the trials must share their folds: {len(one)} and {len(two)} scores"
    difference = fold_interval(one - two, test_share=test_share, confidence=confidence)
    size = float(np.abs([one, two]).max()) if len(one) else 0.0
    if difference.n < 2 or is_flat(one - two, size=size):
        return Comparison(difference, math.nan, math.nan, rope, math.nan, math.nan, math.nan)
    scale = difference.std * math.sqrt(overlap_factor(difference.n, test_share))
    above, below = _tails(difference.mean, scale, difference.n - 1, rope)
    better, worse = (above, below) if higher_is_better else (below, above)
    t = difference.mean / scale
    p = 2 * float(distributions.t.sf(abs(t), difference.n - 1))
    return Comparison(difference, t, p, rope, better, max(0.0, 1 - better - worse), worse)


def _tails(mean: float, scale: float, freedom: int, rope: float) -> tuple[float, float]:
    """P(difference > rope), P(difference < −rope)."""
    above = float(distributions.t.sf((rope - mean) / scale, freedom))
    below = float(distributions.t.cdf((-rope - mean) / scale, freedom))
    return above, below


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """p values made fit for many comparisons at once (Holm, Scandinavian Journal of Statistics 6, 1979). nan stays."""
    p = np.asarray(p_values, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(p))
    adjusted = p.copy()
    running = 0.0
    for rank, position in enumerate(known[np.argsort(p[known], kind="stable")]):
        running = max(running, min(1.0, float(p[position]) * (len(known) - rank)))
        adjusted[position] = running
    return [float(value) for value in adjusted]


def rank_probabilities(
    scores: ArrayLike, *, test_share: float, higher_is_better: bool = False, draws: int = 20_000, seed: int = 0
) -> tuple[list[float], list[float]]:
    """For `scores` of shape (folds, trials): each trial's probability of being the best, and of being the last.

    Draws from the posterior of all means at once. Any two trials' difference has exactly the distribution that
    `compare_folds` gives it: a multivariate Student with the folds' covariance × (1/n + n_test/n_train). Ties share;
    all nan where two trials differ by the same on every fold, which no test can judge.
    """
    y = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    folds, trials = y.shape
    if folds < 2:
        return [math.nan] * trials, [math.nan] * trials
    # Trials that are equal on every fold differ by rounding only, which must not decide.
    near = 1e-9 * max(1.0, float(np.abs(y).max()))
    differences_FTT = y[:, :, None] - y[:, None, :]
    same = np.ptp(differences_FTT, axis=0) <= near
    if (same & (np.abs(differences_FTT.mean(axis=0)) > near)).any():
        return [math.nan] * trials, [math.nan] * trials
    centred = (y - y.mean(axis=0)) / math.sqrt(folds - 1)
    rng = np.random.default_rng(seed)
    width = np.sqrt(overlap_factor(folds, test_share) * (folds - 1) / rng.chisquare(folds - 1, size=(draws, 1)))
    means = y.mean(axis=0) + width * (rng.standard_normal((draws, folds)) @ centred)
    if not higher_is_better:
        means = -means
    shares = []
    for side in (means, -means):
        top = side >= side.max(axis=1, keepdims=True) - near
        shares.append([float(share) for share in (top / top.sum(axis=1, keepdims=True)).mean(axis=0)])
    return shares[0], shares[1]
