"""init, lint, plan, doctor, compare, report: the verbs that look and train nothing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from crosstune.verbs.words import changes_argument, json_flag, load_recipe, only_results_on_stdout, say, show


@click.command()
@click.argument("data")
@click.option("--model", required=True, metavar="NAME", help="Hub id, folder or .gguf file of the base model.")
@click.option(
    "--out", metavar="FILE", default="recipe.yaml", show_default=True, help="The recipe to write; - for stdout."
)
@json_flag
def init(data: str, model: str, out: str, as_json: bool) -> None:
    """Look at DATA and write a commented recipe for it."""
    from crosstune.init import describe_data, write_recipe

    text = describe_data(data, model)
    if out != "-":
        write_recipe(out, text)
        click.echo(f"{out} written; next: crosstune run {shlex.quote(out)}", err=True)
    if as_json:
        say("", {"recipe": None if out == "-" else out, "text": text}, as_json)
    elif out == "-":
        click.echo(text, nl=False)


@click.command()
@click.argument("source", metavar="RECIPE|DATA")
@changes_argument
@click.option(
    "--model", metavar="NAME", help="Hub id, folder or .gguf file: what its tokenizer does to DATA is looked at."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a finding and line.")
def lint(source: str, changes: tuple[str, ...], model: str | None, as_json: bool) -> int:
    """List everything wrong with a recipe or a data file, by row.

    Exit code 2 if anything is an error.
    """
    from crosstune.data.lint import lint as look
    from crosstune.progress import choose_progress

    with only_results_on_stdout():
        is_recipe = Path(source).suffix in (".yaml", ".yml")
        report = look(load_recipe(source, changes) if is_recipe else source, model=model, progress=choose_progress())
    if as_json:
        click.echo(report.to_json_lines(), nl=False)
    else:
        report.show()
    return report.exit_code


@click.command()
@click.argument("recipe")
@changes_argument
@click.option("--gpu", metavar="NAME", help="Plan for this GPU: t4, l4, 4090, a100-40, h100, …")
@click.option("--memory", metavar="SIZE", help="Plan for a device with this much free memory: 16GiB.")
@click.option("--lanes", type=click.IntRange(min=1), help="Adapters in all (default: folds × trials).")
@click.option("--picture", metavar="FILE", help="Draw the parts, with the limit as a line: .svg or .png.")
@json_flag
def plan(
    recipe: str,
    changes: tuple[str, ...],
    gpu: str | None,
    memory: str | None,
    lanes: int | None,
    picture: str | None,
    as_json: bool,
) -> int:
    """Say what fits on a device, before anything is loaded.

    And how RECIPE must be set for it. Exit code 2 if nothing fits.
    """
    from crosstune.memory.explain import explain

    with only_results_on_stdout():
        if picture and Path(picture).suffix.lower() not in (".svg", ".png"):
            raise click.BadParameter(f"{picture!r} ends neither in .svg nor in .png", param_hint="--picture")
        explained = explain(load_recipe(recipe, changes), gpu=gpu, memory=memory, lanes=lanes)
        if picture:
            explained.save_picture(Path(picture))
    show(explained, as_json)
    return explained.exit_code


@click.command()
@json_flag
def doctor(as_json: bool) -> int:
    """Say what this computer has, and what is missing.

    And what a run would use here, and why. Exit code 2 if a run couldn't start.
    """
    from crosstune.doctor import look

    checkup = look()
    show(checkup, as_json)
    return checkup.exit_code


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--metric", help="Rank by this metric (default: the sweep's, else the loss).")
@json_flag
def compare(runs: tuple[str, ...], metric: str | None, as_json: bool) -> None:
    """Rank the trials of one run or several.

    And say what may be concluded.
    """
    from crosstune.report.ranking_table import show_ranking
    from crosstune.results.result import Result

    ranking = Result.read(runs[0]).compare(*runs[1:], metric=metric)
    if as_json:
        said = {"metric": ranking.metric, "sentence": ranking.sentence, "warnings": list(ranking.warnings)}
        click.echo(json.dumps({**said, "trials": ranking.to_json()}))
    else:
        show_ranking(ranking.to_json(), ranking.metric, ranking.sentence, ranking.warnings)


@click.command()
@click.argument("run")
@click.option("--out", metavar="FILE", help="The page to write (default: report.html in the run folder).")
@json_flag
def report(run: str, out: str | None, as_json: bool) -> None:
    """Write one HTML page of a run.

    With its scores, curves, hardest rows and recipe; it needs nothing else to be shown.
    """
    from crosstune.report.report import write_report

    page = write_report(run, out)
    say(page, {"page": str(page)}, as_json)
