"""The sweep section read and made into trials: which settings are tried.

Each trial is a whole Recipe. This module doesn't know how a trial is trained or scored; `search.py` asks and tells,
`pruning.py` gives weak trials up.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from crosstune.errors import RecipeError
from crosstune.metrics import METRICS, find_metric
from crosstune.recipe.mistakes import ALIASES
from crosstune.recipe.recipe import Recipe, options
from crosstune.recipe.sections import Float, Int, Section
from crosstune.sweep.axes import Axis, read_axis
from crosstune.units import setting_words

# The base and the rows are shared by all lanes of a wave, and trials are compared on the same folds.
SWEPT_SECTIONS = ("lora", "train")
SHARE = "train.share"


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting of a sweep. `settings` holds only what differs between trials, by dotted name."""

    index: int
    settings: Mapping[str, Any]
    recipe: Recipe

    @property
    def name(self) -> str:
        """`lora.rank=8 train.learning_rate=0.0002`, or `trial 0` where nothing differs."""
        words = " ".join(f"{key}={setting_words(value)}" for key, value in self.settings.items())
        return words or f"trial {self.index}"


class Sweep(Section):
    """How the settings are searched. In the recipe these keys stand beside the settings, which have a dot."""

    kind: Literal["auto", "grid", "random", "tpe"] = Field(
        "auto", description="Search: every combination, random draws, or Optuna's TPE. auto: grid, if all are lists."
    )
    cases: tuple[dict[str, Any], ...] = Field(
        (), description="The trials themselves, each a mapping of settings; in place of lists and ranges."
    )
    trials: Int | None = Field(None, ge=1, description="Most trials. Default: all of a grid, else 20.")
    hours: Float | None = Field(None, gt=0, description="No new trial starts after this time.")
    tokens: Float | None = Field(None, gt=0, description="No new trial starts after this many trained tokens.")
    seed: Int = Field(0, description="Seed of random draws and of TPE.")
    metric: str = Field("loss", description="Metric by which trials are ranked.")
    equivalent: Float = Field(
        0.01, ge=0, description="Differences within this share of the best mean count as equal (region of equivalence)."
    )
    prune: Literal["none", "race", "halving", "median", "percentile", "hyperband", "wilcoxon"] = Field(
        "none", description="Rule that gives weak trials up, on held-out scores only."
    )
    prune_after: Int = Field(1, ge=1, description="Folds that a trial finishes before it may be given up.")


def read_sweep(recipe: Recipe) -> tuple[Sweep, tuple[Axis, ...]]:
    """The recipe's sweep section, judged completely; one `RecipeError` names every mistake and its fix."""
    mistakes: list[str] = []
    plain, swept = _parted(recipe.sweep)
    try:
        sweep = Sweep.model_validate({key: value for key, value in plain.items() if key in Sweep.model_fields})
    except ValidationError as error:
        mistakes += [
            f"sweep.{'.'.join(map(str, e['loc'][:1]))}: {e['msg']} (got {e['input']!r})" for e in error.errors()
        ]
        sweep = Sweep()
    mistakes += [_unknown(key) for key in plain if key not in Sweep.model_fields]
    mistakes += _metric_faults(sweep.metric, recipe.evaluate.metrics)
    kinds = {name: kind for name, kind, *_ in options() if name.split(".")[0] in SWEPT_SECTIONS}
    axes = []
    for name, value in swept.items():
        if name not in kinds:
            mistakes.append(_unknown(name))
            continue
        axis = read_axis(name, value, whole=kinds[name].startswith("whole number"))
        found = [axis] if isinstance(axis, str) else _faults(recipe, axis)
        mistakes += found
        if not found and isinstance(axis, Axis):
            axes.append(axis)
    mistakes += _case_faults(recipe, sweep, axes)
    if sweep.kind == "grid" and (ranges := [axis.name for axis in axes if axis.is_range]):
        mistakes.append(
            f"sweep.kind: a grid can't draw from the range of {', '.join(ranges)}; use a list, or kind: random"
        )
    mistakes += _prune_faults(sweep)
    if mistakes:
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "a mistake"
        raise RecipeError(
            f"the sweep has {count}:\n" + "\n".join(f"  {mistake}" for mistake in mistakes),
            "A sweep looks like {lora.rank: [8, 16], train.learning_rate: {log: [1e-5, 1e-3]}, trials: 20}.",
        )
    if sweep.kind == "auto":
        sweep = sweep.model_copy(update={"kind": "random" if any(axis.is_range for axis in axes) else "grid"})
    return sweep, tuple(axes)


def expand(recipe: Recipe) -> list[Trial]:
    """Every trial of the recipe's sweep, in order; without a sweep exactly one, with the recipe as it is.

    TPE chooses each trial from the scores of earlier ones, so its trials can't be listed: see `search.open_search`.
    """
    if not recipe.sweep:
        return [Trial(0, {}, recipe)]
    sweep, axes = read_sweep(recipe)
    if sweep.kind == "tpe":
        raise RecipeError("TPE's trials can't be listed beforehand", "Set sweep.kind: grid or random for a list.")
    if sweep.cases:
        choices = [_parted(case)[1] for case in sweep.cases]
    else:
        choices = _grid(axes) if sweep.kind == "grid" else _draws(axes, sweep.trials or 20, sweep.seed)
    return [make_trial(recipe, index, choice) for index, choice in enumerate(choices[: sweep.trials])]


def trials_to_plan(recipe: Recipe) -> list[Trial]:
    """As many trials as will be tried, as large as any: what memory is planned for. Of lists, the trials themselves."""
    if not recipe.sweep or (sweep_and_axes := read_sweep(recipe))[0].kind != "tpe":
        return expand(recipe)
    sweep, axes = sweep_and_axes
    largest = {axis.name: axis.cast(axis.high) if axis.is_range else _largest(axis.values) for axis in axes}
    return [make_trial(recipe, index, largest) for index in range(sweep.trials or 20)]


def _largest(values: Sequence[Any]) -> Any:
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values):
        return max(numbers)
    return "all-linear" if "all-linear" in values else max(values, key=lambda value: len(str(value)))


def make_trial(recipe: Recipe, index: int, choice: Mapping[str, Any]) -> Trial:
    """The trial that sets `choice`, by dotted name. Its recipe has no sweep: it can be run by itself."""
    settings = {name: value for name, value in choice.items() if not _is_alone(recipe.sweep, name)}
    return Trial(index, settings, _with(recipe, choice))


def share_of_rows(positions: Sequence[int], share: float, seed: int) -> tuple[int, ...]:
    """The part of a fold's training rows that `train.share` asks for, in their old order.

    A smaller share is part of every larger one (rows are ranked by a hash), so a learning curve adds rows and changes
    none.
    """
    if share >= 1:
        return tuple(positions)
    keep = max(1, round(share * len(positions)))
    ranked = sorted(positions, key=lambda position: hashlib.blake2b(f"{seed}:{position}".encode()).digest())
    return tuple(sorted(ranked[:keep]))


def _parted(section: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The search's own keys, and the settings by dotted name ({lora: {rank: […]}} is lora.rank)."""
    plain: dict[str, Any] = {}
    swept: dict[str, Any] = {}
    for key, value in section.items():
        if key == "train_share":
            swept[SHARE] = value
        elif "." in key:
            swept[key] = value
        elif key in Recipe.model_fields and isinstance(value, Mapping):
            swept.update({f"{key}.{part}": inner for part, inner in value.items()})
        else:
            plain[key] = value
    return plain, swept


def _case_faults(recipe: Recipe, sweep: Sweep, axes: Sequence[Axis]) -> list[str]:
    """What is wrong with trials that are written out."""
    if not sweep.cases:
        return []
    if axes or sweep.kind == "tpe":
        return ["sweep.cases: trials that are written out stand alone; take the other settings (and kind) away"]
    names = {name for name, *_ in options() if name.split(".")[0] in SWEPT_SECTIONS}
    faults = []
    for number, case in enumerate(sweep.cases, start=1):
        plain, swept = _parted(case)
        faults += [f"case {number}: {_unknown(name)}" for name in [*plain, *(set(swept) - names)]]
        if set(swept) <= names and not plain:
            try:
                _with(recipe, swept)
            except RecipeError as error:
                faults += [f"sweep.cases: case {number}: {line.strip()}" for line in error.problem.splitlines()[1:]]
    return faults


def _metric_faults(name: str, measured: Sequence[str]) -> list[str]:
    try:
        metric = find_metric(name)
    except RecipeError as error:
        return [f"sweep.metric: unknown metric {name!r}; {error.fix}"]
    if metric.kind != "loss" and name not in measured:
        return [f"sweep.metric: {name} isn't measured; add it to evaluate.metrics"]
    return []


def _prune_faults(sweep: Sweep) -> list[str]:
    """Rules that the search or the metric leaves nothing to judge by."""
    between_folds = sweep.prune in ("halving", "race")
    if between_folds and (sweep.hours or sweep.tokens):
        return [
            f"sweep.{'hours' if sweep.hours else 'tokens'}: with prune: {sweep.prune} every trial starts at once, so "
            "that no budget could keep one back; set trials"
        ]
    if between_folds and sweep.kind == "tpe":
        return [
            f"sweep.prune: {sweep.prune} has a fold of every trial trained before any trial is over, so TPE could only "
            "draw at random; use kind: random, or prune: median, percentile, hyperband or wilcoxon"
        ]
    known = METRICS.get(sweep.metric)
    if sweep.prune != "none" and not between_folds and (known is None or known.kind != "loss"):
        return [
            f"sweep.prune: {sweep.prune} judges lanes under way, and {sweep.metric} is measured when they are over; "
            "use prune: halving or race, or metric: loss"
        ]
    return []


def _faults(recipe: Recipe, axis: Axis) -> list[str]:
    """What the recipe says to each value of one axis, the other settings as they are."""
    faults = []
    for value in axis.examples:
        try:
            _with(recipe, {axis.name: value})
        except RecipeError as error:
            faults += [f"sweep.{line.strip()}" for line in error.problem.splitlines()[1:]]
    return faults


def _unknown(key: str) -> str:
    section = key.split(".")[0]
    if "." in key and section in Recipe.model_fields and section not in SWEPT_SECTIONS:
        return f"sweep.{key}: can't be swept; all trials share base, rows and folds (swept: lora.*, train.*)"
    names = [name for name, *_ in options() if name.split(".")[0] in SWEPT_SECTIONS]
    last = ALIASES.get(key.split(".")[-1], key.split(".")[-1])
    near = [name for name in names if name.split(".")[-1] == last]
    near = near or difflib.get_close_matches(key, [*names, *Sweep.model_fields, "train_share"], n=2, cutoff=0.6)
    return f"sweep.{key}: unknown key; " + (
        f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    )


def _with(recipe: Recipe, choice: Mapping[str, Any]) -> Recipe:
    tree = recipe.model_dump(exclude={"sweep"})
    for name, value in choice.items():
        *sections, key = name.split(".")
        place = tree
        for section in sections:
            place[section] = place[section] or {}
            place = place[section]
        place[key] = value
    return Recipe.build(tree)


def _grid(axes: Sequence[Axis]) -> list[dict[str, Any]]:
    """Every combination; the last key changes fastest."""
    names = [axis.name for axis in axes]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def _draws(axes: Sequence[Axis], count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different draws, or fewer where the lists hold no more. Draw n doesn't depend on `count`."""
    rng = np.random.default_rng(seed % 2**32)
    drawn: dict[str, dict[str, Any]] = {}
    # 100 draws in a row without a new combination: the space is as good as used up.
    misses = 0
    while len(drawn) < count and misses < 100:
        choice = {axis.name: axis.draw(rng) for axis in axes}
        key = json.dumps(choice, sort_keys=True, default=list)
        misses = misses + 1 if key in drawn else 0
        drawn.setdefault(key, choice)
    return list(drawn.values())


def _is_alone(section: Mapping[str, Any], name: str) -> bool:
    value = _parted(section)[1].get(name)
    if isinstance(value, Mapping):
        value = value.get("choice")
    return isinstance(value, list | tuple) and len(value) == 1
