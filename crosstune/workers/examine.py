"""Finished lanes of a run take its exam: their adapters put back into slots, marks and scores written beside them.

Apart from training, so that a run that was interrupted, or spread over machines, only examines what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from crosstune.data.tokens import Tokens
from crosstune.errors import RecipeError
from crosstune.model.attach import attached
from crosstune.model.base import Base
from crosstune.progress import Progress, stage
from crosstune.results.scores import known
from crosstune.store.run import Run
from crosstune.train.evaluate import score_base
from crosstune.train.exam import Exam, Marks
from crosstune.train.fault import blame_each, blamed
from crosstune.train.generate import begin
from crosstune.train.lane import LaneJob

ANSWERS = "answers.parquet"


@dataclass(frozen=True)
class Examiner:
    """The exam of a run, and who has taken it."""

    run: Run
    workers: Any  # LocalWorkers or RayWorkers
    tokens: Tokens
    exam: Exam
    progress: Progress

    def examine(self, jobs: Sequence[LaneJob]) -> None:
        """Let the lanes of `jobs` take the exam together, those that are finished and haven't."""
        # A lane that was tried again after it failed has one line; a lane is examined once.
        done = {(event["trial"], event["fold"]) for event in self.run.events("lane_examined")}
        finished = self.run.finished_lanes()
        jobs = [job for job in jobs if (job.trial, job.fold) in finished and (job.trial, job.fold) not in done]
        if not jobs:
            return
        failed: dict[int, str] = {}
        every = range(len(jobs))
        with stage(self.progress, "answer held-out rows", sum(len(job.held_out) for job in jobs)):
            marks_K = blame_each(
                lambda: self._take([job for k, job in enumerate(jobs) if k not in failed]),
                lambda k: self._take([jobs[k]]), every, failed.__setitem__,
            )  # fmt: skip
        for k, marks in zip((k for k in every if k not in failed), marks_K, strict=True):
            with blamed(partial(failed.__setitem__, k)):
                self._keep(jobs[k], marks)
        for k, reason in failed.items():
            step = finished[jobs[k].trial, jobs[k].fold]["steps"]
            self.run.record("lane_failed", trial=jobs[k].trial, fold=jobs[k].fold, reason=reason, step=step)

    def _keep(self, job: LaneJob, marks: Marks) -> None:
        scores = self.exam.scores(marks)
        self.run.write_lane_rows(job.trial, job.fold, self._columns(marks), ANSWERS)
        self.run.record("lane_examined", trial=job.trial, fold=job.fold, scores=_known(scores))

    def _take(self, jobs: Sequence[LaneJob]) -> list[Marks]:
        if not jobs:
            return []
        folders = [self.run.lane_folder(job.trial, job.fold) / "adapter" for job in jobs]
        adapters = [load_file(folder / "adapter_model.safetensors") for folder in folders]
        marks: list[Marks] = self.workers.apply(examine_adapters, self.exam, jobs, adapters, tick=self.progress.advance)
        return marks

    def examine_base(self, name: str, held_out: Sequence[int], exam: Exam | None = None) -> None:
        """The untuned base takes the exam (or `exam`, its few-shot variant) on all held-out rows."""
        if any(event["name"] == name for event in self.run.events("base_examined")):
            return
        exam = exam or self.exam
        with stage(self.progress, f"answer held-out rows: {name}", len(held_out)):
            marks = self.workers.apply(take_exam, exam, [held_out], tick=self.progress.advance)[0]
        with blamed(_refuse_metric):  # before any lane is trained: no lane's fault
            scores = exam.scores(marks)
        self.run.write_table(f"answers-{name}.parquet", self._columns(marks))
        self.run.record("base_examined", name=name, scores=_known(scores))

    def _columns(self, marks: Marks) -> dict[str, Any]:
        return self.exam.columns(marks, self.tokens.numbers)


def _known(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Scores with None where a metric has no value on these rows."""
    return {name: known(score) for name, score in scores.items()}


def _refuse_metric(reason: str) -> None:
    raise RecipeError(
        f"evaluate.metrics: judging the answers of the untuned base raised {reason}",
        "Mend that metric, or take it out of evaluate.metrics.",
    )


def take_exam(
    base: Base, exam: Exam, rows_K: Sequence[Sequence[int]], *, tick: Callable[[int], None] | None = None
) -> list[Marks]:
    """Whatever is in the base's slots takes the exam."""
    return exam.take(base, rows_K, tick=tick)


def examine_adapters(
    base: Base,
    exam: Exam,
    jobs: Sequence[LaneJob],
    adapters: Sequence[Mapping[str, Tensor]],
    *,
    tick: Callable[[int], None] | None = None,
) -> list[Marks]:
    """These lanes' adapters, put into slots, take the exam together on their held-out rows."""
    with attached(base, [job.spec for job in jobs]) as slots:
        for k, adapter in enumerate(adapters):
            slots.load(k, adapter)
        begin(slots)
        return exam.take(base, [job.held_out for job in jobs], tick=tick)


def score_few_shot(
    run: Run, workers: Any, shown: Tokens, held_out: Sequence[int], progress: Progress, *, most_tokens: int
) -> None:
    """The base's loss on held-out rows that follow examples: `shown` holds the rows with them."""
    if run.events("few_shot_scored"):
        return
    with stage(progress, "evaluate the base with examples", len(held_out)):
        score = partial(score_base, most_tokens=most_tokens)
        scores = workers.apply(score, shown, held_out, tick=progress.advance)
    columns = {"row": shown.numbers[scores.rows], "nll": scores.nll, "tokens": scores.targets, "hits": scores.hits}
    run.write_table("few-shot.parquet", columns)
    accuracy = float(scores.hits.sum() / max(1, scores.targets.sum()))
    run.record("few_shot_scored", loss=scores.loss, token_accuracy=accuracy, rows=len(np.unique(scores.rows)))
