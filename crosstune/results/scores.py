"""Scores of a run's trials, metric by metric: over folds with their interval, pooled over rows with a bootstrap's.

Reads the run folder; knows nothing of models. What it computes is kept in the journal, so that reading is instant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.errors import DataError
from crosstune.metrics import Metric, find_metric, find_metrics, limits_of
from crosstune.metrics.choice import calibration, confusion
from crosstune.results.compare import Entry, Ranking, rank_trials
from crosstune.stats import Interval, fold_interval, ratio_interval, statistic_interval
from crosstune.store.run import Run
from crosstune.units import setting_words

ANSWERS = "answers.parquet"
LOSSES = ("loss", "perplexity", "token_accuracy")
Columns = Mapping[str, NDArray[Any]]


def fold_scores(run: Run) -> dict[int, dict[str, dict[int, float]]]:
    """trial → metric → fold → score, of every finished lane. Failed and given-up lanes have none."""
    found: dict[int, dict[str, dict[int, float]]] = {}
    for (trial, fold), event in run.finished_lanes().items():
        if fold is not None:
            for name in LOSSES:
                found.setdefault(trial, {}).setdefault(name, {})[fold] = event[name]
    for event in run.events("lane_examined"):
        if event["fold"] is not None:
            for name, score in event["scores"].items():
                found.setdefault(event["trial"], {}).setdefault(name, {})[event["fold"]] = read_score(score)
    # In the order of the folds, whichever was scored first: a sum over folds depends on it in its last digit.
    return {t: {name: dict(sorted(by_fold.items())) for name, by_fold in found[t].items()} for t in sorted(found)}


def held_out_share_of(run: Run) -> float:
    """The mean held-out share of the run's folds; 0.2 where none is known.

    Of each fold's lanes the one with most training rows tells: a swept `train.share` leaves rows out on purpose.
    """
    shares: dict[int, float] = {}
    for (_, fold), event in run.finished_lanes().items():
        if fold is not None and event["rows"]:
            shares[fold] = min(shares.get(fold, 1.0), event["rows"] / (event["rows"] + event["train_rows"]))
    return float(np.mean(list(shares.values()))) if shares else 0.2


def metric_summaries(run: Run, trial: int, scores: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Any]]:
    """Metric → mean, std and interval over folds; pooled value and interval where the rows are kept."""
    pooled = {event["trial"]: event["metrics"] for event in run.events("pooled")}.get(trial, {})
    share = held_out_share_of(run)
    summaries = {}
    for name, by_fold in scores.items():
        values = [value for value in by_fold.values() if math.isfinite(value)]
        over = fold_interval(values, test_share=share, limits=limits_of(name))
        summaries[name] = {
            "mean": known(over.mean), "std": known(over.std), "interval95": limits(over), "folds": over.n,
            "higher_is_better": find_metric(name).higher_is_better,
            "pooled": None, "pooled_interval95": None, **pooled.get(name, {}),
        }  # fmt: skip
    return summaries


def record_pooled(run: Run) -> None:
    """Pool every trial's rows that its lanes never saw, once all are scored; kept as an event of the journal."""
    done = {event["trial"]: event["folds"] for event in run.events("pooled")}
    lanes = [key for key in run.finished_lanes() if key[1] is not None]
    metrics = find_metrics(run.stored_recipe()["evaluate"]["metrics"])
    examined = {(event["trial"], event["fold"]) for event in run.events("lane_examined")}
    for trial in sorted({trial for trial, _ in lanes}):
        folds = sorted(fold for t, fold in lanes if t == trial and fold is not None)
        if done.get(trial) == folds:  # others where a lane failed then, and was tried again
            continue
        rows = join([run.read_lane_rows(trial, fold) for fold in folds])
        found = pool_losses(rows, group_of(run, rows["row"]))
        taken = [fold for fold in folds if (trial, fold) in examined]
        extra: dict[str, Any] = {}
        if taken:
            marks = join([run.read_lane_rows(trial, fold, ANSWERS) for fold in taken])
            found |= pool_marks(metrics, marks, group_of(run, marks["row"]))
            extra = choice_tables(marks)
        run.record("pooled", trial=trial, folds=folds, metrics=found, **extra)


def pool_losses(rows: Columns, groups: NDArray[Any] | None) -> dict[str, dict[str, Any]]:
    """Loss, perplexity and token accuracy over all rows, each token weighing the same."""
    loss = ratio_interval(rows["nll"], rows["tokens"], groups=groups, resamples=1000)
    hits = ratio_interval(rows["hits"], rows["tokens"], groups=groups, resamples=1000)
    mean, low, high = (math.exp(min(value, 700.0)) for value in (loss.mean, loss.low, loss.high))
    grown = Interval(mean, math.nan, low, high, loss.n)
    return {"loss": _pooled(loss), "perplexity": _pooled(grown), "token_accuracy": _pooled(hits)}


def pool_marks(metrics: Sequence[Metric], marks: Columns, groups: NDArray[Any] | None) -> dict[str, dict[str, Any]]:
    """Text and choice metrics over all rows at once."""
    found = {}
    for metric in metrics:
        if metric.kind == "text" and "answer" in marks:
            found[metric.name] = _pooled(_pool_texts(metric, marks, groups))
        elif metric.kind == "choice" and "label" in marks:
            found[metric.name] = _pooled(_pool_choice(metric, marks, groups))
    return found


def _pool_texts(metric: Metric, marks: Columns, groups: NDArray[Any] | None) -> Interval:
    said, wanted = marks["answer"], marks["wanted"]
    by_row = metric.by_row(list(said), list(wanted))
    if by_row is not None:
        return ratio_interval(by_row, groups=groups, resamples=1000)
    # A metric of all rows at once may be slow (BLEU, a function of the user's): few resamples, a rough interval.
    return statistic_interval(
        lambda rows: metric.of_texts(list(said[rows]), list(wanted[rows])), len(said), groups=groups, resamples=200
    )


def _pool_choice(metric: Metric, marks: Columns, groups: NDArray[Any] | None) -> Interval:
    right, chances = right_and_chances(marks)
    groups = None if groups is None else groups[marks["label"] >= 0]
    if metric.rows is not None:
        return ratio_interval(metric.rows(right, chances), groups=groups, resamples=1000)
    return statistic_interval(
        lambda rows: metric.of_chances(right[rows], chances[rows]), len(right), groups=groups, resamples=500
    )


def right_and_chances(marks: Columns) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The right label's position and all labels' probabilities, of rows whose answer is one of the labels."""
    count = sum(name.startswith("chance ") for name in marks)
    table = np.stack([marks[f"chance {c}"] for c in range(count)], axis=1)
    known_rows = marks["label"] >= 0
    return marks["label"][known_rows].astype(np.intp), table[known_rows]


def choice_tables(marks: Columns) -> dict[str, Any]:
    """Confusion matrix (right × picked) and calibration curve of pooled choices; nothing where none were made."""
    if "label" not in marks:
        return {}
    right, chances = right_and_chances(marks)
    curve = [{"low": b.low, "high": b.high, "rows": b.rows, "confidence": b.confidence, "accuracy": b.accuracy}
             for b in calibration(right, chances)]  # fmt: skip
    return {"confusion": confusion(right, chances).tolist(), "calibration": curve}


def baselines(run: Run) -> dict[str, dict[str, Any]]:
    """base, and few-shot where asked for → metric → score on the same held-out rows."""
    found: dict[str, dict[str, Any]] = {}
    table = run.read_table("base.parquet")
    if table is not None:
        tokens = max(1, int(table["tokens"].sum()))
        found["base"] = {
            "loss": float(table["nll"].sum()) / tokens, "token_accuracy": float(table["hits"].sum()) / tokens
        }  # fmt: skip
    for event in run.events("few_shot_scored"):
        found["few-shot"] = {"loss": event["loss"], "token_accuracy": event["token_accuracy"]}
    for event in run.events("base_examined"):
        scores = {name: known(read_score(score)) for name, score in event["scores"].items()}
        found.setdefault(event["name"], {}).update(scores)
    return found


def group_of(run: Run, rows: NDArray[Any]) -> NDArray[Any] | None:
    """The group of each of `rows` (numbers): rows that belong together, or one row that several folds held out.

    None where each stands for itself.
    """
    table = run.read_table("groups.parquet")
    if table is None:
        return rows if len(np.unique(rows)) < len(rows) else None
    place = np.searchsorted(table["row"], rows)
    return table["group"][place]


def rank_run(run: Run, metric: str | None = None) -> Ranking:
    """The run's trials ranked by `metric` (the sweep's, unless given)."""
    recipe = run.stored_recipe()
    name = metric or recipe["sweep"].get("metric", "loss")
    return rank_trials(
        entries_of(run, name),
        metric=name,
        test_share=held_out_share_of(run),
        equivalent=equivalent_of(run),
        higher_is_better=find_metric(name).higher_is_better,
    )


def rank_if_scored(run: Run) -> Ranking | None:
    """The run's ranking by its sweep's metric; None while no trial has a score."""
    try:
        return rank_run(run)
    except DataError:
        return None


def equivalent_of(run: Run) -> float:
    """The region of equivalence that the run's sweep asks for, as a share of the best mean."""
    return float(run.stored_recipe()["sweep"].get("equivalent", 0.01))


def entries_of(run: Run, metric: str, *, prefix: str = "") -> list[Entry]:
    """The run's trials as entries of a comparison; trials of which no fold finished among them."""
    scores = fold_scores(run)
    keys = _folds_key(run), _tokens_key(run) if metric in LOSSES else ""
    notes = _notes(run)
    entries = []
    listed = settings_of(run)
    for trial, settings in listed.items():
        words = " ".join(f"{name.split('.')[-1]}={setting_words(value)}" for name, value in settings.items())
        name = (prefix + (words or ("" if prefix and len(listed) == 1 else f"trial {trial}"))).strip()
        by_fold = scores.get(trial, {}).get(metric, {})
        entries.append(Entry(name, by_fold, *keys, notes.get(trial, ""), trial))
    return entries


def _notes(run: Run) -> dict[int, str]:
    """trial → what to mind of its scores."""
    lanes = run.finished_lanes().items()
    chosen = {trial for (trial, fold), event in lanes if fold is not None and event["optimistic"]}
    notes = dict.fromkeys(chosen, "optimistic: held-out rows chose its steps")
    return notes | {event["trial"]: f"given up: {event['reason']}" for event in run.events("trial_given_up")}


def settings_of(run: Run) -> dict[int, dict[str, Any]]:
    """trial → the settings that differ."""
    events = run.events("trials")
    return {trial["trial"]: trial["settings"] for trial in events[-1]["trials"]} if events else {}


def _folds_key(run: Run) -> str:
    """Equal for runs whose folds hold out the same rows with the same content."""
    import hashlib

    folds, hashes = run.read_folds(), run.read_table("row_hashes.parquet")
    digest = hashlib.sha256()
    if folds is not None and hashes is not None:
        content = dict(zip(hashes["row"].tolist(), hashes["hash"].tolist(), strict=True))
        for row, fold in zip(folds["row"].tolist(), folds["fold"].tolist(), strict=True):
            digest.update(b"%d " % fold + content.get(row, b""))
    return digest.hexdigest()


def _tokens_key(run: Run) -> str:
    """Equal for runs whose held-out rows have as many target tokens: their losses by token are of the same unit."""
    import hashlib

    table = run.read_table("base.parquet")
    return "" if table is None else hashlib.sha256(repr(table["tokens"].tolist()).encode()).hexdigest()


def join(parts: Sequence[Columns]) -> dict[str, NDArray[Any]]:
    """Tables of the same columns, one under another."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}


def _pooled(interval: Interval) -> dict[str, Any]:
    return {"pooled": known(interval.mean), "pooled_interval95": limits(interval)}


def limits(interval: Interval) -> list[float] | None:
    """[low, high], or None where there is no interval."""
    return None if math.isnan(interval.low) else [interval.low, interval.high]


def read_score(value: float | str | None) -> float:
    """A score as the journal has it: None where it has no value, a word where it isn't finite."""
    return math.nan if value is None else float(value)


def known(value: float) -> float | None:
    """nan as None: JSON has no nan."""
    return None if math.isnan(value) else value
