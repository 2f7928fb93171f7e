"""crosstune's public call, several times in one process: the first is the whole, the later ones are steady.

A call is everything after loading: lint, plan, capture and compilation, scores of the untuned base, training, scores,
adapters and journal on disk. Inside it a wave is what a loop over folds also does: adapters put on, trained, scored.
Steady is a wave of a later call whose first step counts as its median one, as the loop's first fold doesn't count; with
rows of unlike lengths, where steps differ, it is the wave as it is.

By name (--by-name) the base lies in a folder, as people have it, and each call loads it itself. A call's seconds are
then the whole call less its "load" stages, whose seconds are `load_s`: loading counts on neither side. Lint, encoding
the rows and planning count as ever, and so does waiting, once the base is there, for kernels that aren't compiled yet;
what threads compile while it loads is hidden in loading. The folder was just written, so that the system still has its
files in memory: loading takes little time and hides little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow.parquet  # noqa: F401
import ruamel.yaml  # noqa: F401
import torch

import crosstune
import crosstune.record

# Imported by the first call otherwise; the loops have imported their libraries before the clock runs.
import crosstune.results.compare
import crosstune.results.review
import crosstune.workers.examine
import crosstune.workers.local
import crosstune.workers.schedule
from bench.folds.clock import StageClock
from bench.folds.job import Job, prepare
from bench.folds.machine import card, device, emit, now, peaks, start_peak, versions
from bench.folds.peer import Counted
from bench.shapes import tokenizer
from crosstune.data.batches import Batch
from crosstune.model.device import used_bytes
from crosstune.resources import WIDTHS
from crosstune.store.run import Run
from crosstune.train.step import DeviceBatch

WAVE_FACTS = {"steps", "tokens", "seconds", "live_bytes_before", "live_bytes_after", "peak_bytes"}
JOURNAL_FACTS = {"lanes", "event", "at"}  # of every line
OF_LAST = (  # facts of a job, taken from its last call
    "losses", "base_losses", "train_waste", "evaluate_waste", "plan", "used_bytes", "tokens_trained", "steps",
)  # fmt: skip
PRECISION = {"cuda": "bf16", "cpu": "fp32"}  # of the base that bench.shapes makes
TRIALS = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2)  # times the learning rate: eight trials, the first as everywhere


def run_ours(model: Any, job: Job, lanes: int, options: argparse.Namespace) -> None:
    """Call `options.calls` times; a line each, and one for all. One lane alone: one call of a wave a fold.

    model   in memory, or the mapping that names its folder
    """
    rows = prepare(job, model).digest()
    by_name = {"by_name": True} if is_named(model) else {}
    calls = []
    for number in range(1 if lanes == 1 else options.calls):
        calls.append(call(model, job, lanes))
        emit("call", contestant="crosstune", tokens=job.name, lanes=lanes, number=number, **by_name, **calls[-1])
    emit(
        "result", contestant="crosstune", tokens=job.name, lanes=lanes, folds=job.folds, **together(calls, lanes),
        rows=rows, **by_name, card=card(), versions=versions(),
    )  # fmt: skip


def is_named(model: Any) -> bool:
    """Whether crosstune loads the base itself."""
    return isinstance(model, Mapping)


def together(calls: list[dict[str, Any]], lanes: int) -> dict[str, Any]:
    """The first call is whole; later calls, or with one lane a wave the later waves, are steady."""
    first, later = calls[0], calls[1:] or calls
    waves = [sum(each["waves_s"]) for each in later]
    steady = [sum(each["steady_waves_s"]) for each in later]
    calls_s = [each["seconds"] for each in later]
    if lanes == 1:
        alone, count = first["waves_s"], len(first["waves_s"])
        waves = [count * statistics.median(alone[1:] or alone)]
        steady = [count * statistics.median(first["steady_waves_s"][1:] or first["steady_waves_s"])]
    return {
        "whole_s": first["seconds"],
        "steady_s": statistics.median(steady),
        "steady_wave_s": statistics.median(waves),
        "steady_call_s": statistics.median(calls_s),
        "calls_s": [each["seconds"] for each in calls],
        "waves_s": [each["waves_s"] for each in calls],
        "split": later[-1]["split"],
        **{name: later[-1][name] for name in OF_LAST},
        **{
            name: max((each[name] for each in calls), key=lambda gib: gib or 0) for name in ("peak_gib", "reserved_gib")
        },
        "failed": sum(each["failed"] for each in calls),
        **({"load_s": first["load_s"], "loads_s": [each["load_s"] for each in calls]} if "load_s" in first else {}),
    }


def call(model: Any, job: Job, lanes: int) -> dict[str, Any]:
    """One cross-validation: its seconds, what its journal says, padding, peak memory, losses."""
    start_peak()
    words = {**job.settings(), "model": model, "tokenizer": tokenizer(), "progress": StageClock()}
    words["device"] = {"lanes": 1} if lanes == 1 else {}
    if is_named(model):
        words["device"]["precision"] = PRECISION[device().type]
    if lanes > job.folds:
        words["sweep"] = {"train.learning_rate": [share * job.learning_rate for share in TRIALS[: lanes // job.folds]]}
    clock: StageClock = words["progress"]
    with tempfile.TemporaryDirectory() as folder, counting() as (train, evaluated):
        began = now()
        result = crosstune.cross_validate(output=f"{folder}/run", **words)
        seconds = now() - began
        run = Run.read(result.run)
        waves, plan = run.events("wave_finished"), run.events("plan")[-1]
    loading = {"load_s": clock.loading()} if is_named(model) else {}
    folds = sorted(result.trials[0]["folds"], key=lambda fold: fold["fold"])
    return {
        "seconds": seconds - sum(loading.values()),
        **loading,
        "waves_s": [wave["seconds"] for wave in waves],
        "steady_waves_s": [
            wave["seconds"] - (aside if job.tokens else 0) for wave, aside in zip(waves, clock.aside(), strict=True)
        ],
        "split": {**clock.split(), **{k: v for k, v in waves[-1].items() if k not in WAVE_FACTS | JOURNAL_FACTS}},
        "said": [text for text in clock.said if "plan" in text or "recorded" in text or "memory" in text],
        "tokens_trained": sum(wave["tokens"] for wave in waves),
        "steps": sum(wave["steps"] for wave in waves),
        "plan": {key: plan[key] for key in (*WIDTHS, "peak_bytes")},
        "used_bytes": used_bytes(device()) if device().type == "cuda" else None,
        "losses": [fold["loss"] for fold in folds],
        "base_losses": [fold["base_loss"] for fold in folds],
        "train_waste": train.waste(),
        "evaluate_waste": evaluated.waste(),
        "failed": len(result.failed),
        **peaks(),
    }


@contextmanager
def counting() -> Iterator[tuple[Counted, Counted]]:
    """Tokens of every batch that goes to the device: those trained on, those evaluated."""
    train, evaluated = Counted(), Counted()
    move = DeviceBatch.of

    def counted(batch: Batch, device: torch.device) -> DeviceBatch:
        seen = evaluated if torch.is_inference_mode_enabled() else train
        seen.add(batch.ids_NT.size, batch.num_tokens)
        return move(batch, device)

    with patch.object(DeviceBatch, "of", counted):
        yield train, evaluated
