"""A ranking of trials as a table for people: mean, interval, what is claimed against the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crosstune.score_table import number

WORDS = {
    "best": "best", "worse": "worse", "equivalent": "as good", "unclear": "can't be told", "other rows": "other rows",
    "other tokens": "other tokens", "failed": "no score",
}  # fmt: skip


def show_ranking(rows: Sequence[Mapping[str, Any]], metric: str, sentence: str, warnings: Sequence[str] = ()) -> None:
    """Print one line a trial, best first, then what may be concluded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)  # settings have brackets: [q_proj,v_proj]
    table = Table(box=box.SIMPLE)
    table.add_column("trial", overflow="fold")
    for name in (metric, "95%", "folds", "behind best", "p (Holm)", "P(best)", "P(last)", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        interval = "–" if row["low"] is None else f"{number(row['low'])}–{number(row['high'])}"
        note = f" ({row['note']})" if row["note"] else ""
        table.add_row(
            row["name"] + note, number(row[metric]), interval, str(row["folds"]), number(row["behind_best"]),
            number(row["p_adjusted"]), number(row["p_best"], 2), number(row["p_last"], 2), WORDS[row["verdict"]],
        )  # fmt: skip
    console.print(table)
    for warning in warnings:
        console.print(f"note: {warning}")
    console.print(sentence, soft_wrap=True)
