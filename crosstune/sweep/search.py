"""Trials one after another: ask for the next, tell its score. Lists (grid, random) and Optuna's TPE answer alike.

Asking and telling in the same order gives the same trials, so a run that goes on replays its journal through here.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from crosstune.recipe.recipe import Recipe
from crosstune.sweep.axes import Axis
from crosstune.sweep.pruning import FoldByFold, Halving, KeepAll, OptunaRule, Race, Rule, import_optuna, make_pruner
from crosstune.sweep.sweep import Sweep, Trial, expand, make_trial, read_sweep

OPTUNA_RULES = ("median", "percentile", "hyperband", "wilcoxon")


@dataclass
class Budget:
    """When no new trial starts any more. Lanes under way are finished."""

    hours: float | None = None
    tokens: float | None = None
    spent_tokens: int = 0
    began: float = field(default_factory=time.monotonic)
    spent_seconds: float = 0.0  # of earlier sittings of the same run

    def why_spent(self) -> str:
        """The reason, or nothing while there is budget left."""
        seconds = self.spent_seconds + time.monotonic() - self.began
        if self.hours is not None and seconds >= 3600 * self.hours:
            return f"sweep.hours: {self.hours:g} h are over"
        if self.tokens is not None and self.spent_tokens >= self.tokens:
            return f"sweep.tokens: {self.spent_tokens:,} tokens trained"
        return ""


class Search:
    """A sweep under way: `ask` for trials, `report` scores under way, `tell` the end of each."""

    def __init__(self, source: Iterator[Trial], rule: Rule, budget: Budget, study: Any = None) -> None:
        self._source, self.rule, self.budget, self._study = source, rule, budget, study

    @property
    def fold_first(self) -> bool:
        """A fold of every trial comes before the next fold of any."""
        return self.rule.fold_first

    @property
    def stops_under_way(self) -> bool:
        """Trials are given up while their lanes train, by the mean over all of a trial's folds."""
        return isinstance(self.rule, OptunaRule)

    @property
    def waits(self) -> bool:
        """Which trial comes next, or which goes on, depends on scores so far: waves must follow one another."""
        return self._study is not None or not isinstance(self.rule, KeepAll) or self.budget.tokens is not None

    def ask(self, *, again: bool = False) -> Trial | None:
        """The next trial; None if there is none, or the budget is spent. `again`: an earlier sitting has begun it."""
        if not again and self.budget.why_spent():
            return None
        return next(self._source, None)

    def report(self, trial: int, fold: int, evaluation: int, score: float, *, final: bool) -> None:
        """A held-out score of one lane, at its evaluation number `evaluation` (from 1)."""
        self.rule.report(trial, fold, evaluation, score, final=final)

    def given_up(self) -> Mapping[int, str]:
        """Trial → reason, of all trials given up so far."""
        return self.rule.given_up()

    def tell(self, trial: int, score: float | None) -> None:
        """A trial is over: its mean over folds; None if it failed or was given up."""
        if self._study is not None:
            states = import_optuna().trial.TrialState
            if score is not None and math.isfinite(score):
                self._study.tell(trial, score)
            else:
                self._study.tell(trial, state=states.PRUNED if trial in self.given_up() else states.FAIL)


def open_search(
    recipe: Recipe, *, folds: int, test_share: float | None = None, higher_is_better: bool = False
) -> Search:
    """The search that the recipe's sweep asks for; without a sweep, one trial. `test_share`: of the folds, else 1/K."""
    if not recipe.sweep:
        return Search(iter(expand(recipe)), KeepAll(), Budget())
    sweep, axes = read_sweep(recipe)
    budget = Budget(sweep.hours, sweep.tokens)
    fold_by_fold = partial(_fold_by_fold, sweep, folds=folds, higher_is_better=higher_is_better, test_share=test_share)
    study: Any = _make_study(sweep, higher_is_better) if sweep.kind == "tpe" or sweep.prune in OPTUNA_RULES else None
    if sweep.kind == "tpe":
        count = sweep.trials or 20
        watch = OptunaRule(study, sweep, folds) if sweep.prune in OPTUNA_RULES else None
        rule = watch or fold_by_fold(trials=count)
        return Search(_asked(recipe, axes, study, count, watch), rule, budget, study)
    trials = expand(recipe)
    if study is None:
        return Search(iter(trials), fold_by_fold(trials=len(trials)), budget)
    watch = OptunaRule(study, sweep, folds)
    return Search(_watched(trials, study, watch), watch, budget, study)


def _fold_by_fold(sweep: Sweep, *, trials: int, folds: int, higher_is_better: bool, test_share: float | None) -> Rule:
    kinds: dict[str, type[FoldByFold]] = {"halving": Halving, "race": Race}
    kind = kinds.get(sweep.prune)
    return kind(sweep, trials, folds, higher_is_better, test_share) if kind else KeepAll()


def _make_study(sweep: Sweep, higher_is_better: bool) -> Any:
    optuna = import_optuna()
    # Ten random trials before the model of good and bad settings: fewer mislead it (Optuna's default).
    return optuna.create_study(
        study_name="sweep",  # Hyperband draws a trial's bracket from it: left out, it would be another one each time
        direction="maximize" if higher_is_better else "minimize",
        sampler=optuna.samplers.TPESampler(seed=sweep.seed % 2**32, n_startup_trials=10, constant_liar=True),
        pruner=make_pruner(sweep),
    )


def _watched(trials: list[Trial], study: Any, watch: OptunaRule) -> Iterator[Trial]:
    for trial in trials:
        watch.watch(trial.index, study.ask())
        yield trial


def _asked(recipe: Recipe, axes: tuple[Axis, ...], study: Any, count: int, watch: OptunaRule | None) -> Iterator[Trial]:
    spaces = {axis.name: _distribution(axis) for axis in axes}
    for index in range(count):
        asked = study.ask(fixed_distributions=spaces)
        assert asked.number == index
        if watch is not None:
            watch.watch(index, asked)
        yield make_trial(recipe, index, {axis.name: _value(axis, asked.params[axis.name]) for axis in axes})


def _distribution(axis: Axis) -> Any:
    """Optuna's name for an axis. Values of a list go by their JSON: Optuna's categories can't be lists."""
    kinds = import_optuna().distributions
    if not axis.is_range:
        return kinds.CategoricalDistribution([json.dumps(value) for value in axis.values])
    if axis.whole:
        return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)


def _value(axis: Axis, found: Any) -> Any:
    return axis.cast(found) if axis.is_range else json.loads(found)


def mean_score(scores: Mapping[int, float]) -> float | None:
    """A trial's score: the mean over its folds, or None where one of them is missing or not finite."""
    values = list(scores.values())
    return float(np.mean(values)) if values and np.isfinite(values).all() else None
