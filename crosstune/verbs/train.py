"""run, demo, fit: the verbs that train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crosstune.errors import EXIT_LANE_FAILED
from crosstune.verbs.words import (
    RecipeCommand,
    changes_argument,
    json_flag,
    load_recipe,
    only_results_on_stdout,
    out_option,
)

if TYPE_CHECKING:
    from crosstune.recipe.recipe import Recipe


@click.command(cls=RecipeCommand)
@click.argument("recipe")
@changes_argument
@out_option
@click.option("--show", is_flag=True, help="Print the whole recipe, defaults included, and train nothing.")
@click.option("--retry-failed", is_flag=True, help="Train the lanes that failed once more.")
@json_flag
def run(recipe: str, changes: tuple[str, ...], out: str | None, show: bool, retry_failed: bool, as_json: bool) -> int:
    """Cross-validate RECIPE: train and score every fold.

    The same command goes on with an unfinished run, and says so if the run is finished.
    """
    if show:
        click.echo(load_recipe(recipe, changes, out).to_yaml(), nl=False)
        return 0
    return cross_validate(lambda: load_recipe(recipe, changes, out), as_json, retry_failed=retry_failed)


@click.command()
@changes_argument
@click.option("--rows", type=int, help="Question–answer rows.")
@click.option("--folds", type=int, help="Folds, stratified by category.")
@click.option("--epochs", type=float, help="Passes over the training rows.")
@click.option("--model", metavar="PATH", help="Another model: hub id, folder or .gguf file.")
@click.option("--out", metavar="DIR", default="runs/demo", show_default=True, help="The run folder.")
@json_flag
def demo(changes: tuple[str, ...], model: str | None, out: str, as_json: bool, **sizes: Any) -> int:
    """Cross-validate a small real model: minutes on two CPU cores.

    SmolLM2-135M-Instruct on question–answer rows, folds stratified by category. No GPU is needed.
    """
    from crosstune.demo import DemoSize, demo_recipe
    from crosstune.progress import choose_progress

    size = DemoSize(**{name: value for name, value in sizes.items() if value is not None})
    progress = choose_progress()
    return cross_validate(lambda: demo_recipe(size, changes, out=out, model=model, progress=progress), as_json)


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="RUN|RECIPE... [KEY=VALUE]...")
@click.option("--trial", default="best", show_default=True, help="A run's trial: its number, or best.")
@click.option("--held-out", type=float, metavar="SHARE", help="A recipe: share of the rows kept for scoring.")
@click.option("--seed", "seeds", type=int, multiple=True, help="A recipe: one adapter a seed, side by side (repeat).")
@click.option("--out", metavar="DIR", help="A recipe: the folder to write.")
@click.option("--again", is_flag=True, help="Train once more where there is a fit.")
@json_flag
def fit(
    sources: tuple[str, ...],
    trial: str,
    held_out: float | None,
    seeds: tuple[int, ...],
    out: str | None,
    again: bool,
    as_json: bool,
) -> None:
    """Train one adapter on all rows.

    With a RUN's winning settings, ended at the epoch that its folds found best, or with a RECIPE as it stands. Several
    recipes that share base and rows are trained side by side, one adapter each.
    """
    from crosstune.fitting.fit import fit

    changes = tuple(word for word in sources[1:] if "=" in word and not Path(word).exists())
    recipes = [word for word in sources if word not in changes]
    runs = [word for word in recipes if (Path(word) / "journal.jsonl").is_file()]
    if runs and len(sources) > 1:
        raise click.UsageError(f"{runs[0]} is a run: it is fitted by itself, as it is.")
    with only_results_on_stdout():
        given = runs[0] if runs else [load_recipe(recipe, changes, out) for recipe in recipes]
        made = fit(given, trial=trial_number(trial), held_out=held_out, seeds=seeds, again=again)
    click.echo(json.dumps(made.to_json()) if as_json else made.words())


def trial_number(trial: str) -> int | str:
    """The number of a trial, or best."""
    if trial == "best" or trial.isdecimal():
        return trial if trial == "best" else int(trial)
    raise click.BadParameter(f"{trial!r} is neither a number nor best", param_hint="--trial")


def cross_validate(read_recipe: Callable[[], Recipe], as_json: bool, **how: bool) -> int:
    """Cross-validate a recipe, show its scores, and return the exit code."""
    from crosstune.progress import choose_progress

    with only_results_on_stdout():
        recipe = read_recipe()
        if recipe.folds.outer:
            from crosstune.nested import nested_cross_validate

            nested = nested_cross_validate(recipe, progress=choose_progress(), **how)
        else:
            from crosstune.crossval import cross_validate

            report = cross_validate(recipe, progress=choose_progress(), **how).to_json()
    if recipe.folds.outer:
        click.echo(json.dumps(nested.to_json()) if as_json else nested.sentence)
        return EXIT_LANE_FAILED if nested.failed else 0
    if as_json:
        click.echo(json.dumps(report))
    else:
        from crosstune.report.score_table import show_scores

        show_scores(report)
    return EXIT_LANE_FAILED if report["failed"] else 0
