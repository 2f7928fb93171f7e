"""Run → one HTML page that needs nothing else: scores, curves, the hardest rows, the recipe. Everything is escaped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosstune import __version__
from crosstune.errors import RunError
from crosstune.recipe.yaml_text import dump_yaml, write_text
from crosstune.report.chart import interval_bars, loss_chart
from crosstune.results.result import make_report
from crosstune.results.review import learning_curve, read_review, say_learning_curve
from crosstune.store.run import Run
from crosstune.units import bytes_words, seconds_words, setting_words

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

    pages = Environment(loader=PackageLoader("crosstune.report", ""), autoescape=True, undefined=StrictUndefined)
    pages.filters["number"] = lambda value, digits=4: "–" if value is None else f"{value:.{digits}f}"
    pages.filters["setting"] = setting_words
    pages.filters["signed"] = lambda value: f"{value:+.4f}"
    report, recipe = make_report(run), run.stored_recipe()
    metric = str(recipe["sweep"].get("metric", "loss"))
    ranking = report["ranking"] if len(report["trials"]) > 1 else []
    return pages.get_template("report.html.j2").render(
        title=f"Cross-validation {run.folder.name}",
        sentence=sentence(report),
        facts=facts(report, recipe),
        trials=[{**trial, "chart": trial_chart(run, trial)} for trial in report["trials"]],
        failed=report["failed"],
        conclusion=report["conclusion"] if len(report["trials"]) > 1 else "",
        warnings=report["warnings"],
        ranking=[{**row, "bar": bar} for row, bar in zip(ranking, interval_bars(ranking, metric), strict=True)],
        metric=metric,
        metrics=metric_rows(report),
        baselines=list(report["baselines"]),
        labels=report["labels"],
        curve=_learning_curve(run),
        suspects=read_review(run)[:MOST_SUSPECTS] if (run.folder / "suspects.csv").is_file() else (),
        hardest=hardest_rows(run, report["best"]),
        recipe=dump_yaml(recipe),
        seconds=seconds_words(report["seconds"]),
        peak=bytes_words(report["peak_bytes"]) if report["peak_bytes"] else "",
        version=__version__,
    )


def sentence(report: Mapping[str, Any]) -> str:
    """What the numbers say, in one sentence, of the best trial."""
    best = best_trial(report)
    if best is None:
        return "No fold has finished."
    better = sum(fold["loss"] < fold["base_loss"] for fold in best["folds"])
    low, high = best["interval95"] or (None, None)
    known = f" (95%: {low:.4f} to {high:.4f})" if low is not None else ""
    return (
        f"On rows never seen, trial {best['trial']} has a mean loss of {best['mean']:.4f}{known}; "
        f"it is below the untuned base's in {better} of {len(best['folds'])} folds."
    )


def best_trial(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The trial that ranks first, or else the first with a loss; None where no fold has finished."""
    scored = [trial for trial in report["trials"] if trial["mean"] is not None]
    return next((trial for trial in scored if trial["trial"] == report["best"]), scored[0] if scored else None)


def facts(report: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, str]:
    """The few numbers that one looks for first."""
    best = best_trial(report)
    if best is None:
        return {}
    base = float(np.mean([fold["base_loss"] for fold in best["folds"]]))
    kind = "a splitter from Python" if recipe["folds"]["splitter"] else recipe["folds"]["kind"]
    return {
        "mean held-out loss": f"{best['mean']:.4f}",
        "untuned base": f"{base:.4f}",
        "perplexity": f"{np.exp(base):.2f} → {np.exp(best['mean']):.2f}",
        "folds": f"{best['finished']} of {best['asked']}, {kind}",
        "trials": str(len(report["trials"])),
        "model": Path(str(recipe["model"]["name"])).name,
    }


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


def trial_chart(run: Run, trial: Mapping[str, Any]) -> dict[str, Any] | None:
    """Losses of a trial's folds by step, and its untuned base's; None before anything is trained."""
    number, bases = trial["trial"], [fold["base_loss"] for fold in trial["folds"]]
    training = {
        fold: event["losses"]
        for (of, fold), event in sorted(run.finished_lanes().items(), key=str)
        if of == number and fold is not None
    }
    held_out: dict[int, list[tuple[int, float | None]]] = {}
    for event in run.events("lane_evaluated"):
        if event["trial"] == number and event["fold"] is not None:
            held_out.setdefault(event["fold"], []).append((event["step"], event["loss"]))
    return loss_chart(training, held_out, float(np.mean(bases)) if bases else None) if training else None


def hardest_rows(run: Run, trial: int | None) -> list[dict[str, Any]]:
    """The rows with the highest out-of-fold loss of one trial, the best: a bad setting's rows are all hard."""
    table = run.read_table("out_of_fold.parquet")
    if table is None:
        return []
    names = ("row", "fold", "trial", "tokens", "base_loss", "loss")
    order = np.argsort(-table["loss"], kind="stable")
    order = order[table["trial"][order] == trial][:HARDEST_ROWS]
    return [{name: table[name][place].item() for name in names} for place in order]
