"""Curves over training rows ("would more data help?") and over epochs ("which one to keep?").

The scores of one fold lie beside each other in a row; what a fold has in common cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as distributions

from crosstune.stats.intervals import overlap_factor

Floats = NDArray[np.float64]
# Exponents of learning curves in the literature lie between about 0.05 and 1 (Viering & Loog, TPAMI 45, 2023, table 1).
EXPONENTS = np.geomspace(0.05, 1.5, 60)


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """score(n) = level + slope · n^−exponent, and what twice the rows would change.

    `gain` is the expected change of the score from the largest share to twice as many rows (negative: it falls), with
    its interval over all exponents that fit. `helps`: probability that the score improves by more than `rope`.
    """

    rows: tuple[float, ...]
    means: tuple[float, ...]
    level: float
    slope: float
    exponent: float
    gain: float
    low: float
    high: float
    rope: float
    helps: float

    def at(self, rows: float) -> float:
        """The fitted score with that many training rows."""
        return self.level + self.slope * rows**-self.exponent


def fit_learning_curve(
    rows: ArrayLike,
    scores: ArrayLike,
    *,
    test_share: float,
    rope: float = 0.0,
    higher_is_better: bool = False,
    confidence: float = 0.95,
) -> LearningCurve:
    """Fit a power law (Hestness et al., arXiv:1712.00409) to `scores` of shape (folds, sizes) at `rows` (sizes,).

    For a given exponent the law is linear, with a fold's own level and one common slope; flat priors on both and
    Jeffreys' on the variance give the gain a Student distribution, and the exponent a weight (the marginal likelihood).
    The answer is the mixture over EXPONENTS, so a curve of three points gives a wide interval, not a confident line.
    Folds share training rows: the variance is multiplied by n (1/n + n_test/n_train), as in `fold_interval`.
    """
    x = np.asarray(rows, dtype=np.float64)
    y = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    folds, sizes = y.shape
    assert sizes == len(x) >= 3, f"a learning curve needs three sizes or more: {sizes}"
    centred = y - y.mean(axis=1, keepdims=True)
    freedom = folds * (sizes - 1) - 1
    inflation = folds * overlap_factor(folds, test_share) if folds > 1 else 1.0
    gains, scales, weights = np.empty((3, len(EXPONENTS)))
    top = x.max()
    for i, exponent in enumerate(EXPONENTS):
        # Scaled so that the slope *is* the change from `top` to 2 · top: the flat prior lies on what is asked.
        z = x**-exponent / ((2 * top) ** -exponent - top**-exponent)
        z = z - z.mean()
        power = folds * float(z @ z)
        gains[i] = float((centred @ z).sum()) / power
        residual = max(float(((centred - gains[i] * z) ** 2).sum()), 1e-30)
        scales[i] = math.sqrt(inflation * residual / freedom / power)
        # The same inflation tempers the weight: overlapping folds hold less evidence on the exponent than they seem to.
        weights[i] = -0.5 * math.log(power) - 0.5 * freedom * math.log(residual) / inflation
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    low, gain, high = (
        _mixture_quantile(q, gains, scales, weights, freedom) for q in ((1 - confidence) / 2, 0.5, (1 + confidence) / 2)
    )
    improved = -rope if not higher_is_better else rope
    below = float(weights @ distributions.t.cdf((improved - gains) / scales, freedom))
    best = int(weights.argmax())
    exponent = float(EXPONENTS[best])
    slope = float(gains[best]) / float((2 * top) ** -exponent - top**-exponent)
    level = float(y.mean()) - slope * float((x**-exponent).mean())
    return LearningCurve(
        tuple(x.tolist()), tuple(y.mean(axis=0).tolist()), level, slope, exponent,
        gain, low, high, rope, 1 - below if higher_is_better else below,
    )  # fmt: skip


def _mixture_quantile(q: float, centres: Floats, scales: Floats, weights: Floats, freedom: int) -> float:
    """Bisection on the distribution function of a mixture of Student distributions."""
    far = float(distributions.t.ppf(1 - 1e-6, freedom))
    low, high = float((centres - far * scales).min()), float((centres + far * scales).max())
    for _ in range(100):
        middle = (low + high) / 2
        if float(weights @ distributions.t.cdf((middle - centres) / scales, freedom)) < q:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class EpochChoice:
    """The epoch (counted from 1) with the best mean score, and the epochs about it that can't be told from it."""

    best: int
    first: int
    last: int
    means: tuple[float, ...]

    def __str__(self) -> str:
        alike = "" if self.first == self.last else f" (epochs {self.first} to {self.last} can't be told from it)"
        more = "; it is the last one trained, so more may be better" if self.best == len(self.means) else ""
        return f"epoch {self.best}{alike}{more}"


def choose_epoch(
    scores: ArrayLike, *, test_share: float, rope: float = 0.0, higher_is_better: bool = False, confidence: float = 0.95
) -> EpochChoice:
    """The best epoch of held-out `scores`, shape (folds, epochs), with its plateau.

    An epoch belongs to the plateau if its paired difference from the best, fold by fold, is within `rope` or its
    corrected interval reaches 0, and so for every epoch between them. The best mean is itself chosen on held-out rows:
    its score is optimistic: no estimate. `crosstune fit` ends the schedule there; a smaller train.epochs has another.
    """
    y = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    folds, epochs = y.shape
    loss = -y if higher_is_better else y
    means = loss.mean(axis=0)
    best = int(means.argmin())
    excess = loss - loss[:, [best]]
    if folds < 2:
        near = means - means[best] <= rope
    else:
        half = excess.std(axis=0, ddof=1) * math.sqrt(overlap_factor(folds, test_share))
        half *= float(distributions.t.ppf(0.5 + confidence / 2, folds - 1))
        near = (excess.mean(axis=0) <= rope) | (excess.mean(axis=0) - half <= 0)
    first = last = best
    while first > 0 and near[first - 1]:
        first -= 1
    while last < epochs - 1 and near[last + 1]:
        last += 1
    return EpochChoice(best + 1, first + 1, last + 1, tuple(y.mean(axis=0).tolist()))
