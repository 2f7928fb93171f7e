"""A ranking of trials as a table for people: mean, interval, what is claimed against the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crosstune.report.score_table import number
from crosstune.report.table import show_tables

if TYPE_CHECKING:
    from rich.table import Table

WORDS = {
    "best": "best", "worse": "worse", "equivalent": "as good", "unclear": "can't be told", "other rows": "other rows",
    "other tokens": "other tokens", "failed": "no score",
}  # fmt: skip
COMPARED = ("behind best", "p (Holm)", "P(best)", "P(last)")  # of two trials at least
MAY_GO = ("P(last)", "p (Holm)", "P(best)", "behind best", "folds")  # the first first, on a narrow terminal
NAME_WIDTH = 30  # characters of a trial's name before it is folded


def show_ranking(rows: Sequence[Mapping[str, Any]], metric: str, sentence: str, warnings: Sequence[str] = ()) -> None:
    """Print one line a trial, best first, then what may be concluded."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)  # settings have brackets: [q_proj,v_proj]
    show_tables([ranking_table(rows, metric)], console, may_go=MAY_GO)
    for warning in warnings:
        console.print(f"note: {warning}")
    console.print(sentence, soft_wrap=True)


def ranking_table(rows: Sequence[Mapping[str, Any]], metric: str) -> Table:
    """One line a trial, best first."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = [row["name"] + (f" ({row['note']})" if row["note"] else "") for row in rows]
    table = Table(box=box.SIMPLE)
    table.add_column("trial", overflow="fold", max_width=NAME_WIDTH)
    compared = COMPARED if len(rows) > 1 else ()
    for name in (metric, "95%", "folds", *compared, "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, row in zip(names, rows, strict=True):
        interval = "–" if row["low"] is None else f"{number(row['low'])}–{number(row['high'])}"
        against = (
            number(row["behind_best"]), number(row["p_adjusted"]), number(row["p_best"], 2), number(row["p_last"], 2),
        )  # fmt: skip
        table.add_row(
            Text(name), number(row[metric]), interval, str(row["folds"]), *against[: len(compared)],
            WORDS[row["verdict"]],
        )  # fmt: skip
    return table
