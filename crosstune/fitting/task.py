"""What is to be fitted: the winner of a run, or recipes as they stand; refused where they can't be fitted together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstune.errors import RecipeError, RunError
from crosstune.fitting.fitted import Expected, expected_of
from crosstune.recipe.asked import Asked, gather
from crosstune.recipe.recipe import Recipe
from crosstune.results.result import Result
from crosstune.store.run import Run
from crosstune.sweep.sweep import Trial, make_trial, read_sweep

MAY_DIFFER = ("lora", "train")  # between recipes that are fitted together; the rest is shared by all lanes


@dataclass(frozen=True)
class Task:
    """What is to be fitted, before anything heavy is loaded."""

    asked: Asked
    trials: tuple[Trial, ...]
    held_out: float | None = None
    expected: Mapping[int, Expected] = field(default_factory=dict)


def gather_run(folder: Path, data: Any = None, model: Any = None, tokenizer: Any = None) -> Asked:
    """The recipe of a run, and the things in memory that it was made from."""
    stored = Run.read(folder).stored_recipe()
    asked = gather({**stored, "output": str(folder)}, data=None, model=model, tokenizer=tokenizer, sections={})
    if data is not None:
        return Asked(asked.recipe, data, asked.model, asked.tokenizer, asked.splitter)
    if asked.recipe.data.path.endswith(" in memory"):
        raise RunError(
            f"the rows of {str(folder)!r} were a {asked.recipe.data.path}", "Pass them again: data=…, from Python."
        )
    return asked


def task_of_run(folder: Path, trial: int | str, asked: Asked) -> Task:
    """A run's best trial, or the one asked for, on all its rows."""
    result = Result.read(folder)
    known = {entry["trial"]: entry for entry in result.trials if entry["finished"]}
    if not known:
        raise RunError(f"{str(folder)!r} has no finished fold yet", f"Finish it: crosstune run {folder}/recipe.yaml")
    number = result.best["trial"] if trial == "best" else trial
    if number not in known:
        raise RunError(
            f"{str(folder)!r} has no trial {trial!r} with a score",
            f"Choose best, or one of {', '.join(map(str, known))}.",
        )
    axes = read_sweep(asked.recipe)[1] if asked.recipe.sweep else ()
    alone = {axis.name: axis.values[0] for axis in axes if not axis.is_range and len(axis.values) == 1}
    chosen = make_trial(asked.recipe, int(number), {**alone, **known[number]["settings"]})
    among = len(result.trials) if trial == "best" else 1
    expected = expected_of(Run.read(folder), chosen, among=among)
    return Task(asked, (chosen,), expected={chosen.index: expected})


def task_of_recipes(every: Sequence[Asked], held_out: float | None, seeds: Sequence[int]) -> Task:
    """Recipes as they stand, each with every seed."""
    if held_out is not None and not 0 < held_out < 1:
        raise RecipeError(f"held_out is {held_out}", "Give a share between 0 and 1, such as 0.1.")
    for recipe in (asked.recipe for asked in every):
        if recipe.sweep:
            raise RecipeError(
                "the recipe has a sweep: which of its settings is to be fitted isn't known yet",
                f"Run it, then fit the winner: crosstune fit {recipe.output}",
            )
        if recipe.train.stop is not None and recipe.train.stop.on == "held_out" and held_out is None:
            raise RecipeError(
                "train.stop.on is held_out, and no row is held out", "Give held_out=0.1, or stop on own_rows."
            )
    asked = every[0]
    of_seeds = [{"train.seed": seed} for seed in seeds] or [{}]
    settings = [own | seed for own in _differences([one.recipe for one in every]) for seed in of_seeds]
    return Task(asked, tuple(make_trial(asked.recipe, i, setting) for i, setting in enumerate(settings)), held_out)


def _differences(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """What each recipe sets that isn't the same in all: lora and train by dotted name. Refuses other differences."""
    trees = [recipe.model_dump() for recipe in recipes]
    flat = [
        {f"{name}.{key}": value for name, part in tree.items() for key, value in _parts(part).items()} for tree in trees
    ]
    differing = [name for name in flat[0] if any(one[name] != flat[0][name] for one in flat)]
    for number, one in enumerate(flat, start=1):
        unlike = [
            f"{name.rstrip('.')} is {one[name]!r}, not {flat[0][name]!r}"
            for name in differing
            if name.split(".")[0] not in MAY_DIFFER and one[name] != flat[0][name]
        ]
        if unlike:
            raise RecipeError(
                f"recipe {number} can't be fitted together with the first: {'; '.join(unlike)}",
                "Recipes fitted together share base, rows and output, and differ in lora and train only: set what "
                "differs for all of them (KEY=VALUE, --out DIR), or fit them one by one.",
            )
    found = [{name: one[name] for name in differing} for one in flat]
    twins = [number for number, own in enumerate(found, start=1) if own in found[: number - 1]]
    if twins:
        raise RecipeError(
            f"recipe {twins[0]} has the same settings as one before it", "Name each once; for several runs use seeds."
        )
    return found


def _parts(section: Any) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {"": section}
