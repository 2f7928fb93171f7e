"""The scores of a run as a table for people, from the same object that `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crosstune.report.table import show_tables
from crosstune.units import bytes_words, seconds_words, setting_words

COLUMNS = ("fold", "rows", "tokens", "base loss", "loss", "perplexity", "token acc.")
MAY_GO = ("perplexity", "tokens", "token acc.", "rows")  # the first first, where a terminal is too narrow


def show_scores(report: Mapping[str, Any]) -> None:
    """Print one table a trial, then what failed, and where the run lies."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)  # settings have brackets: [q_proj,v_proj]
    show_tables([score_table(trial) for trial in report["trials"]], console, may_go=MAY_GO)
    if len(report["trials"]) > 1 or report["baselines"].get("few-shot"):
        console.print(report["conclusion"], soft_wrap=True)
        for warning in report["warnings"]:
            console.print(f"note: {warning}", soft_wrap=True)
    if late := [str(trial["trial"]) for trial in report["trials"] if trial.get("optimistic")]:
        console.print(f"optimistic, trial {', '.join(late)}: held-out rows decided when to stop or which step was kept")
    for name, scores in report["baselines"].items():
        words = ", ".join(f"{metric} {number(value)}" for metric, value in scores.items())
        console.print(f"untuned, {name}: {words}", soft_wrap=True)
    for lane in report["failed"]:
        console.print("failed: " + ", ".join(f"{key} {value}" for key, value in lane.items()))
    for event in report.get("out_of_memory", ()):
        how = ", ".join(f"{name} {value}" for name, value in event["went_on"].items()) or "the same plan"
        console.print(f"out of memory in {event['doing']} after step {event['step']}: went on with {how}")
    peak = f" · peak {bytes_words(report['peak_bytes'])}" if report["peak_bytes"] else ""
    console.print(f"{report['run']} · {seconds_words(report['seconds'])}{peak}", soft_wrap=True)


def score_table(trial: Mapping[str, Any]) -> Any:
    """One trial: a line a fold, then the mean and its 95% interval."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    settings = ", ".join(f"{key}={setting_words(value)}" for key, value in trial["settings"].items())
    table = Table(title=Text(f"trial {trial['trial']}" + (f": {settings}" if settings else "")), box=box.SIMPLE)
    table.title_justify = "left"
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    more = [name for name in trial["metrics"] if name not in ("loss", "perplexity", "token_accuracy")]
    for name in more:
        table.add_column(name, justify="right", no_wrap=True)
    for fold in trial["folds"]:
        table.add_row(
            str(fold["fold"]), str(fold["rows"]), str(fold["tokens"]), number(fold["base_loss"]),
            number(fold["loss"]), number(fold["perplexity"], 2), number(fold["token_accuracy"]),
            *(number(fold.get(name)) for name in more),
        )  # fmt: skip
    table.add_section()
    means = [number(trial["metrics"][name]["mean"]) for name in more]
    table.add_row("mean", "", "", "", number(trial["mean"]), "", "", *means)
    intervals = [_interval(trial["metrics"][name]["interval95"]) for name in more]
    table.add_row("95%", "", "", "", _interval(trial["interval95"]), "", "", *intervals)
    return table


def _interval(limits: Sequence[float] | None) -> str:
    return "–" if limits is None else f"{number(limits[0])}–{number(limits[1])}"


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
