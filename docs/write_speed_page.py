"""Write the tables of docs/speed.md from measured lines: `python docs/write_speed_page.py`.

bench/folds_*.jsonl are what `python -m bench.folds --out …` wrote on a GPU; without one, the page says so. A file whose
lines lack crosstune's own results is refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.folds.summary import summaries  # noqa: E402

PAGE = ROOT / "docs" / "speed.md"
START, END = "<!-- tables: written by docs/write_speed_page.py -->", "<!-- end of tables -->"
Line = dict[str, Any]


def tables(files: list[Path] | None = None) -> str:
    """Everything between the two marks."""
    found = sorted((ROOT / "bench").glob("folds_*.jsonl")) if files is None else files
    return "\n".join(map(section, found)) or (
        "Nothing measured yet: `python -m bench.folds --out bench/folds_<card>.jsonl` on a GPU makes the lines.\n"
    )


def section(file: Path) -> str:
    """One file of lines."""
    lines = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    rows = summaries(lines)
    if not rows:
        raise SystemExit(f"{file}: no line of crosstune's own results; run python -m bench.folds --out {file}")
    usual, named = ([row for row in rows if row["by_name"] is by_name] for by_name in (False, True))
    parts = [
        head(file, lines), five_folds(usual), other_lanes(usual), loaded_by_name(named), memory(rows, lines),
        loops(lines), losses(rows), not_run(lines), commands(lines),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def head(file: Path, lines: list[Line]) -> str:
    """Card, date, versions, matrix rate."""
    result = next(line for line in reversed(lines) if line["kind"] == "result")
    dates = sorted(line["at"][:10] for line in lines if line["kind"] == "env")
    days = " to ".join(dict.fromkeys([dates[0], dates[-1]])) if dates else "no date"
    versions: dict[str, str] = {}
    for line in lines:
        versions.update(line.get("versions", {}))
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    rates = [line["tflops_a_second"] for line in lines if line["kind"] == "floor"]
    rate = f" Matrix rate measured in the same run: {max(rates):,.0f} TFLOP/s." if rates else ""
    return f"## {result['card']}, {days}\n\n`bench/{file.name}`: {known}.{rate}\n"


def five_folds(rows: list[Line]) -> str:
    """Steady and whole, by length and cap."""
    rows = [row for row in rows if row["lanes"] == 5]
    out = [
        "| tokens | crosstune, steady s | whole s | kernels | TRL small card, steady s | whole s | best peer "
        "| steady s | whole s | × small, steady | whole | × best, steady | whole | floor s | floor / steady |",
        "|---|--:|--:|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ours = ("steady_s", "whole_s", "kernels")
        peers = ("small_steady_s", "small_whole_s", "best", "best_steady_s", "best_whole_s")
        ratios = ("small_steady_x", "small_whole_x", "best_steady_x", "best_whole_x")
        cells = [
            tokens(row), *(cell(row.get(key)) for key in (*ours, *peers)), *(ratio(row.get(key)) for key in ratios),
            cell(row.get("floor_s")), percent(row.get("floor_share")),
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    stages = [
        "",
        "The same, nothing set aside: the wave with its first step, and the whole of a later call (lint, plan, scores "
        "of the untuned base, files). Tokens a second are those of training, over the steady time of all; the median "
        "step's share of the matrix rate is that of training alone.",
        "",
        "| tokens | wave s | × small | × best | later call s | × small | × best | tokens/s | step / matrix rate |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        wave = [cell(row["steady_wave_s"]), ratio(row.get("small_steady_wave_x")), ratio(row.get("best_steady_wave_x"))]
        rate = f"{row['tokens_per_s']:,.0f}"
        call = [cell(row["steady_call_s"]), ratio(row.get("small_steady_call_x")), ratio(row.get("best_steady_call_x"))]
        stages.append(f"| {' | '.join([tokens(row), *wave, *call, rate, percent(row.get('step_share'))])} |")
    return "\n".join([*(out if rows else []), *(stages if rows else [])]) + "\n"


def other_lanes(rows: list[Line]) -> str:
    """One lane alone, and many."""
    found = [row for row in rows if row["lanes"] != 5]
    if not found:
        return ""
    five = {(row["tokens"], row["cap_gib"]): row for row in rows if row["lanes"] == 5}
    out = [
        "Other numbers of lanes, steady; the peers' seconds are for as many folds.\n",
        "| lanes | tokens | crosstune s | s a lane | of 5 lanes | × small | best peer | × best |",
        "|--:|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in found:
        beside = five.get((row["tokens"], row["cap_gib"]))
        cells = [
            str(row["lanes"]), tokens(row), cell(row["steady_s"]), cell(row["steady_s_a_lane"]),
            cell(beside and beside["steady_s_a_lane"]), ratio(row.get("small_steady_x")), cell(row.get("best")),
            ratio(row.get("best_steady_x")),
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
        if row["lanes"] == 1 and beside:
            out.append(f"| 5 over 1 | {tokens(row)} | {ratio(beside['steady_s'] / row['steady_s'])} | | | | | |")
    return "\n".join(out) + "\n"


def loaded_by_name(rows: list[Line]) -> str:
    """Calls that load the base themselves."""
    if not rows:
        return ""
    out = [
        "crosstune loads the base by name; seconds without those of loading, which the first call's are beside.\n",
        "| tokens | lanes | kernels | whole s | loading s | × small, whole | × best, whole | later call s |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [
            f"{row['tokens']}{cap(row)}", str(row["lanes"]), cell(row["kernels"]), cell(row["whole_s"]),
            cell(row["load_s"]), ratio(row.get("small_whole_x")), ratio(row.get("best_whole_x")),
            cell(row["steady_call_s"]),
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def memory(rows: list[Line], lines: list[Line]) -> str:
    """Peaks, and tokens that were padding, of everybody."""
    out = [
        "| tokens | contestant | lanes | peak GiB allocated | reserved | used | as planned | padding, training "
        "| padding, scoring |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for line in newest(lines):
        used = None if line.get("cap_gib") else line.get("used_bytes")  # under a cap what holds the rest is in it
        cells = [
            tokens(line), line["contestant"], str(line["lanes"]), cell(line["peak_gib"]), cell(line["reserved_gib"]),
            gib(used), gib(line.get("plan", {}).get("peak_bytes")),
            percent(line["train_waste"]), percent(line["evaluate_waste"]),
        ]  # fmt: skip
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def loops(lines: list[Line]) -> str:
    """Each loop's folds, one by one."""
    out = [
        "Seconds of each fold of a loop, and of each of crosstune's calls:\n",
        "| tokens | contestant | seconds |",
        "|---|---|---|",
    ]
    for line in newest(lines):
        seconds = line.get("per_fold_s") or line["calls_s"]
        name = line["contestant"] + (f", {line['lanes']} lanes" if line["contestant"] == "crosstune" else "")
        out.append(f"| {tokens(line)} | {name} | {' '.join(map(cell, seconds))} |")
    return "\n".join(out) + "\n"


def losses(rows: list[Line]) -> str:
    """Whether all did the same work."""
    out = [
        "Largest difference of a fold's held-out loss from crosstune's, nats a token, beside what training gained:\n",
        "| tokens | lanes | gained | largest differences | within noise |",
        "|---|--:|--:|---|---|",
    ]
    for row in rows:
        said = row["losses_agree"]
        apart = ", ".join(f"{name} {gap:.4f}" for name, gap in said["apart"].items()) or "–"
        fine = "yes" if said["within_noise"] else "no" if said["same_rows"] else "no: other rows"
        out.append(f"| {tokens(row)} | {row['lanes']} | {said['learnt']:.3f} | {apart} | {fine} |")
    return "\n".join(out) + "\n"


def not_run(lines: list[Line]) -> str:
    """Who was absent or failed, and why."""
    out = []
    for line in lines:
        if line["kind"] in ("absent", "failed"):
            last = line.get("reason") or line["said"].strip().splitlines()[-1]
            job = line.get("tokens") or " ".join(line.get("job", []))
            out.append(f"- {line['contestant']}{' ' + job if job else ''}{cap(line)}{named(line)}: {last[:200]}")
    return "\n".join(["Not run, or failed:\n", *dict.fromkeys(out)]) + "\n" if out else ""


def commands(lines: list[Line]) -> str:
    """What was typed."""
    typed = dict.fromkeys(line["command"] for line in lines if line["kind"] == "env")
    return "\n".join(["```", *typed, "```"]) + "\n"


def newest(lines: list[Line]) -> list[Line]:
    """Results, the last one of each job."""
    found = {
        (line["tokens"], line.get("cap_gib"), line.get("by_name"), line["contestant"], line["lanes"]): line
        for line in lines
        if line["kind"] == "result"
    }
    return list(found.values())


def tokens(line: Line) -> str:
    """The job's name."""
    return f"{line['tokens']}{cap(line)}{named(line)}"


def cap(line: Line) -> str:
    """What of the card was to be had, where that wasn't all."""
    return f", {line['cap_gib']:g} GiB" if line.get("cap_gib") else ""


def named(line: Line) -> str:
    """Whether crosstune loaded the base itself."""
    return ", by name" if line.get("by_name") else ""


def cell(value: Any) -> str:
    """A number in three digits."""
    if value is None:
        return "–"
    return f"{value:#.3g}".rstrip(".") if isinstance(value, float) else str(value)


def gib(count: int | None) -> str:
    """Bytes for a cell of a table."""
    return cell(count / 2**30 if count else None)


def ratio(value: float | None) -> str:
    """How many times."""
    return "–" if value is None else f"{cell(value)}×"


def percent(value: float | None) -> str:
    """A share."""
    return "–" if value is None else f"{100 * value:.1f}%"


def page() -> str:
    """The whole page, tables renewed."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{tables()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
