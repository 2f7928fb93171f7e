"""What pruning saves, and what freed slots that wait for the next wave cost: a full sweep's own scores, replayed.

    python -m bench.pruning runs/guide/qa-0 runs/guide/qa-1 --lanes 5 8 12 20 60

A run without pruning has every evaluation of every lane in its journal. Each of Optuna's rules is told these in the
order in which lanes would reach them: in waves that are as wide as can be ("any waves": a slot whose lane was given up
is padding until its wave ends), in waves of whole trials (as `workers.schedule` makes them), and with a waiting lane
put into a free slot at the next evaluation ("refilled", which no code here does). Counted are slots × evaluations,
padding included, in per cent of the sweep without a rule.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from crosstune.recipe.recipe import Recipe
from crosstune.store.run import Run
from crosstune.sweep.search import OPTUNA_RULES, Search, open_search

Lane = tuple[int, int]  # trial, fold
Scores = dict[Lane, list[float]]  # evaluation by evaluation


@dataclass
class Replay:
    """One sweep under one rule, over `scores` that are known beforehand."""

    scores: Scores
    search: Search
    folds: int
    slots: int = 0  # × evaluations, padding included
    _waiting: list[Lane] = field(default_factory=list)
    _over: dict[Lane, float] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def in_waves(self, lanes: int, whole_trials: bool) -> Replay:
        """Waves of at most `lanes`, each to its end."""
        if whole_trials:
            lanes = max(1, lanes // self.folds) * self.folds
        while wave := self._next(lanes, self._waiting):
            self._waiting = self._waiting[len(wave) :]
            living, at = list(wave), 0
            while living:
                at += 1
                self.slots += len(wave)
                living = self._evaluate(living, dict.fromkeys(living, at))
            self._tell()
        return self

    def refilled(self, lanes: int) -> Replay:
        """A free slot takes the next waiting lane at the evaluation after it became free."""
        at: dict[Lane, int] = {}
        while True:
            free = lanes - len(at)
            at |= dict.fromkeys(self._next(free, self._waiting), 0)
            self._waiting = [lane for lane in self._waiting if lane not in at]
            if not at:
                return self
            at = {lane: evaluation + 1 for lane, evaluation in at.items()}
            self.slots += len(at)
            living = self._evaluate(list(at), at)
            at = {lane: at[lane] for lane in living}
            self._tell()

    def _next(self, count: int, waiting: list[Lane]) -> list[Lane]:
        while len(waiting) < count and (trial := self.search.ask()) is not None:
            waiting += [(trial.index, fold) for fold in range(self.folds)]
        waiting[:] = [lane for lane in waiting if lane[0] not in self.search.given_up()]
        return waiting[:count]

    def _evaluate(self, living: Iterable[Lane], at: dict[Lane, int]) -> list[Lane]:
        for lane in living:
            known = self.scores[lane]
            final = at[lane] == len(known)
            self.search.report(*lane, at[lane], known[at[lane] - 1], final=final)
            if final:
                self._over[lane] = known[-1]
        gone = self.search.given_up()
        return [lane for lane in living if lane not in self._over and lane[0] not in gone]

    def _tell(self) -> None:
        for trial in {trial for trial, _ in self.scores} - self._told:
            ends = [self._over[lane] for lane in self._over if lane[0] == trial]
            if trial in self.search.given_up() or len(ends) == self.folds:
                self._told.add(trial)
                self.search.tell(trial, None if trial in self.search.given_up() else float(np.mean(ends)))


def scores_of(run: Run) -> Scores:
    """Every lane's held-out losses, in order."""
    found: defaultdict[Lane, list[float]] = defaultdict(list)
    for event in sorted(run.events("lane_evaluated"), key=lambda event: event["step"]):
        found[event["trial"], event["fold"]].append(event["loss"])
    return dict(found)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("runs", nargs="+", help="finished sweeps without pruning")
    words.add_argument("--lanes", type=int, nargs="+", default=[5, 8, 12, 20, 60])
    asked = words.parse_args()
    print("| rule | lanes | any waves | whole trials | refilled |")
    print("|---|--:|--:|--:|--:|")
    for rule in OPTUNA_RULES:
        for lanes in asked.lanes:
            shares = []
            for run in map(Run.read, asked.runs):
                scores = scores_of(run)
                whole = sum(map(len, scores.values()))
                recipe = run.stored_recipe()
                recipe = Recipe.build({**recipe, "sweep": {**recipe["sweep"], "prune": rule}})
                folds = 1 + max(fold for _, fold in scores)
                waves, aligned = (
                    Replay(scores, open_search(recipe, folds=folds), folds).in_waves(lanes, whole_trials)
                    for whole_trials in (False, True)
                )
                best = Replay(scores, open_search(recipe, folds=folds), folds).refilled(lanes)
                counts = (waves.slots, aligned.slots, best.slots)
                shares.append([100 * count / whole for count in counts])
            print(f"| {rule} | {lanes} | " + " | ".join(f"{share:.0f}%" for share in np.mean(shares, axis=0)) + " |")


if __name__ == "__main__":
    main()
