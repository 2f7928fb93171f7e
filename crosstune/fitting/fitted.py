"""What a fit is expected to be worth, what was made, and the words for both. Read from the run folder; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.metrics import limits_of
from crosstune.results.scores import held_out_share_of
from crosstune.stats import Interval, fold_interval
from crosstune.store.run import Run
from crosstune.sweep.sweep import Trial
from crosstune.units import seconds_words


@dataclass(frozen=True)
class Expected:
    """What the folds say of the quality on rows never seen: held-out loss, mean and interval over the folds."""

    loss: float
    low: float | None
    high: float | None
    folds: int
    epoch: float
    ends_at: float  # the epoch as a share of all steps
    optimistic: bool  # something about it was chosen by these same scores
    chosen: str = ""  # what

    def words(self) -> str:
        """One line for a person."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.4f}, {self.high:.4f}] (95%)"
        said = f", optimistic: these scores chose {self.chosen}" if self.optimistic else ""
        return f"loss {self.loss:.4f}{interval} over {self.folds} folds at epoch {self.epoch:g}{said}"

    def facts(self) -> dict[str, Any]:
        """For the model card."""
        interval = "unknown" if self.low is None else [self.low, self.high]
        why = f"yes: these same scores chose {self.chosen}" if self.optimistic else "no"
        return {
            "loss": self.loss,
            "95% interval": interval,
            "folds": self.folds,
            "epoch": self.epoch,
            "optimistic": why,
        }


@dataclass(frozen=True)
class Fitted:
    """One adapter as it was written."""

    trial: int
    adapter: Path
    settings: Mapping[str, Any]
    rows: int
    steps: int
    epochs: float
    expected: Expected | None
    held_out: Mapping[str, float] | None  # loss, base_loss, token_accuracy, rows; None where no row was held out
    commands: Mapping[str, str]  # server → command


@dataclass(frozen=True)
class Fit:
    """The adapters of one call, and the folder they lie in."""

    run: Path
    fits: tuple[Fitted, ...]
    seconds: float = field(default=0.0, compare=False)

    def __fspath__(self) -> str:
        """The folder: a fit may be merged and asked as its folder may."""
        return str(self.run)

    @property
    def adapter(self) -> Path:
        """The adapter's folder, where there is one only."""
        return self.fits[0].adapter

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `crosstune fit --json` prints."""
        fits = [{**asdict(one), "adapter": str(one.adapter)} for one in self.fits]
        return {"run": str(self.run), "fits": fits, "seconds": self.seconds}

    def words(self) -> str:
        """A few lines for a person."""
        return "\n".join(line for one in self.fits for line in _lines(one)) + f"\n{seconds_words(self.seconds)}"


def expected_of(run: Run, trial: Trial, *, among: int = 1) -> Expected:
    """The epoch at which the folds of a trial were best on average, and their losses there.

    `among`: the number of trials of which it was picked as the best, which makes its losses optimistic.
    Early stopping chose an epoch for each fold already: its median is taken, and the folds' final losses.
    """
    train = trial.recipe.train
    lanes = run.finished_lanes().items()
    finished = {fold: event for (number, fold), event in lanes if number == trial.index and fold is not None}
    share = held_out_share_of(run)
    by_step: dict[float, dict[int, Mapping[str, Any]]] = {}
    for event in run.events("lane_evaluated"):
        if event["trial"] == trial.index and event["fold"] in finished:
            at = event["step"] / train.max_steps if train.max_steps else event["epoch"] / train.epochs
            by_step.setdefault(round(min(at, 1.0), 9), {})[event["fold"]] = event
    chosen = ["each fold's steps"] if any(event["optimistic"] for event in finished.values()) else []
    if among > 1:
        chosen.append(f"the best of {among} trials")
    if train.stop is not None:
        kept = [_share_at(by_step, fold, event["kept_step"]) for fold, event in finished.items()]
        losses, at = [event["loss"] for event in finished.values()], float(np.median(kept))
        return _expected(losses, share, at, train.epochs, chosen)
    whole = {at: events for at, events in by_step.items() if len(events) == len(finished)}
    if not whole or run.stored_recipe()["sweep"].get("metric", "loss") != "loss":
        return _expected([event["loss"] for event in finished.values()], share, 1.0, train.epochs, chosen)
    means = {at: float(np.mean([event["loss"] for event in events.values()])) for at, events in whole.items()}
    at = min(means, key=lambda share_of_steps: (means[share_of_steps], share_of_steps))
    if at < max(whole):
        chosen.append("the epoch")
    losses = [whole[at][fold]["loss"] for fold in sorted(whole[at])]
    return _expected(losses, share, at, train.epochs, chosen)


def _share_at(by_step: Mapping[float, Mapping[int, Mapping[str, Any]]], fold: int, step: int) -> float:
    return next((at for at, events in by_step.items() if fold in events and events[fold]["step"] == step), 1.0)


def _expected(losses: Sequence[float], test_share: float, at: float, epochs: float, chosen: Sequence[str]) -> Expected:
    found: Interval = fold_interval(losses, test_share=test_share, limits=limits_of("loss"))
    low, high = (None, None) if math.isnan(found.low) else (found.low, found.high)
    epoch = round(at * epochs, 6)
    return Expected(found.mean, low, high, len(losses), epoch, at, bool(chosen), " and ".join(chosen))


def _lines(one: Fitted) -> list[str]:
    name = " ".join(f"{key}={value}" for key, value in one.settings.items())
    lines = [f"{one.adapter}: {one.rows} rows, {one.steps} steps, epoch {one.epochs:g} {name}".rstrip()]
    if one.expected is not None:
        lines.append("expected on rows never seen: " + one.expected.words())
    if one.held_out is not None:
        loss, base, rows = one.held_out["loss"], one.held_out["base_loss"], one.held_out["rows"]
        lines.append(f"held-out loss {loss:.4f} on {rows:g} rows (untuned base {base:.4f})")
    return lines + [f"{server}: {command}" for server, command in one.commands.items()]
