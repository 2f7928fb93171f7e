"""Metrics of a choice among labels, from the probability that the model gives to each. scikit-learn computes them.

`labels`: (rows,) the right label's position. `chances`: (rows, labels) probabilities; each row adds up to 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn import metrics as sk
from sklearn.exceptions import UndefinedMetricWarning

Labels = NDArray[np.intp]
Chances = NDArray[np.float64]


def picked(chances: Chances) -> Labels:
    """The label with the highest probability; the first of equal ones."""
    return chances.argmax(axis=1)


@contextmanager
def _some_labels_missing() -> Iterator[None]:
    """Few rows, or rows drawn again, may hold or pick some labels only: nothing to warn of each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
        warnings.filterwarnings("ignore", message="A single label was found")
        yield


def accuracy(labels: Labels, chances: Chances) -> float:
    """Share of rows whose most probable label is the right one."""
    return float(sk.accuracy_score(labels, picked(chances)))


def right_by_row(labels: Labels, chances: Chances) -> NDArray[np.float64]:
    """1 where the right label was picked, else 0: accuracy is their mean."""
    return (picked(chances) == labels).astype(np.float64)


def balanced_accuracy(labels: Labels, chances: Chances) -> float:
    """Mean over labels of the share found: every label weighs the same, however rare."""
    with _some_labels_missing():
        return float(sk.balanced_accuracy_score(labels, picked(chances)))


def macro_f1(labels: Labels, chances: Chances) -> float:
    """Mean of the labels' F1 scores, over labels that occur or were picked."""
    return float(sk.f1_score(labels, picked(chances), average="macro", zero_division=0))


def micro_f1(labels: Labels, chances: Chances) -> float:
    """F1 of all rows together; equals accuracy where each row has one label."""
    return float(sk.f1_score(labels, picked(chances), average="micro", zero_division=0))


def mcc(labels: Labels, chances: Chances) -> float:
    """Matthews' correlation coefficient: −1 to 1, 0 for guessing."""
    with _some_labels_missing():
        return float(sk.matthews_corrcoef(labels, picked(chances)))


def log_loss(labels: Labels, chances: Chances) -> float:
    """Mean −log of the probability given to the right label."""
    return float(sk.log_loss(labels, chances, labels=np.arange(chances.shape[1])))


def log_loss_by_row(labels: Labels, chances: Chances) -> NDArray[np.float64]:
    """Each row's −log of the probability given to the right label, which scikit-learn takes to be at least 2.2e-16."""
    least = np.finfo(chances.dtype).eps
    return -np.log(np.clip(chances[np.arange(len(labels)), labels], least, 1 - least))


def roc_auc(labels: Labels, chances: Chances) -> float:
    """Area under the ROC curve; more than two labels: the mean over each label against the rest.

    A label that no row (or every row) has is left out; nan if none is left.
    """
    columns = [1] if chances.shape[1] == 2 else range(chances.shape[1])
    areas = []
    for column in columns:
        is_it = labels == column
        if 0 < is_it.sum() < len(labels):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UndefinedMetricWarning)
                areas.append(float(sk.roc_auc_score(is_it, chances[:, column])))
    return float(np.mean(areas)) if areas else math.nan


def brier(labels: Labels, chances: Chances) -> float:
    """Mean squared distance of the probabilities from the truth: 0 to 1 for two labels, 0 to 2 for more.

    scikit-learn's convention. Its own function takes more than two labels from version 1.7 only, hence this line.
    """
    return float(brier_by_row(labels, chances).mean())


def brier_by_row(labels: Labels, chances: Chances) -> NDArray[np.float64]:
    """Each row's own."""
    squares: NDArray[np.float64] = (chances - np.eye(chances.shape[1])[labels]) ** 2
    return squares.sum(axis=1) / (2 if chances.shape[1] == 2 else 1)


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Rows whose top probability lies in (low, high]: how sure the model was, and how often it was right."""

    low: float
    high: float
    rows: int
    confidence: float
    accuracy: float


def calibration(labels: Labels, chances: Chances, *, bins: int = 10) -> tuple[CalibrationBin, ...]:
    """The reliability curve in bins of equal width (Guo et al., arXiv:1706.04599, eq. 1–2); empty bins are left out."""
    sure, right = chances.max(axis=1), picked(chances) == labels
    place = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    curve = []
    for index in range(bins):
        inside = place == index
        if inside.any():
            confidence, found = float(sure[inside].mean()), float(right[inside].mean())
            curve.append(CalibrationBin(index / bins, (index + 1) / bins, int(inside.sum()), confidence, found))
    return tuple(curve)


def ece(labels: Labels, chances: Chances) -> float:
    """Expected calibration error: mean gap between confidence and accuracy over ten bins (arXiv:1706.04599, eq. 3)."""
    return sum(part.rows * abs(part.accuracy - part.confidence) for part in calibration(labels, chances)) / len(labels)


def confusion(labels: Labels, chances: Chances) -> NDArray[np.int64]:
    """(right label, picked label) → number of rows."""
    return np.asarray(sk.confusion_matrix(labels, picked(chances), labels=np.arange(chances.shape[1])), dtype=np.int64)
