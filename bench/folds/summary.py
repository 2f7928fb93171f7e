"""Lines of contestants → a row a length: ratios, the floor's share, whether the losses agree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

SMALL = ("trl-small", "unsloth-small")
OTHER_STEPS = ("trl-grouped",)  # other rows make up a step
# Largest difference of a fold's loss that is noise, as a share of what the fold learnt. CPU: sums in another order;
# GPU: products in bf16, adapters in bf16 (TRL) or fp32.
NOISE = {"CPU": 0.01, "GPU": 0.05}
CONTEXT_GIB = 1.0  # beside what PyTorch reserves
Line = dict[str, Any]


def summaries(lines: Iterable[Line]) -> list[Line]:
    """One a job that crosstune finished. Of what was run twice, the newest counts."""
    newest: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if line["kind"] in ("result", "floor"):
            kernels = line.get("kernels") if line["contestant"] == "crosstune" else None
            job = (line["tokens"], line.get("lanes"), line.get("cap_gib"), line.get("by_name"))
            newest[(line["contestant"], *job, kernels)] = line
    ours = [line for line in newest.values() if line["contestant"] == "crosstune"]
    return [summary(line, beside(line, newest.values())) for line in ours]


def beside(ours: Line, lines: Iterable[Line]) -> list[Line]:
    """What others did of the same job; under a cap also those that held no more without it. The floor holds none."""
    others = [line for line in lines if line["tokens"] == ours["tokens"] and line["contestant"] != "crosstune"]
    cap = ours.get("cap_gib")
    same = [line for line in others if line["kind"] == "floor" or line.get("cap_gib") == cap]
    seen = {line["contestant"] for line in same}
    free = (line for line in others if line["contestant"] not in seen and not line.get("cap_gib"))
    return same + [line for line in free if cap and line["reserved_gib"] and line["reserved_gib"] + CONTEXT_GIB <= cap]


def summary(ours: Line, lines: list[Line]) -> Line:
    """One row. With one lane all seconds are of one fold; else of all lanes, against as many of the loop's folds."""
    results = [line for line in lines if line["kind"] == "result"]
    floor = next((line for line in lines if line["kind"] == "floor"), None)
    scale = ours["lanes"] / ours["folds"]  # jobs of K folds
    mine = 1 / ours["folds"] if ours["lanes"] == 1 else 1.0
    row = {
        "tokens": ours["tokens"],
        "lanes": ours["lanes"],
        "cap_gib": ours.get("cap_gib"),
        "kernels": ours.get("kernels"),
        "by_name": ours.get("by_name", False),
        "load_s": ours.get("load_s"),  # of the first call, not in whole_s
        "steady_s": mine * ours["steady_s"],
        "steady_wave_s": mine * ours["steady_wave_s"],
        "steady_call_s": ours["steady_call_s"] if ours["lanes"] > 1 else None,
        "whole_s": ours["whole_s"] if ours["lanes"] > 1 else None,
        "steady_s_a_lane": mine * ours["steady_s"] / ours["lanes"],
        "tokens_per_s": ours["tokens_trained"] / ours["steady_s"],
        "peak_gib": ours["peak_gib"],
        "losses_agree": agreement(ours, results),
    }
    for name, found in (("small", small(results)), ("best", best(results))):
        if found is None:
            continue
        row[name] = found["contestant"]
        row[f"{name}_peak_gib"] = found["peak_gib"]
        row[f"{name}_steady_s"] = scale * found["steady_s"]
        row[f"{name}_steady_x"] = row[f"{name}_steady_s"] / row["steady_s"]
        row[f"{name}_steady_wave_x"] = row[f"{name}_steady_s"] / row["steady_wave_s"]
        if row["whole_s"]:
            row[f"{name}_whole_s"] = scale * found["whole_s"]
            row[f"{name}_whole_x"] = row[f"{name}_whole_s"] / row["whole_s"]
            row[f"{name}_steady_call_x"] = row[f"{name}_steady_s"] / row["steady_call_s"]
    if floor is not None:
        row["floor_s"] = scale * floor["seconds"]
        row["floor_share"] = row["floor_s"] / row["steady_s"]
        row["step_share"] = step_share(ours, floor)
    return row


def step_share(ours: Line, floor: Line) -> float | None:
    """Share of the matrix rate in the median training step; none where steps differ in length."""
    if ours["tokens"] == "mixed":
        return None
    jobs = ours["lanes"] / ours["folds"] if ours["lanes"] > 1 else 1  # one lane alone still goes through all folds
    training = jobs * floor["flops"] * 4 / (4 + 2 / (ours["folds"] - 1))  # a row trains in all folds but one
    return float(training / ours["steps"] / ours["split"]["median step"] / (floor["tflops_a_second"] * 1e12))


def small(results: list[Line]) -> Line | None:
    """TRL with small-card settings."""
    return next((line for line in results if line["contestant"] == "trl-small"), None)


def best(results: list[Line]) -> Line | None:
    """The fastest of all others."""
    return min(
        (line for line in results if line["contestant"] not in SMALL), key=lambda line: line["steady_s"], default=None
    )


def agreement(ours: Line, results: list[Line]) -> Line:
    """Largest difference of a fold's held-out loss from crosstune's, by contestant; whether that is noise.

    What a fold learnt is the untuned base's loss less its own. Where other rows make up a step the difference is listed
    and not judged.
    """
    apart, shares = {}, []
    for line in results:
        pairs = list(zip(ours["losses"], line["losses"], ours["base_losses"], strict=False))
        apart[line["contestant"]] = round(max(abs(mine - other) for mine, other, _ in pairs), 5)
        if line["contestant"] not in OTHER_STEPS:
            shares += [abs(mine - other) / abs(base - mine) for mine, other, base in pairs]
    same_rows = len({line["rows"] for line in (ours, *results)}) == 1
    noise = NOISE["CPU" if ours["card"] == "CPU" else "GPU"]
    return {
        "within_noise": same_rows and all(share <= noise for share in shares),
        "same_rows": same_rows,
        "learnt": round(sum(ours["base_losses"]) / len(ours["losses"]) - sum(ours["losses"]) / len(ours["losses"]), 4),
        "largest_share": round(max(shares, default=0.0), 4),
        "apart": apart,
    }


COLUMNS = {
    "tokens": "tokens", "lanes": "lanes", "cap": "cap_gib", "kernels": "kernels",
    "crosstune s": "steady_s", "wave s": "steady_wave_s", "call s": "steady_call_s", "whole s": "whole_s",
    "loading s": "load_s", "small s": "small_steady_s", "best": "best", "best s": "best_steady_s",
    "× small": "small_steady_x", "× best": "best_steady_x", "whole × small": "small_whole_x",
    "whole × best": "best_whole_x", "floor s": "floor_s", "floor share": "floor_share",
}  # fmt: skip


def show(rows: list[Line]) -> None:
    """A table on the terminal (stderr: stdout holds the lines)."""
    table = Table(title="steady, unless it says whole")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(cell(row.get(key)) for key in COLUMNS.values()))
    console = Console(stderr=True, width=None if Console(stderr=True).is_terminal else 180)
    console.print(table)


def cell(value: Any) -> str:
    """A number in three digits."""
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) and value < 1000 else str(value)
