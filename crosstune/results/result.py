"""Result: what a cross-validation found, read from its run folder. The same object is printed as `--json`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstune.errors import MissingExtra, RunError
from crosstune.metrics import limits_of
from crosstune.results.review import compare_runs, epoch_choice, learning_curve, read_review
from crosstune.results.scores import (
    baselines,
    fold_scores,
    held_out_share_of,
    known,
    limits,
    metric_summaries,
    rank_if_scored,
    rank_run,
)
from crosstune.stats import fold_interval
from crosstune.store.run import Run

if TYPE_CHECKING:
    import pandas

    from crosstune.results.compare import Ranking
    from crosstune.results.suspects import Suspect
    from crosstune.stats import EpochChoice, LearningCurve

FOLD_FIELDS = ("fold", "loss", "perplexity", "token_accuracy", "base_loss", "rows", "tokens")


@dataclass(frozen=True)
class Result:
    """Scores of every trial and fold, out-of-fold losses, and where the adapters are."""

    run: Path
    report: Mapping[str, Any]  # the object of `--json`

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Result:
        """The result of a finished run."""
        run = Run.read(folder)
        return cls(run.folder, make_report(run))

    def __fspath__(self) -> str:
        """The run's folder: a result may be given wherever a run may."""
        return str(self.run)

    @property
    def trials(self) -> Sequence[Mapping[str, Any]]:
        """One mapping a trial: settings, folds, mean, std, interval95, pooled_loss."""
        return list(self.report["trials"])

    @property
    def failed(self) -> Sequence[Mapping[str, Any]]:
        """Lanes that failed: trial, fold, reason, step."""
        return list(self.report["failed"])

    @property
    def best(self) -> Mapping[str, Any]:
        """The trial with the best mean of the sweep's metric (the held-out loss, unless asked otherwise)."""
        if not self.trials:
            raise RunError(f"{str(self.run)!r} has no scores yet: no lane is over", "Let the run go on first.")
        best = self.report["best"]
        return next((trial for trial in self.trials if trial["trial"] == best), self.trials[0])

    @property
    def mean(self) -> float:
        """Mean held-out loss over the folds of the best trial; nan if none finished."""
        return _number(self.best["mean"])

    @property
    def interval95(self) -> tuple[float, float]:
        """95% interval of `mean` (Nadeau–Bengio corrected); nan where one fold finished."""
        low, high = self.best["interval95"] or (None, None)
        return _number(low), _number(high)

    @cached_property
    def scores(self) -> pandas.DataFrame:
        """A row a trial and fold: loss, perplexity, token accuracy, the untuned base's loss, rows, tokens."""
        return _pandas().DataFrame(self._rows)

    @cached_property
    def out_of_fold(self) -> pandas.DataFrame:
        """A row a held-out row: row, fold, trial, tokens, loss, token_accuracy, base_loss."""
        return _pandas().read_parquet(self.run / "out_of_fold.parquet")

    @cached_property
    def adapters(self) -> dict[tuple[int, int], Path]:
        """(trial, fold) → folder of the adapter."""
        place = Run.read(self.run)
        return {
            (trial["trial"], fold["fold"]): place.lane_folder(trial["trial"], fold["fold"]) / "adapter"
            for trial in self.trials
            for fold in trial["folds"]
        }

    def compare(self, *others: str | os.PathLike[str], metric: str | None = None) -> Ranking:
        """The trials (of this run and `others`) ranked, and what may be concluded: `result.compare().sentence`."""
        name = metric or str(Run.read(self.run).stored_recipe()["sweep"].get("metric", "loss"))
        folders = [Path(other) for other in others]
        return compare_runs([self.run, *folders], name) if folders else rank_run(Run.read(self.run), name)

    def suspects(self) -> tuple[Suspect, ...]:
        """Rows that look wrong, worst first, with reasons: what suspects.csv holds."""
        return read_review(Run.read(self.run))

    def learning_curve(self, metric: str = "loss") -> LearningCurve:
        """Would more data help? Needs a sweep over `train_share`."""
        return learning_curve(Run.read(self.run), metric)

    def epoch_choice(self, trial: int | None = None, metric: str = "loss") -> EpochChoice:
        """The epoch with the best mean held-out score of a trial (the best, unless given), with its plateau."""
        return epoch_choice(Run.read(self.run), trial, metric)

    def to_json(self) -> dict[str, Any]:
        """Plain values only: what `--json` prints."""
        return dict(self.report)

    @property
    def _rows(self) -> list[dict[str, Any]]:
        each = ((trial, fold) for trial in self.trials for fold in trial["folds"])
        return [{"trial": trial["trial"], **trial["settings"], **fold} for trial, fold in each]

    def _repr_html_(self) -> str:
        said = escape(str(self.report["conclusion"]))
        return f"<p>{said}</p>{_html_table(self._rows)}<p>{escape(str(self.run))}</p>"

    def __repr__(self) -> str:
        lines = [f"Result of {self.run}"]
        for trial in self.trials:
            settings = "".join(f" {key}={value}" for key, value in trial["settings"].items())
            mean = "no fold finished" if trial["mean"] is None else f"loss {trial['mean']:.4f}"
            interval = "" if trial["interval95"] is None else " [{:.4f}, {:.4f}]".format(*trial["interval95"])
            lines.append(f"  trial {trial['trial']}{settings}: {mean}{interval} over {trial['finished']} folds")
        return "\n".join(lines)


def make_report(run: Run) -> dict[str, Any]:
    """The `--json` object from the journal: trials with their folds, mean and interval over the folds that finished."""
    finished, failed = run.finished_lanes(), run.failed_lanes()
    events = run.events("trials")
    settings = {trial["trial"]: trial["settings"] for trial in events[-1]["trials"]} if events else {}
    lanes = [key for key in (*finished, *failed) if key[1] is not None]
    scores, pooled = fold_scores(run), {event["trial"]: event for event in run.events("pooled")}
    gone = {event["trial"]: event["reason"] for event in run.events("trial_given_up")}
    share = held_out_share_of(run)
    trials = []
    for trial in sorted({trial for trial, _ in lanes}):
        folds = [finished[key] for key in sorted(key for key in finished if key[0] == trial and key[1] is not None)]
        asked = sum(key[0] == trial for key in lanes)
        by_metric, tables = scores.get(trial, {}), pooled.get(trial, {})
        trials.append(
            {"trial": trial, "settings": settings.get(trial, {}), **_summary(folds, asked, by_metric, share)}
            | {"metrics": metric_summaries(run, trial, by_metric), "given_up": gone.get(trial)}
            | {name: tables[name] for name in ("confusion", "calibration") if name in tables}
        )
    ranking = rank_if_scored(run)
    nothing = "no fold has a score to rank by" if finished else "no fold finished"
    return {
        "run": str(run.folder),
        "trials": trials,
        "failed": [{name: event[name] for name in ("trial", "fold", "reason", "step")} for event in failed.values()],
        "seconds": sum(event.get("seconds", 0.0) for event in run.events("closed")),
        "peak_bytes": max((event["peak_bytes"] for event in run.events("wave_finished")), default=0),
        "out_of_memory": out_of_memory(run),
        "finished": run.is_finished,
        "best": ranking.places[0].trial if ranking else None,
        "conclusion": ranking.sentence if ranking else nothing,
        "ranking": ranking.to_json() if ranking else [],
        "warnings": list(ranking.warnings) if ranking else [],
        "baselines": baselines(run),
        "labels": next((event["labels"] for event in run.events("labels")), None),
    }


def out_of_memory(run: Run) -> list[dict[str, Any]]:
    """When memory ran out, in what, and how the run went on: what of the plan changed, or lanes of each part."""
    found = []
    for event in run.events("out_of_memory", "wave_split"):
        went_on: dict[str, Any] = {}
        if event["event"] == "wave_split":
            went_on["lanes"] = [len(part) for part in event["parts"]]
        else:
            went_on = {name: value for name, value in event["after"].items() if value != event["before"].get(name)}
            if not went_on and event["doing"] == "an evaluation":
                went_on = {"tokens of an evaluation": event["evaluate_tokens"]}
        found.append({"step": event["step"], "doing": event["doing"], "went_on": went_on})
    return found


def _examined(fold: int, scores: Mapping[str, Mapping[int, float]]) -> dict[str, float | None]:
    return {name: known(by[fold]) for name, by in scores.items() if name not in FOLD_FIELDS and fold in by}


def _summary(
    folds: Sequence[Mapping[str, Any]], asked: int, scores: Mapping[str, Mapping[int, float]], test_share: float
) -> dict[str, Any]:
    interval = fold_interval([fold["loss"] for fold in folds], test_share=test_share, limits=limits_of("loss"))
    tokens = sum(fold["tokens"] for fold in folds)
    return {
        "folds": [{name: fold[name] for name in FOLD_FIELDS} | _examined(fold["fold"], scores) for fold in folds],
        "mean": known(interval.mean),
        "std": known(interval.std),
        "interval95": limits(interval),
        "pooled_loss": sum(fold["nll"] for fold in folds) / tokens if tokens else None,
        "finished": len(folds),
        "asked": asked,
        "optimistic": any(fold["optimistic"] for fold in folds),
    }


def write_scores(run: Run) -> None:
    """Write scores.json: the report without what differs from one machine or day to the next."""
    run.write_scores({name: value for name, value in make_report(run).items() if name in ("trials", "failed")})


def write_out_of_fold(run: Run) -> None:
    """Join every finished lane's rows into out_of_fold.parquet: losses are token means of rows never seen."""
    parts: dict[str, list[Any]] = {}
    for trial, fold in sorted(key for key in run.finished_lanes() if key[1] is not None):
        rows = run.read_lane_rows(trial, fold)
        targets = np.maximum(rows["tokens"], 1)
        columns = {
            "row": rows["row"], "fold": np.full(len(targets), fold), "trial": np.full(len(targets), trial),
            "tokens": rows["tokens"], "loss": rows["nll"] / targets, "token_accuracy": rows["hits"] / targets,
            "base_loss": rows["base_nll"] / targets, "base_token_accuracy": rows["base_hits"] / targets,
        }  # fmt: skip
        for name, values in columns.items():
            parts.setdefault(name, []).append(values)
    if parts:
        run.write_out_of_fold({name: np.concatenate(values) for name, values in parts.items()})


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of values by name as a table of four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row.get(name))}</td>" for name in names) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return "–" if value is None else escape(f"{value:.4f}" if isinstance(value, float) else str(value))


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise MissingExtra("pandas", "pandas") from None
    return pandas
