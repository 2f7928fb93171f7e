"""Options that several verbs share, and what keeps stdout for results."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from crosstune.recipe.recipe import Recipe

json_flag = click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line of stdout.")
out_option = click.option("--out", metavar="DIR", help="The run folder (the recipe's output, if given).")
changes_argument = click.argument("changes", nargs=-1, metavar="[KEY=VALUE]...")


class RecipeCommand(click.Command):
    """A command whose help ends with every option of a recipe, read from where each is described."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from crosstune.recipe.recipe import options

        with formatter.section("Recipe (also as KEY=VALUE)"):
            formatter.write_dl(
                [(o.name, f"{o.description} ({o.type}; {o.default_words})") for o in options()],
                col_max=28,
                col_spacing=2,
            )


def load_recipe(path: str, changes: Sequence[str], out: str | None = None) -> Recipe:
    """The recipe of a file with changes; `out` is taken as it is, whatever characters it has."""
    from crosstune.recipe.recipe import Recipe

    recipe = Recipe.load(path, changes)
    return recipe.model_copy(update={"output": out}) if out else recipe


@contextlib.contextmanager
def only_results_on_stdout() -> Iterator[None]:
    """What other libraries print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def say(words: object, facts: Mapping[str, Any], as_json: bool) -> None:
    """One JSON object of `facts`, or `words` for people."""
    click.echo(json.dumps(facts) if as_json else words)


def show(result: Any, as_json: bool) -> None:
    """One JSON object, or what `show` prints for people."""
    if as_json:
        click.echo(json.dumps(result.to_json()))
    else:
        from rich.console import Console

        result.show(Console(markup=False))
