"""Run → one HTML page that needs nothing else: scores, curves, the hardest rows, the recipe. Everything is escaped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosstune import __version__
from crosstune.errors import RunError
from crosstune.result import make_report
from crosstune.review import learning_curve, read_review, say_learning_curve
from crosstune.store.run import Run
from crosstune.units import bytes_words, seconds_words
from crosstune.yaml_text import dump_yaml, write_text

WIDTH, HEIGHT, MARGIN = 800, 220, 20
HARDEST_ROWS = 20
MOST_SUSPECTS = 50


def write_report(folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the page of a run, `report.html` in its folder unless `out` says otherwise; return its path."""
    run = Run.read(folder)
    page = Path(out) if out else run.folder / "report.html"
    write_text(page, report_page(run))
    return page


def report_page(run: Run) -> str:
    """The page's HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(loader=PackageLoader("crosstune", ""), autoescape=True, undefined=StrictUndefined)
    pages.filters["number"] = lambda value, digits=4: "–" if value is None else f"{value:.{digits}f}"
    report = make_report(run)
    return pages.get_template("report.html.j2").render(
        title=f"Cross-validation {run.folder.name}",
        sentence=sentence(report),
        trials=[{**trial, "chart": loss_chart(run, trial["trial"])} for trial in report["trials"]],
        failed=report["failed"],
        conclusion=report["conclusion"] if len(report["trials"]) > 1 else "",
        warnings=report["warnings"],
        ranking=report["ranking"] if len(report["trials"]) > 1 else [],
        metric=str(run.stored_recipe()["sweep"].get("metric", "loss")),
        metrics=metric_rows(report),
        baselines=list(report["baselines"]),
        labels=report["labels"],
        curve=_learning_curve(run),
        suspects=read_review(run)[:MOST_SUSPECTS] if (run.folder / "suspects.csv").is_file() else (),
        hardest=hardest_rows(run, report["best"]),
        recipe=dump_yaml(run.stored_recipe()),
        seconds=seconds_words(report["seconds"]),
        peak=bytes_words(report["peak_bytes"]) if report["peak_bytes"] else "",
        version=__version__,
        width=WIDTH,
        height=HEIGHT,
    )


def sentence(report: Mapping[str, Any]) -> str:
    """What the losses say, in one sentence, of the trial that comes first in the ranking, or is the first."""
    scored = [trial for trial in report["trials"] if trial["mean"] is not None]
    if not scored:
        return "No fold has finished."
    best = next((trial for trial in scored if trial["trial"] == report["best"]), scored[0])
    better = sum(fold["loss"] < fold["base_loss"] for fold in best["folds"])
    low, high = best["interval95"] or (None, None)
    known = f" (95%: {low:.4f} to {high:.4f})" if low is not None else ""
    return (
        f"On rows never seen, trial {best['trial']} has a mean loss of {best['mean']:.4f}{known}; "
        f"it is below the untuned base's in {better} of {len(best['folds'])} folds."
    )


def metric_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a trial and metric: over folds, pooled, and the baselines on the same rows."""
    return [
        {"trial": trial["trial"], "metric": name, **summary,
         "baselines": [scores.get(name) for scores in report["baselines"].values()]}
        for trial in report["trials"]
        for name, summary in trial["metrics"].items()
    ]  # fmt: skip


def _learning_curve(run: Run) -> str:
    """What twice the rows would change, where shares were swept."""
    try:
        return say_learning_curve(learning_curve(run))
    except RunError:
        return ""


def loss_chart(run: Run, trial: int) -> dict[str, Any] | None:
    """Training losses of a trial's folds as polylines, held-out losses as dots; None before anything is trained."""
    curves = [event["losses"] for key, event in sorted(run.finished_lanes().items(), key=str) if key[0] == trial]
    dots = [(event["step"], event["loss"]) for event in run.events("lane_evaluated") if event["trial"] == trial]
    values = [loss for curve in curves for loss in curve] + [loss for _, loss in dots]
    values = [value for value in values if value is not None and np.isfinite(value)]
    if not curves or not values:
        return None
    steps, low, high = max(map(len, curves)), min(values), max(values)
    across, down = (WIDTH - 2 * MARGIN) / max(1, steps - 1), (HEIGHT - 2 * MARGIN) / max(high - low, 1e-9)

    def place(step: int, loss: float) -> tuple[float, float]:
        return round(MARGIN + (step - 1) * across, 1), round(HEIGHT - MARGIN - (loss - low) * down, 1)

    return {
        "lines": [" ".join(f"{x},{y}" for x, y in points(curve, place)) for curve in curves],
        "dots": [place(step, loss) for step, loss in dots if loss is not None],
        "lowest": low,
        "highest": high,
        "steps": steps,
    }


def points(curve: Sequence[float | None], place: Any) -> list[tuple[float, float]]:
    return [place(step, loss) for step, loss in enumerate(curve, start=1) if loss is not None]


def hardest_rows(run: Run, trial: int | None) -> list[dict[str, Any]]:
    """The rows with the highest out-of-fold loss of one trial, the best: a bad setting's rows are all hard."""
    table = run.read_table("out_of_fold.parquet")
    if table is None:
        return []
    names = ("row", "fold", "trial", "tokens", "base_loss", "loss")
    order = np.argsort(-table["loss"], kind="stable")
    order = order[table["trial"][order] == trial][:HARDEST_ROWS]
    return [{name: table[name][place].item() for name in names} for place in order]
