"""What a run's scores say beyond a table: rows that look wrong, more data or not, which epoch, which run is better.

Reads run folders. The row review is made once, while the rows are at hand, and written as suspects.csv.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.questions import answer_text, prompt_text
from crosstune.data.rows import Rows
from crosstune.errors import MissingExtra, RunError
from crosstune.metrics import find_metric
from crosstune.results.compare import Entry, Ranking, rank_trials
from crosstune.results.scores import (
    ANSWERS,
    LOSSES,
    entries_of,
    equivalent_of,
    fold_scores,
    held_out_share_of,
    join,
    rank_if_scored,
    rank_run,
    right_and_chances,
    settings_of,
)
from crosstune.results.suspects import (
    Suspect,
    conflict_suspects,
    join_suspects,
    label_suspects,
    loss_suspects,
    read_suspects,
    write_suspects,
)
from crosstune.stats import EpochChoice, LearningCurve, choose_epoch, fit_learning_curve
from crosstune.store.run import Run
from crosstune.sweep.sweep import SHARE

FEWEST_ROWS = 20  # below that, medians of neighbours say nothing


def review_rows(run: Run, rows: Rows, *, say: Callable[[str], None]) -> tuple[Suspect, ...]:
    """Judge every held-out row by the best trial's out-of-fold scores, and write suspects.csv."""
    finished = [key for key in run.finished_lanes() if key[1] is not None]
    if not finished:
        return ()
    ranking = rank_if_scored(run)
    trial = finished[0][0] if ranking is None else ranking.places[0].trial
    folds = sorted(fold for t, fold in finished if t == trial and fold is not None)
    found = [_by_loss(run, rows, trial, folds), _by_label(run, trial, folds, say)]
    suspects = join_suspects(*(one for part in found for one in part))
    write_suspects(run.path("suspects.csv"), suspects)
    if suspects:
        say(f"{len(suspects)} rows look wrong: {run.path('suspects.csv')}")
    return suspects


def _by_loss(run: Run, rows: Rows, trial: int, folds: Sequence[int]) -> list[list[Suspect]]:
    table = _one_line_a_row(join([run.read_lane_rows(trial, fold) for fold in folds]))
    if len(table["row"]) < FEWEST_ROWS:
        return []
    place = {row.number: row for row in rows.rows}
    here = [place[number] for number in table["row"].tolist()]
    loss = table["nll"] / np.maximum(table["tokens"], 1)
    found = [loss_suspects(table["row"], table["nll"], table["tokens"])]
    if rows.shape != "text":
        found.append(
            conflict_suspects(table["row"], [prompt_text(r) for r in here], [answer_text(r) for r in here], loss)
        )
    return found


def _by_label(run: Run, trial: int, folds: Sequence[int], say: Callable[[str], None]) -> list[list[Suspect]]:
    labels = next((event["labels"] for event in run.events("labels")), None)
    examined = {event["fold"] for event in run.events("lane_examined") if event["trial"] == trial}
    taken = [fold for fold in folds if fold in examined]
    if labels is None or not taken:
        return []
    marks = _one_line_a_row(join([run.read_lane_rows(trial, fold, ANSWERS) for fold in taken]))
    right, chances = right_and_chances(marks)
    try:
        return [label_suspects(marks["row"][marks["label"] >= 0], right, chances, labels)]
    except MissingExtra as error:
        say(f"labels were not reviewed: {error.problem}. {error.fix}")
        return []


def _one_line_a_row(table: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The first entry of each row: repeated folds hold a row out more than once."""
    _, first = np.unique(table["row"], return_index=True)
    return {name: values[first] for name, values in table.items()}


def read_review(run: Run) -> tuple[Suspect, ...]:
    """suspects.csv of a run, as it stands."""
    path = run.path("suspects.csv")
    if not path.is_file():
        raise RunError(f"{run.folder} holds no suspects.csv", "It is written when all lanes are over; finish the run.")
    return read_suspects(path)


def learning_curve(run: Run, metric: str = "loss") -> LearningCurve:
    """The curve over `train.share` that the run swept: what twice the rows would change."""
    settings = settings_of(run)
    scores = fold_scores(run)
    others = {tuple(sorted((k, str(v)) for k, v in own.items() if k != SHARE)) for own in settings.values()}
    swept = [trial for trial, own in settings.items() if SHARE in own and scores.get(trial, {}).get(metric)]
    shared = sorted(swept, key=lambda trial: settings[trial][SHARE])
    if len(others) != 1 or len(shared) < 3:
        raise RunError(
            f"{run.folder} swept no learning curve (three shares or more, and nothing else)",
            "Set sweep: {train_share: [0.25, 0.5, 1.0]}.",
        )
    known = [{fold for fold, score in scores[trial][metric].items() if math.isfinite(score)} for trial in shared]
    folds = sorted(set.intersection(*known))
    if not folds:
        raise RunError(f"no fold of {run.folder} has a {metric} for every share", "See its failed lanes.")
    lanes = run.finished_lanes()
    sizes = [float(np.mean([lanes[trial, fold]["train_rows"] for fold in folds])) for trial in shared]
    table = [[scores[trial][metric][fold] for trial in shared] for fold in folds]
    higher = find_metric(metric).higher_is_better
    rope = equivalent_of(run) * abs(float(np.mean(table)))
    share = held_out_share_of(run)
    return fit_learning_curve(sizes, table, test_share=share, rope=rope, higher_is_better=higher)


def say_learning_curve(curve: LearningCurve, metric: str = "loss") -> str:
    """Would more data help? In one sentence."""
    top = curve.rows[-1]
    reach = (
        f"twice the rows ({2 * top:.0f}) would change {metric} by {curve.gain:+.4g} [{curve.low:.4g}, {curve.high:.4g}]"
    )
    if curve.helps > 0.95:
        return f"More data would help: {reach}, probability {curve.helps:.2f}."
    if curve.helps < 0.05:
        return f"More data would hardly help: {reach}."
    return f"Whether more data would help can't be told: {reach}, probability {curve.helps:.2f}."


def epoch_choice(run: Run, trial: int | None = None, metric: str = "loss") -> EpochChoice:
    """The epoch with the best mean held-out score, and its plateau: of whole epochs that all finished folds reached."""
    if metric not in LOSSES:
        raise RunError(
            f"{metric} is measured when a lane is over, not epoch by epoch", f"Take one of {', '.join(LOSSES)}."
        )
    trial = rank_run(run).places[0].trial if trial is None else trial
    finished = run.finished_lanes()
    curves: dict[int, dict[int, float]] = {}
    for event in run.events("lane_evaluated"):
        whole = math.isclose(event["epoch"], round(event["epoch"]), abs_tol=1e-9)
        of_fold = event["fold"] is not None and (event["trial"], event["fold"]) in finished
        if event["trial"] == trial and of_fold and whole and event["epoch"] >= 1:
            curves.setdefault(event["fold"], {})[round(event["epoch"])] = event[metric]
    epochs = sorted(set.intersection(*(set(curve) for curve in curves.values()))) if curves else []
    if not epochs or epochs != list(range(1, len(epochs) + 1)):
        raise RunError(f"{run.folder} has no scores epoch by epoch", "Set evaluate.every: epoch.")
    table = [[curve[epoch] for epoch in epochs] for _, curve in sorted(curves.items())]
    higher = find_metric(metric).higher_is_better
    return choose_epoch(table, test_share=held_out_share_of(run), higher_is_better=higher)


def compare_runs(folders: Sequence[str | os.PathLike[str]], metric: str = "loss") -> Ranking:
    """All trials of several runs in one ranking; those with the same held-out rows are compared fold by fold.

    The region of equivalence is the first run's.
    """
    runs = [Run.read(folder) for folder in folders]
    names = _short_names([run.folder for run in runs])
    entries: list[Entry] = []
    for run, name in zip(runs, names, strict=True):
        entries += entries_of(run, metric, prefix=f"{name} " if len(runs) > 1 else "")
    return rank_trials(
        entries,
        metric=metric,
        test_share=float(np.mean([held_out_share_of(run) for run in runs])),
        equivalent=equivalent_of(runs[0]),
        higher_is_better=find_metric(metric).higher_is_better,
    )


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as tell them apart."""
    for depth in range(1, 20):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
