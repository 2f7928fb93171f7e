"""Write the tables of docs/memory.md from readings: `python docs/write_memory_page.py`.

bench/memory_*.jsonl are what `python -m bench.memory` wrote on a GPU; without one, the page says so.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "memory.md"
START, END = "<!-- tables: written by docs/write_memory_page.py -->", "<!-- end of tables -->"
MIB = 1 << 20


def tables() -> str:
    """Everything between the two marks."""
    files = sorted((ROOT / "bench").glob("memory_*.jsonl"))
    parts = [table(file) for file in files] or [
        "No readings of the grid yet: `python -m bench.memory --out …` makes them.\n"
    ]
    return "\n".join(parts)


def table(file: Path) -> str:
    """One file of readings: misses in all, then cell by cell."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    env = next((line for line in lines if line["kind"] == "env"), {})
    cells = [line for line in lines if line["kind"] == "cell" and line.get("allocated")]
    edges = [line for line in lines if line["kind"] == "edge"]
    out = [
        f"`bench/{file.name}`: {env.get('gpu', '')}, torch {env.get('torch', '')}, {len(cells or edges)} settings.\n"
    ]
    if cells:
        out += [misses(cells), within(cells), *rows_of(cells)]
    if edges:
        out += [
            "| model | GiB | lanes × rows × tokens | recomputed | runs | one layer less |",
            "|---|--:|---|--:|---|---|",
        ]
        out += [
            f"| {e['model']} {e['quantization']} | {e['gib']} | {e['lanes']} × {e['rows']} × {e['tokens']} | "
            f"{e['checkpointed']} | {yes(e['runs'])} | {yes(e.get('larger_runs'))} |"
            for e in edges
        ]
    return "\n".join(out) + "\n"


def misses(cells: list[dict[str, Any]]) -> str:
    """Median and extremes of each figure's error."""
    out = ["| predicted against measured | median | lowest | highest |", "|---|--:|--:|--:|"]
    for words, said, real in FIGURES:
        found = [100 * (cell[said] / cell[real] - 1) for cell in cells]
        out.append(f"| {words} | {statistics.median(found):+.2f}% | {min(found):+.2f}% | {max(found):+.2f}% |")
    return "\n".join(out) + "\n"


def within(cells: list[dict[str, Any]]) -> str:
    """How many cells meet the goals."""
    out = []
    for words, said, real, share, least in (
        ("rehearsed allocated bytes within 0.5% or 32 MiB", "dry_allocated", "allocated", 0.005, 32),
        ("rehearsed reserved bytes within 3% or 128 MiB", "dry_reserved", "reserved", 0.03, 128),
        ("allocated bytes of the closed form within 2%", "closed_allocated", "allocated", 0.02, 0),
        ("rehearsed used bytes within 3%", "dry_used", "used", 0.03, 0),
        ("used bytes of the closed form within 3%", "closed_used", "used", 0.03, 0),
    ):
        met = [abs(cell[said] - cell[real]) <= max(share * cell[real], least * MIB) for cell in cells]
        out.append(f"{words} in {sum(met)} of {len(met)}")
    words = "; ".join(out)
    return f"{words[0].upper()}{words[1:]}.\n"


FIGURES = (
    ("rehearsal, allocated", "dry_allocated", "allocated"), ("rehearsal, reserved", "dry_reserved", "reserved"),
    ("rehearsal, device's used bytes", "dry_used", "used"), ("closed form, allocated", "closed_allocated", "allocated"),
    ("closed form, device's used bytes", "closed_used", "used"),
)  # fmt: skip


def rows_of(cells: list[dict[str, Any]]) -> list[str]:
    """The grid, a line a cell."""
    heads = ("model", "lanes × rows × tokens", "recomputed", "rank", "allocated MiB", "rehearsal", "closed form")
    out = [f"| {' | '.join((*heads, 'used MiB', 'rehearsal'))} |", "|---|---|" + "--:|" * 7]
    for c in cells:
        errors = [f"{100 * (c[said] / c[real] - 1):+.2f}%" for _, said, real in FIGURES]
        width = f"{c['lanes']} × {c['rows']} × {c['tokens']}" + ", graphs" * c["recorded"] + ", copies" * c["copies"]
        words = (f"{c['model']} {c['quantization']}", width, str(c["checkpointed"]), str(c["rank"]))
        sizes = (f"{c['allocated'] / MIB:,.0f}", errors[0], errors[3], f"{c['used'] / MIB:,.0f}", errors[2])
        out.append(f"| {' | '.join((*words, *sizes))} |")
    return out


def yes(value: bool | None) -> str:
    """For a cell of a table."""
    return {True: "yes", False: "no", None: ""}[value]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(START)
    PAGE.write_text(f"{head}{START}\n{tables()}{END}{rest.partition(END)[2]}", encoding="utf-8")
