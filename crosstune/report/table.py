"""A table for the terminal whose numbers are never cut: a column that finds no room is left out, and named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDEST = 10_000


def show_tables(tables: Sequence[Table], console: Console, *, may_go: Sequence[str] = ()) -> None:
    """Print tables whole. On a terminal too narrow for one, its columns of `may_go` are left out, first to last."""
    gone: dict[str, None] = {}
    for table in tables:
        gone |= dict.fromkeys(_make_room(table, console, may_go))
        room = console.width
        console.width = max(room, whole_width(table, console))
        console.print(table)
        console.width = room
    if gone:
        console.print(f"no room for {', '.join(gone)}: a wider terminal or --json has them", soft_wrap=True)


def _make_room(table: Table, console: Console, may_go: Sequence[str]) -> Iterator[str]:
    """Take columns away until a terminal has room for the others; their names."""
    for name in may_go:
        if not console.is_terminal or whole_width(table, console) <= console.width:
            return
        headers = [column.header for column in table.columns]
        if name in headers:
            del table.columns[headers.index(name)]
            yield name


def whole_width(table: Table, console: Console) -> int:
    """Characters of a line of the table when nothing in it is wrapped."""
    return console.measure(table, options=console.options.update(width=WIDEST)).maximum
