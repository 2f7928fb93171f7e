"""Events of a wave → the run folder: adapters as PEFT folders, scores row by row, lines in the journal."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from crosstune.data.tokens import Tokens
from crosstune.export.adapter import TokenizerFiles, draft_adapter, finish_adapter
from crosstune.export.folder import Draft
from crosstune.recipe.recipe import Recipe
from crosstune.store.run import Run
from crosstune.store.writers import Writers
from crosstune.sweep.sweep import Trial
from crosstune.train.events import (
    Event,
    LaneEvaluated,
    LaneFinished,
    LaneGivenUp,
    LaneRetired,
    LanesOver,
    LaneTrained,
    StepKept,
    WaveFinished,
)
from crosstune.train.fault import blamed
from crosstune.train.lane import LaneJob, RowScores
from crosstune.train.recover import PlanChanged, WaveSplit, is_out_of_memory
from crosstune.workers.waves import key


@dataclass
class Recorder:
    """Writes what `run_wave` reports into a run. `base_scores` are the untuned base's, of all held-out rows."""

    run: Run
    recipe: Recipe
    trials: Mapping[int, Trial]
    tokens: Tokens
    tokenizer: Any
    base_scores: RowScores
    writers: Writers

    def __post_init__(self) -> None:
        self._tokenizer_files = TokenizerFiles(self.tokenizer)
        self._scored = {(event["trial"], event["fold"], event["step"]) for event in self.run.events("lane_evaluated")}

    def __call__(self, event: Event) -> None:
        """Take one event, unless it is one that a continued wave tells a second time."""
        if (
            isinstance(event, StepKept | LaneTrained | LaneFinished | LaneRetired | LaneGivenUp)
            and key(event.job) in self.run.lanes_over()
        ):
            return
        if isinstance(event, LaneEvaluated):
            told = (event.job.trial, event.job.fold, event.step)
            if told in self._scored:
                return
            self._scored.add(told)
            self.run.record(
                "lane_evaluated", **_lane(event.job), step=event.step, epoch=event.epoch, **_sums(event.scores)
            )
        elif isinstance(event, StepKept):
            with blamed(lambda reason: self._fail(event.job, reason, event.step)):
                self._keep_step(event)
        elif isinstance(event, LaneTrained):
            # once, though told again where memory ran out in its evaluation
            self.writers.begin("adapter", key(event.job), lambda: self._draft(event.job, "adapter", event.adapter()))
        elif isinstance(event, LanesOver):
            for lane in event.lanes:
                if key(lane.job) not in self.run.lanes_over():
                    self._begin_to_save(lane)
        elif isinstance(event, LaneFinished):
            with blamed(lambda reason: self._fail(event.job, reason, event.steps)):
                self._finish(event)
        elif isinstance(event, LaneRetired):
            self._fail(event.job, event.reason, event.step)
        elif isinstance(event, LaneGivenUp):
            self.run.record("lane_given_up", **_lane(event.job), reason=event.reason, step=event.step)
        elif isinstance(event, PlanChanged | WaveSplit):
            record_memory(self.run, event, allowed=self.recipe.lint.allow)
        elif isinstance(event, WaveFinished):
            facts = {name: value for name, value in vars(event).items() if name != "jobs"}
            self.run.record("wave_finished", lanes=[[job.trial, job.fold] for job in event.jobs], **facts)

    def _fail(self, job: LaneJob, reason: str, step: int) -> None:
        self.writers.drop(key(job))
        shutil.rmtree(self.folder(job), ignore_errors=True)  # what was written of it before it failed
        self.run.record("lane_failed", **_lane(job), reason=reason, step=step)

    def _keep_step(self, event: StepKept) -> None:
        """Write the best adapter so far, then remove the one that it beat: the number of files stays bounded."""
        name = f"step-{event.step:06d}"
        self._finish_adapter(event.job, self._draft(event.job, name, event.adapter), {"step": event.step})
        for old in self.folder(event.job).glob("step-*"):
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)  # what is left of it now goes with the next one

    def _begin_to_save(self, event: LaneFinished) -> None:
        early = self.writers.take("adapter", key(event.job))
        self.writers.begin("lane", key(event.job), partial(self._save, event, early))

    def _finish(self, event: LaneFinished) -> None:
        """The lane's line in the journal, once its folder is on the disk."""
        self._begin_to_save(event)
        record = self.writers.result("lane", key(event.job))
        losses = [short(loss) for loss in event.losses]
        self.run.record("lane_finished", **_lane(event.job), **record, seconds=event.seconds, losses=losses)

    def _save(self, event: LaneFinished, early: Future[Draft] | None) -> dict[str, Any]:
        """The lane's rows and adapter, by a thread of its own: what the journal then says of it."""
        job, scores = event.job, event.scores
        base = _only(self.base_scores, scores.rows)
        record = {
            **_sums(scores), "base_loss": base.loss, "base_token_accuracy": base.token_accuracy,
            "steps": event.steps, "kept_step": event.kept_step, "status": event.status.value, "reason": event.reason,
            "optimistic": job.is_optimistic, "train_rows": len(job.train_rows),
        }  # fmt: skip
        columns = {
            "row": self.tokens.numbers[scores.rows],
            "tokens": scores.targets,
            "nll": scores.nll,
            "hits": scores.hits,
            "base_nll": base.nll,
            "base_hits": base.hits,
        }
        self.run.write_lane_rows(job.trial, job.fold, columns)
        self._finish_adapter(job, self._drafted(event, early), record)
        return record

    def _drafted(self, event: LaneFinished, early: Future[Draft] | None) -> Draft:
        """What was written while the lane was scored; where memory didn't do for that, written now."""
        if early is not None:
            try:
                return early.result()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        return self._draft(event.job, "adapter", event.adapter)

    def _draft(self, job: LaneJob, name: str, adapter: Mapping[str, Tensor]) -> Draft:
        return draft_adapter(
            self.folder(job) / name,
            adapter,
            job.lora,
            target_names=job.targets,
            base_name=self.recipe.model.name,
            tokenizer=self.tokenizer,
            stop_ids=self.tokens.stop_ids,
            tokenizer_files=self._tokenizer_files,
        )

    def _finish_adapter(self, job: LaneJob, draft: Draft, record: Mapping[str, Any]) -> None:
        card = {
            "trial": job.trial, "fold": "all rows" if job.fold is None else job.fold,
            "quantization": self.recipe.model.quantization,  # of the base: generate asks on the same
            "settings": dict(self.trials[job.trial].settings), "lora": job.lora.model_dump(mode="json"),
            "train": job.train.model_dump(mode="json"),
            "result": {fact: short(value) for fact, value in record.items()},
        }  # fmt: skip
        finish_adapter(draft, card, job.lora, base_name=self.recipe.model.name)

    def folder(self, job: LaneJob) -> Path:
        """The lane's folder in the run."""
        return self.run.lane_folder(job.trial, job.fold)


def write_base_scores(run: Run, tokens: Tokens, scores: RowScores) -> None:
    """Keep the untuned base's scores, so that a continued run needn't make them again."""
    run.write_table(
        "base.parquet",
        {"row": tokens.numbers[scores.rows], "nll": scores.nll, "tokens": scores.targets, "hits": scores.hits},
    )


def read_base_scores(run: Run, tokens: Tokens, rows: NDArray[np.int64]) -> RowScores | None:
    """What `write_base_scores` kept, if it holds exactly these rows."""
    table = run.read_table("base.parquet")
    if table is None or not np.array_equal(table["row"], tokens.numbers[rows]):
        return None
    return RowScores(rows, table["nll"], table["tokens"], table["hits"])


def record_memory(run: Run, event: PlanChanged | WaveSplit, *, allowed: Sequence[str]) -> None:
    """What happened when memory ran out, and the plan with which a continued run goes on."""
    told: dict[str, Any] = {"step": event.step, "doing": event.doing, "message": event.message}
    if isinstance(event, WaveSplit):
        parts = [[[job.trial, job.fold] for job in part] for part in event.parts]
        run.record("wave_split", parts=parts, **told)
        return
    lanes, after = [[job.trial, job.fold] for job in event.jobs], event.after
    run.record(
        "out_of_memory", lanes=lanes, **told,
        before=event.before.settings, after=after.settings, evaluate_tokens=after.evaluate_tokens,
    )  # fmt: skip
    run.record("plan", **after.settings, peak_bytes=after.peak_bytes, waves=after.waves, allowed=list(allowed))


def _only(scores: RowScores, rows: NDArray[np.int64]) -> RowScores:
    place = np.searchsorted(scores.rows, rows)
    return RowScores(rows, scores.nll[place], scores.targets[place], scores.hits[place])


def _lane(job: LaneJob) -> dict[str, Any]:
    return {"trial": job.trial, "fold": job.fold}


def _sums(scores: RowScores) -> dict[str, Any]:
    loss = scores.loss
    return {
        "loss": loss, "perplexity": math.exp(min(loss, 700.0)), "token_accuracy": scores.token_accuracy,
        "nll": float(scores.nll.sum()), "rows": len(scores.rows), "tokens": int(scores.targets.sum()),
    }  # fmt: skip


def short(value: Any) -> Any:
    """Floats to six digits: enough to read, and the journal stays small."""
    return float(f"{value:.6g}") if isinstance(value, float) else value
