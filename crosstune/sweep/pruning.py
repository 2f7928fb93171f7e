"""When a weak trial is given up: rules that see held-out scores only, and say why.

A rule is told a trial's score on rows that none of its lanes trained on, and names the trials to give up. Two of them
compare trials fold by fold, so a fold of every trial comes before the next fold of any (`fold_first`); Optuna's compare
a trial under way with finished ones, so the folds of a trial run side by side, evaluation by evaluation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from crosstune.errors import MissingExtra
from crosstune.stats import compare_folds
from crosstune.sweep.sweep import Sweep

if TYPE_CHECKING:
    import optuna


class Rule(Protocol):
    """Told of held-out scores, names the trials to give up. Deterministic: the same reports, the same answers."""

    fold_first: bool

    def report(self, trial: int, fold: int, evaluation: int, score: float, *, final: bool) -> None:
        """`score`: trial's lane `fold`, at its evaluation number `evaluation` (from 1). `final`: the lane is over."""

    def given_up(self) -> Mapping[int, str]:
        """Trial → reason, of all that are given up so far."""


class KeepAll:
    """No trial is given up."""

    fold_first = False

    def report(self, trial: int, fold: int, evaluation: int, score: float, *, final: bool) -> None:
        pass

    def given_up(self) -> Mapping[int, str]:
        return {}


@dataclass
class FoldByFold:
    """What `Halving` and `Race` share: final scores by trial and fold, decided when all living trials have a fold."""

    sweep: Sweep
    trials: int
    folds: int
    higher_is_better: bool = False
    test_share: float | None = None  # held-out share of the folds; K folds: 1/K
    fold_first: bool = True
    _scores: dict[int, dict[int, float]] = field(default_factory=dict)
    _over: dict[int, str] = field(default_factory=dict)
    _judged: int = 0

    def report(self, trial: int, fold: int, evaluation: int, score: float, *, final: bool) -> None:
        if not final or trial in self._over:
            return
        # A failed lane scores as the worst there is: a setting that blows up is no candidate.
        worst = -math.inf if self.higher_is_better else math.inf
        self._scores.setdefault(trial, {})[fold] = score if math.isfinite(score) else worst
        while self._judged < self.folds and self._reached(self._judged + 1):
            self._judged += 1
            if self.sweep.prune_after <= self._judged < self.folds:
                self._judge(self._judged)

    def given_up(self) -> Mapping[int, str]:
        return dict(self._over)

    @property
    def _living(self) -> list[int]:
        return [trial for trial in range(self.trials) if trial not in self._over]

    def _reached(self, folds: int) -> bool:
        return all(len(self._of(trial, folds)) == folds for trial in self._living)

    def _of(self, trial: int, folds: int) -> list[float]:
        """The trial's scores on the first folds; lower is better."""
        sign = -1.0 if self.higher_is_better else 1.0
        known = self._scores.get(trial, {})
        return [sign * known[fold] for fold in range(folds) if fold in known]

    def _judge(self, folds: int) -> None:
        raise NotImplementedError


class Halving(FoldByFold):
    """After 1, 2, 4, 8 … folds the worse half by mean goes (successive halving: Jamieson & Talwalkar, AISTATS 2016).

    The resource is the number of folds, and all trials meet on the same ones. Twelve trials of five folds take 26 lanes
    in place of 60. Who equals the last that stays, stays.
    """

    def _judge(self, folds: int) -> None:
        first = self.sweep.prune_after
        if folds % first or (folds // first) & (folds // first - 1):
            return
        means = {trial: float(np.mean(self._of(trial, folds))) for trial in self._living}
        limit = sorted(means.values())[math.ceil(len(means) / 2) - 1]
        for trial, mean in means.items():
            if math.isinf(mean):
                self._over[trial] = "a lane failed"
            elif mean > limit + 1e-12 * abs(
                limit
            ):  # a share of right rows ties easily, and its order would be by number
                self._over[trial] = f"in the worse half of {len(means)} trials after {_folds(folds)}"


class Race(FoldByFold):
    """A trial goes once it is worse than the leader with probability 0.95 (racing: Maron & Moore, NIPS 1993).

    The probability is that of the Bayesian correlated t-test on the folds both have, of being worse by more than the
    region of equivalence; one fold alone never decides.
    """

    def _judge(self, folds: int) -> None:
        table = {trial: self._of(trial, folds) for trial in self._living}
        leader = min(table, key=lambda trial: (float(np.mean(table[trial])), trial))
        rope = self.sweep.equivalent * abs(float(np.mean(table[leader])))
        for trial, scores in table.items():
            if not np.isfinite(scores).all():
                self._over[trial] = "a lane failed"
            elif trial != leader and folds > 1:
                share = self.test_share or 1 / self.folds
                worse = compare_folds(scores, table[leader], test_share=share, rope=rope).worse
                if worse > 0.95:
                    self._over[trial] = f"worse than trial {leader} with probability {worse:.3f} after {_folds(folds)}"


class OptunaRule:
    """Optuna's pruners, told the mean over a trial's folds at each evaluation (Wilcoxon's: each fold by itself)."""

    fold_first = False

    def __init__(self, study: optuna.Study, sweep: Sweep, folds: int) -> None:
        self.study, self.sweep, self.folds = study, sweep, folds
        self.trials: dict[int, optuna.Trial] = {}
        self._at: dict[tuple[int, int], dict[int, float]] = {}  # (trial, evaluation) → fold → score
        self._ends: dict[int, dict[int, float]] = {}
        self._over: dict[int, str] = {}

    def watch(self, trial: int, asked: optuna.Trial) -> None:
        """Tie a trial to the one that the study gave out."""
        self.trials[trial] = asked

    def report(self, trial: int, fold: int, evaluation: int, score: float, *, final: bool) -> None:
        if trial in self._over:
            return
        if final:
            self._ends.setdefault(trial, {})[fold] = score
        at = self._at.setdefault((trial, evaluation), {})
        if fold in at or not math.isfinite(score):
            return
        at[fold] = score
        if len(at) < self.folds:
            return
        asked = self.trials[trial]
        if self.sweep.prune == "wilcoxon":
            for instance, value in at.items():
                asked.report(value, evaluation * self.folds + instance)
        else:
            asked.report(float(np.mean(list(at.values()))), evaluation)
        if len(self._ends.get(trial, {})) < self.folds and asked.should_prune():
            self._over[trial] = f"given up by Optuna's {self.sweep.prune} rule at evaluation {evaluation}"

    def given_up(self) -> Mapping[int, str]:
        return dict(self._over)


def make_pruner(sweep: Sweep) -> optuna.pruners.BasePruner:
    """The pruner that `sweep.prune` names, for a study."""
    pruners = import_optuna().pruners
    # The first evaluation of a short run says little; five finished trials make a median (Optuna's own default).
    kinds: dict[str, Any] = {
        "median": lambda: pruners.MedianPruner(n_startup_trials=5),
        "percentile": lambda: pruners.PercentilePruner(50.0, n_startup_trials=3),
        "hyperband": lambda: pruners.HyperbandPruner(),
        "wilcoxon": lambda: pruners.WilcoxonPruner(p_threshold=0.1, n_startup_steps=2),
    }
    make = kinds.get(sweep.prune, pruners.NopPruner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Wilcoxon pruner has called itself experimental since Optuna 3.6
        return make()


def import_optuna() -> Any:
    """Optuna, silenced below warnings. Raises MissingExtra."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise MissingExtra("optuna", "sweep") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _folds(count: int) -> str:
    return f"{count} fold{'s' if count > 1 else ''}"
