"""Nested cross-validation: an estimate of the *chosen* setting that the choosing hasn't made optimistic.

Each outer fold's rows are set aside. On its training rows the whole sweep is cross-validated and its winner picked; the
winner is then trained on all of these and scored on the rows set aside, which no choice has seen (Stone, JRSS B 36,
1974; Cawley & Talbot, JMLR 11, 2010). Every part is an ordinary run in a folder of its own, so it goes on like one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.crossval import cross_validate
from crosstune.data.rows import Rows
from crosstune.errors import LaneFailed, RecipeError
from crosstune.inputs import read_asked_rows
from crosstune.metrics import find_metric, limits_of
from crosstune.progress import Progress, choose_progress
from crosstune.recipe.asked import Asked, gather
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Folds
from crosstune.recipe.yaml_text import write_text
from crosstune.results.scores import limits
from crosstune.splits.splits import Fold, split_rows
from crosstune.stats import Interval, fold_interval
from crosstune.sweep.sweep import make_trial


@dataclass(frozen=True)
class OuterFold:
    """One outer fold: what was chosen without its rows, how good it looked there, and what it is on its rows."""

    fold: int
    settings: Mapping[str, Any]
    inner_score: float
    scores: Mapping[str, float]
    rows: int
    failed: int = 0  # lanes of the choice that failed: their trials were judged without them


@dataclass(frozen=True)
class Nested:
    """The result of a nested cross-validation. `interval`: of the chosen setting's score on rows no choice has seen."""

    run: Path
    metric: str
    folds: tuple[OuterFold, ...]
    interval: Interval

    @property
    def optimism(self) -> float:
        """How much better the winners looked within than they were without (in units of the metric).

        Below 0 where what they gained by more rows to train on outweighs it.
        """
        gap = float(np.mean([fold.scores[self.metric] - fold.inner_score for fold in self.folds]))
        return -gap if find_metric(self.metric).higher_is_better else gap

    @property
    def failed(self) -> int:
        """Lanes that failed within."""
        return sum(fold.failed for fold in self.folds)

    @property
    def sentence(self) -> str:
        """What may be expected, in one sentence."""
        chosen = {_words(fold.settings) for fold in self.folds}
        agree = (
            f"every outer fold chose {chosen.pop()}"
            if len(chosen) == 1
            else f"the outer folds chose {len(chosen)} settings"
        )
        return (
            f"Choosing by this sweep gives {self.metric} {self.interval} on rows that neither training nor choosing "
            f"has seen; {agree}; within, on fewer training rows, the winners looked "
            f"{'better' if self.optimism >= 0 else 'worse'} by {abs(self.optimism):.4g}."
            + (f" {self.failed} lanes failed within and count for nothing." if self.failed else "")
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {
            "run": str(self.run), "metric": self.metric, "mean": self.interval.mean, "std": self.interval.std,
            "interval95": limits(self.interval), "optimism": self.optimism, "sentence": self.sentence,
            "failed": self.failed,
            "folds": [
                {
                    "fold": f.fold, "settings": dict(f.settings), "inner_score": f.inner_score, "rows": f.rows,
                    "failed": f.failed, **f.scores,
                }
                for f in self.folds
            ],
        }  # fmt: skip


class Within:
    """Folds made beforehand, as a splitter whose words tell one from another."""

    def __init__(self, folds: Sequence[Fold], words: str) -> None:
        self.folds, self.words = folds, words

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for fold in self.folds:
            yield fold.train, fold.held_out

    def __repr__(self) -> str:
        return self.words


def nested_cross_validate(
    recipe: Recipe | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    progress: Progress | None = None,
    retry_failed: bool = False,
    **keywords: Any,
) -> Nested:
    """Cross-validate the choice itself: `folds.outer` folds, the recipe's sweep within each.

    Keywords are those of `cross_validate`, but for a model in memory and a splitter. The same call goes on with what an
    earlier one left unfinished; `retry_failed` trains the lanes that failed once more.
    """
    sections = {key: value for key, value in keywords.items() if key not in ("data", "lora", "folds", "model")}
    named = {key: keywords[key] for key in ("data", "lora", "folds", "model") if key in keywords}
    asked = gather(recipe, sections=sections, **named)
    if asked.recipe.folds.outer < 2:
        raise RecipeError(
            f"folds.outer is {asked.recipe.folds.outer}: there is nothing to nest", "Set folds.outer to 3 or more."
        )
    if asked.model is not None or asked.splitter is not None:
        raise RecipeError("a nested cross-validation takes neither a model in memory nor a splitter", "Name them.")
    if asked.recipe.data.skip_bad_rows:
        raise RecipeError(
            "data.skip_bad_rows: a nested cross-validation needs rows without errors", "Mend the rows, or exclude them."
        )
    progress = progress or choose_progress()
    rows = read_asked_rows(asked, progress)
    plain = asked.recipe.folds.model_copy(update={"outer": 0})
    outer = split_rows(rows, plain.model_copy(update={"k": asked.recipe.folds.outer}))
    found = []
    for fold in outer:
        inner = inner_folds(rows, fold, plain)
        progress.say(f"outer fold {fold.index + 1} of {len(outer)}: {len(fold.held_out)} rows set aside")
        found.append(_one_fold(asked, fold, inner, progress, retry_failed))
    metric = str(asked.recipe.sweep.get("metric", "loss"))
    share = float(np.mean([len(fold.held_out) / (len(fold.held_out) + len(fold.train)) for fold in outer]))
    interval = fold_interval([fold.scores[metric] for fold in found], test_share=share, limits=limits_of(metric))
    nested = Nested(Path(asked.recipe.output), metric, tuple(found), interval)
    write_text(nested.run / "nested.json", json.dumps(nested.to_json(), indent=1) + "\n")
    return nested


def inner_folds(rows: Rows, outer: Fold, folds: Folds) -> list[Fold]:
    """Folds of the outer fold's training rows alone, as positions into all rows.

    What is in neither of its sides stays out, too: copies of rows set aside, or what comes after them in time.
    """
    kept = set(outer.train)
    inside = rows.without(row.number for position, row in enumerate(rows.rows) if position not in kept)
    place = {row.number: position for position, row in enumerate(rows.rows)}
    return [
        Fold(one.index, *(tuple(place[inside.rows[p].number] for p in side) for side in (one.train, one.held_out)))
        for one in split_rows(inside, folds)
    ]


def _one_fold(asked: Asked, outer: Fold, inner: Sequence[Fold], progress: Progress, retry_failed: bool) -> OuterFold:
    """The sweep on the inner folds, then its winner on the outer one.

    The winner's folder has its trial in its name: lanes that failed and are tried again may make another one win.
    """
    recipe, metric = asked.recipe, str(asked.recipe.sweep.get("metric", "loss"))
    folds = recipe.folds.model_copy(update={"outer": 0})
    said = json.dumps({**folds.model_dump(mode="json"), "outer": recipe.folds.outer}, sort_keys=True)
    base = recipe.model_copy(update={"folds": folds})
    chosen = cross_validate(
        base.model_copy(update={"output": f"{recipe.output}/outer-{outer.index}"}),
        data=_rows_of(asked), folds=Within(inner, f"inner folds of outer fold {outer.index}: {said}"),
        progress=progress, retry_failed=retry_failed,
    )  # fmt: skip
    if chosen.report["best"] is None:
        why = f"every lane of the choice failed ({chosen.failed[0]['reason']})" if chosen.failed else f"no {metric}"
        raise LaneFailed(
            f"outer fold {outer.index}: {why}",
            f"Mend what it names, then run again with --retry-failed (retry_failed=True); see {chosen.run}.",
        )
    settings = chosen.best["settings"]
    winner = make_trial(base, 0, settings).recipe
    outside = Within([Fold(0, outer.train, outer.held_out)], f"outer fold {outer.index}: {said}")
    scored = cross_validate(
        winner.model_copy(update={"output": f"{recipe.output}/outer-{outer.index}-chosen-{chosen.best['trial']}"}),
        data=_rows_of(asked), folds=outside, progress=progress, retry_failed=retry_failed,
    )  # fmt: skip
    if scored.failed:
        raise LaneFailed(
            f"outer fold {outer.index}: the chosen setting failed ({scored.failed[0]['reason']})",
            f"See {scored.run}; leave that setting out of the sweep.",
        )
    only = scored.trials[0]
    scores = {name: summary["mean"] for name, summary in only["metrics"].items()}
    if scores[metric] is None:
        raise RecipeError(
            f"sweep.metric: {metric} has no value on the {len(outer.held_out)} rows of outer fold {outer.index}",
            "Set folds.kind: stratified and folds.by, a smaller folds.outer, or rank by another metric.",
        )
    inner_score = chosen.best["metrics"][metric]["mean"]
    return OuterFold(outer.index, settings, inner_score, scores, len(outer.held_out), len(chosen.failed))


def _rows_of(asked: Asked) -> Any:
    """The rows as they were passed, where they were passed in memory."""
    return None if asked.source == asked.recipe.data.path else asked.source


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "the only setting"
