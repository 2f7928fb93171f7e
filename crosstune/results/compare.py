"""Scores of several trials, of one run or of several, made into a ranking and one sentence on what may be concluded.

Plain scores in; where they come from (`Result`, run folders) is the caller's business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from crosstune.errors import DataError
from crosstune.metrics import limits_of
from crosstune.stats import Comparison, Interval, adjust_holm, compare_folds, fold_interval, rank_probabilities

Verdict = Literal["best", "worse", "equivalent", "unclear", "other rows", "other tokens", "failed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial's scores by fold. `folds_key` tells which rows were held out: equal keys, equal folds.

    `tokens_key` tells of a score by token how many tokens each row counts: another tokenizer or template, another unit.
    """

    name: str
    scores: Mapping[int, float]
    folds_key: str = ""
    tokens_key: str = ""
    note: str = ""
    trial: int = -1


@dataclass(frozen=True, slots=True)
class Place:
    """One trial's place in the ranking, and how it compares with the best.

    `versus` is best against this one on the folds both finished; `p_adjusted` allows for all pairs of trials
    (Holm). `first` and `last`: probabilities that its true mean is the best and the last of the trials that finished
    all folds of the best.
    """

    name: str
    interval: Interval
    verdict: Verdict
    versus: Comparison | None = None
    p_adjusted: float = math.nan
    first: float = math.nan
    last: float = math.nan
    note: str = ""
    trial: int = -1


@dataclass(frozen=True, slots=True)
class Ranking:
    """Trials from best to last, and what may be concluded."""

    metric: str
    places: tuple[Place, ...]
    rope: float
    confidence: float
    sentence: str
    higher_is_better: bool = False
    warnings: tuple[str, ...] = field(default=())

    def to_json(self) -> list[dict[str, object]]:
        """The same with None for nan, which JSON doesn't have."""
        return [{name: None if value != value else value for name, value in row.items()} for row in self.to_rows()]

    def to_rows(self) -> list[dict[str, object]]:
        """One flat mapping a trial, for tables and files."""
        return [
            {
                "trial": place.trial, "name": place.name, self.metric: place.interval.mean, "std": place.interval.std,
                "low": place.interval.low, "high": place.interval.high, "folds": place.interval.n,
                "verdict": place.verdict, "behind_best": _behind(place, self.higher_is_better),
                "p_adjusted": place.p_adjusted,
                "p_equivalent": place.versus.equivalent if place.versus else math.nan,
                "p_worse": place.versus.better if place.versus else math.nan,
                "p_best": place.first, "p_last": place.last, "note": place.note,
            }
            for place in self.places
        ]  # fmt: skip


def rank_trials(
    entries: Sequence[Entry],
    *,
    metric: str = "loss",
    test_share: float,
    equivalent: float = 0.01,
    higher_is_better: bool = False,
    confidence: float = 0.95,
) -> Ranking:
    """Rank trials by their mean over folds and judge each against the best.

    "Worse" is claimed of a trial if its corrected t-test against the best, Holm-adjusted over all pairs, is below
    1 − confidence (the best was picked by looking, so every pair could have been the one tested) and the posterior
    probability that it is worse by more than the region of equivalence is above `confidence`. "Equivalent" is claimed
    if the probability of lying within that region is above `confidence`. Else one can't tell. `equivalent` is the
    region's half width as a share of the best mean.

    A trial that was given up early has fewer folds; it is compared on those it has, and never comes first.
    """
    words: dict[str, Any] = {"test_share": test_share, "confidence": confidence, "limits": limits_of(metric)}
    finite = [_finite_only(entry) for entry in entries]
    scored = [entry for entry in finite if entry.scores]
    if not scored:
        raise DataError(f"no trial has a {metric} score", "See the failed lanes in the run's journal, then resume it.")
    keys = [(entry.folds_key, entry.tokens_key) for entry in scored]
    key = max(keys, key=keys.count)
    alike = [entry for entry, its in zip(scored, keys, strict=True) if its == key]
    sign = -1.0 if higher_is_better else 1.0
    whole = max(len(entry.scores) for entry in alike)
    best = _best([entry for entry in alike if len(entry.scores) == whole], sign)
    rope = equivalent * abs(_mean(best.scores.values()))
    pairs = {
        (a, b): _compare(alike[a], alike[b], test_share, rope, higher_is_better, confidence)
        for a, b in itertools.combinations(range(len(alike)), 2)
    }
    adjusted = dict(zip(pairs, adjust_holm([c.p if c else math.nan for c in pairs.values()]), strict=True))
    firsts, lasts = _chances(alike, best, test_share, higher_is_better)
    places = []
    top = alike.index(best)
    for index, entry in enumerate(alike):
        interval = fold_interval(list(entry.scores.values()), **words)
        chance: dict[str, Any] = {
            "first": firsts[index],
            "last": lasts[index],
            "note": entry.note,
            "trial": entry.trial,
        }
        if index == top:
            places.append(Place(entry.name, interval, "best", **chance))
            continue
        pair = (min(top, index), max(top, index))
        versus = _compare(best, entry, test_share, rope, higher_is_better, confidence)
        verdict = _judge(versus, adjusted[pair], confidence)
        places.append(Place(entry.name, interval, verdict, versus, adjusted[pair], **chance))
    places.sort(key=lambda place: (place.verdict != "best", _order(place, best, alike, sign)))
    for entry, its in zip(scored, keys, strict=True):
        if its != key:
            interval = fold_interval(list(entry.scores.values()), **words)
            verdict = "other rows" if its[0] != key[0] else "other tokens"
            places.append(Place(entry.name, interval, verdict, note=entry.note, trial=entry.trial))
    failed = [entry for entry in finite if not entry.scores]
    places += [Place(e.name, fold_interval([], **words), "failed", note=e.note, trial=e.trial) for e in failed]
    sentence = say_conclusion(metric, places, higher_is_better=higher_is_better)
    return Ranking(metric, tuple(places), rope, confidence, sentence, higher_is_better, _warnings(places, whole))


def say_conclusion(metric: str, places: Sequence[Place], *, higher_is_better: bool) -> str:
    """What may be concluded, in one sentence."""
    best = places[0]
    measured = f"{metric} {best.interval}"
    rest = [place for place in places[1:] if place.versus is not None]
    if not rest:
        return f"{best.name}: {measured} on rows never seen in training."
    if best.interval.n < 2:
        return (
            f"{best.name} has the {_best_word(higher_is_better)} {measured}; one fold can't show whether that is luck."
        )
    worse = [place for place in rest if place.verdict == "worse"]
    equal = [place for place in rest if place.verdict == "equivalent"]
    unclear = [place for place in rest if place.verdict == "unclear"]
    parts = []
    if worse:
        parts.append(f"better than {_names(worse, len(rest))}")
    if equal:
        parts.append(f"as good as {_names(equal, len(rest))}")
    if unclear:
        parts.append(f"not to be told from {_names(unclear, len(rest))}")
    if not worse and not equal:
        return (
            f"No setting is shown to be better: {best.name} has the {_best_word(higher_is_better)} {measured}, "
            f"but with these folds it is {' and '.join(parts)}."
        )
    return f"{best.name} ({measured}) is {', '.join(parts[:-1]) + ' and ' if parts[1:] else ''}{parts[-1]}."


def _best_word(higher_is_better: bool) -> str:
    return "highest" if higher_is_better else "lowest"


def _names(places: Sequence[Place], among: int) -> str:
    if len(places) == among and among > 1:
        return f"all {among} others" if among > 2 else "both others"
    if len(places) <= 3:
        return ", ".join(place.name for place in places)
    return f"{len(places)} of the {among} others"


def _judge(versus: Comparison | None, p_adjusted: float, confidence: float) -> Verdict:
    if versus is None or math.isnan(versus.p):
        return "unclear"
    if p_adjusted < 1 - confidence and versus.better > confidence:
        return "worse"
    return "equivalent" if versus.equivalent > confidence else "unclear"


def _best(entries: Sequence[Entry], sign: float) -> Entry:
    """The best mean on the folds that all of them have: where lanes failed, who lacks a hard fold isn't the better."""
    shared = set.intersection(*(set(entry.scores) for entry in entries))
    return min(entries, key=lambda entry: sign * _mean([entry.scores[fold] for fold in shared or entry.scores]))


def _compare(
    first: Entry, second: Entry, test_share: float, rope: float, higher_is_better: bool, confidence: float
) -> Comparison | None:
    shared = sorted(first.scores.keys() & second.scores.keys())
    if not shared:
        return None
    return compare_folds(
        [first.scores[fold] for fold in shared], [second.scores[fold] for fold in shared],
        test_share=test_share, rope=rope, higher_is_better=higher_is_better, confidence=confidence,
    )  # fmt: skip


def _chances(
    entries: Sequence[Entry], best: Entry, test_share: float, higher_is_better: bool
) -> tuple[list[float], list[float]]:
    """Probabilities of being first and last, among the trials that finished all folds of the best; nan for others."""
    folds = sorted(best.scores)
    whole = [index for index, entry in enumerate(entries) if best.scores.keys() <= entry.scores.keys()]
    firsts, lasts = [math.nan] * len(entries), [math.nan] * len(entries)
    if len(folds) < 2 or len(whole) < 2:
        return firsts, lasts
    table = np.array([[entries[index].scores[fold] for index in whole] for fold in folds])
    found = rank_probabilities(table, test_share=test_share, higher_is_better=higher_is_better)
    for index, first, last in zip(whole, *found, strict=True):
        firsts[index], lasts[index] = first, last
    return firsts, lasts


def _order(place: Place, best: Entry, alike: Sequence[Entry], sign: float) -> float:
    """How far behind the best, on the folds shared with it: a fold's difficulty doesn't decide the order."""
    if place.versus is None:
        return sign * place.interval.mean
    return -sign * place.versus.difference.mean


def _behind(place: Place, higher_is_better: bool) -> float:
    if place.versus is None:
        return 0.0 if place.verdict == "best" else math.nan
    return place.versus.difference.mean if higher_is_better else -place.versus.difference.mean


def _warnings(places: Sequence[Place], whole: int) -> tuple[str, ...]:
    found = []
    if others := [place.name for place in places if place.verdict == "other rows"]:
        found.append(f"{', '.join(others)}: scored on other held-out rows, so not compared")
    if others := [place.name for place in places if place.verdict == "other tokens"]:
        found.append(
            f"{', '.join(others)}: the same rows are other tokens (another tokenizer, template or data section), so "
            "scores by token aren't compared; rank by a metric of text or choices"
        )
    if short := [place.name for place in places if place.versus and place.interval.n < whole]:
        found.append(f"{', '.join(short)}: fewer folds than the best; compared on the folds they have")
    if flat := [p.name for p in places if p.versus and p.versus.difference.n > 1 and math.isnan(p.versus.p)]:
        found.append(f"{', '.join(flat)}: as far from the best on every fold, so that no test can judge by the spread")
    if failed := [place.name for place in places if place.verdict == "failed"]:
        found.append(f"{', '.join(failed)}: no score")
    if whole == 2:
        found.append("two folds: intervals are very wide; use five or more to tell settings apart")
    if (compared := sum(place.verdict == "best" or place.versus is not None for place in places)) > 2:
        found.append(
            f"the best of {compared} trials was picked by these scores, which makes its own look better than it is; "
            "folds.outer gives a fair estimate"
        )
    return tuple(found)


def _finite_only(entry: Entry) -> Entry:
    scores = {fold: score for fold, score in sorted(entry.scores.items()) if math.isfinite(score)}
    return replace(entry, scores=scores)


def _mean(values: object) -> float:
    return float(np.mean(list(values)))  # type: ignore[call-overload]
