"""The verbs of crosstune as commands. No logic: each reads its words, calls one function and shows what it returns.

Everything but click is imported inside the verbs, so that `crosstune --help` answers at once and never loads torch.
stdout is for results (with --json: one object, as its last line); progress and errors go to stderr.
Exit codes: 0 done, 2 refused, 3 at least one lane failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from crosstune import __version__
from crosstune.errors import EXIT_LANE_FAILED, EXIT_REFUSED, CrosstuneError
from crosstune.interrupt import Interrupted

if TYPE_CHECKING:
    from crosstune.recipe import Recipe

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is shown as problem and fix, never as a traceback."""
    try:
        code = crosstune.main(args=arguments, prog_name="crosstune", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_REFUSED
    except CrosstuneError as error:
        click.echo(f"error: {error.problem}\n  {error.fix}", err=True)
        return error.exit_code
    except click.Abort as error:  # click's word for KeyboardInterrupt
        click.echo("interrupted; the same command goes on from here", err=True)
        return error.__cause__.exit_code if isinstance(error.__cause__, Interrupted) else EXIT_INTERRUPTED
    return int(code or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="crosstune")
def crosstune() -> None:
    """Cross-validated LoRA fine-tuning: the base loaded once, every fold an adapter, all folds trained together."""


class RecipeCommand(click.Command):
    """A command whose help ends with every option of a recipe, read from where each is described."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from crosstune.recipe import options

        with formatter.section("Recipe (also as KEY=VALUE)"):
            formatter.write_dl(
                [(o.name, f"{o.description} ({o.type}; {o.default_words})") for o in options()],
                col_max=28,
                col_spacing=2,
            )


json_flag = click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
out_option = click.option("--out", metavar="DIR", help="The run folder (the recipe's output, if given).")
changes_argument = click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...")


@crosstune.command(cls=RecipeCommand)
@click.argument("recipe")
@changes_argument
@out_option
@json_flag
def run(recipe: str, changes: tuple[str, ...], out: str | None, as_json: bool) -> int:
    """Cross-validate: train every fold of RECIPE, score each on rows it never saw.

    The same command goes on with an unfinished run, and says so if the run is finished.
    """
    return _cross_validate(lambda: _load_recipe(recipe, changes, out), as_json)


@crosstune.command()
@changes_argument
@click.option("--rows", type=int, help="Question–answer rows.")
@click.option("--folds", type=int, help="Folds, stratified by category.")
@click.option("--epochs", type=float, help="Passes over the training rows.")
@click.option("--model", metavar="PATH", help="Another model: hub id, folder or .gguf file.")
@click.option("--out", metavar="DIR", default="runs/demo", show_default=True, help="The run folder.")
@json_flag
def demo(changes: tuple[str, ...], model: str | None, out: str, as_json: bool, **sizes: Any) -> int:
    """Cross-validate SmolLM2-135M-Instruct on question–answer rows: minutes on two cores, no GPU needed."""
    from crosstune.demo import DemoSize, demo_recipe
    from crosstune.progress import choose_progress

    given = {name: value for name, value in sizes.items() if value is not None}
    size = DemoSize(**given)
    return _cross_validate(
        lambda: demo_recipe(size, changes, out=out, model=model, progress=choose_progress()), as_json
    )


@crosstune.command()
@click.argument("data")
@click.option("--model", required=True, metavar="NAME", help="Hub id, folder or .gguf file of the base model.")
@click.option(
    "--out", metavar="FILE", default="recipe.yaml", show_default=True, help="The recipe to write; - for stdout."
)
def init(data: str, model: str, out: str) -> None:
    """Look at DATA and write a commented recipe for it."""
    from crosstune.init import describe_data, write_recipe

    text = describe_data(data, model)
    if out == "-":
        click.echo(text, nl=False)
    else:
        write_recipe(out, text)
        click.echo(f"{out} written; next: crosstune run {out}", err=True)


@crosstune.command()
@click.argument("run")
@click.option("--out", metavar="FILE", help="The page to write (default: report.html in the run folder).")
def report(run: str, out: str | None) -> None:
    """Write one HTML page of RUN's scores, curves and hardest rows."""
    from crosstune.report import write_report

    click.echo(write_report(run, out))


@crosstune.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--metric", help="Rank by this metric (default: the sweep's, else the loss).")
@json_flag
def compare(runs: tuple[str, ...], metric: str | None, as_json: bool) -> None:
    """Rank the trials of one run or several, and say what may be concluded."""
    from crosstune.ranking_table import show_ranking
    from crosstune.result import Result

    ranking = Result.read(runs[0]).compare(*runs[1:], metric=metric)
    if as_json:
        click.echo(json.dumps({"metric": ranking.metric, "sentence": ranking.sentence, "trials": ranking.to_json()}))
    else:
        show_ranking(ranking.to_json(), ranking.metric, ranking.sentence, ranking.warnings)


def _load_recipe(path: str, changes: Sequence[str], out: str | None) -> Recipe:
    from crosstune.recipe import Recipe

    recipe = Recipe.load(path, changes)
    return recipe.model_copy(update={"output": out}) if out else recipe


def _cross_validate(read_recipe: Callable[[], Recipe], as_json: bool) -> int:
    from crosstune.progress import choose_progress

    with _only_results_on_stdout():
        recipe = read_recipe()
        from crosstune.crossval import cross_validate

        result = cross_validate(recipe, progress=choose_progress())
        report = result.to_json()
    if as_json:
        click.echo(json.dumps(report))
    else:
        from crosstune.score_table import show_scores

        show_scores(report)
    return EXIT_LANE_FAILED if report["failed"] else 0


@contextlib.contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    """What other libraries print goes to stderr; bitsandbytes' advice about a CPU kernel, at import, goes nowhere."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        yield
