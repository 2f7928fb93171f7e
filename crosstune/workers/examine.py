"""Finished lanes of a run take its exam: their adapters put back into slots, marks and scores written beside them.

Apart from training, so that a run that was interrupted, or spread over machines, only examines what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.torch import load_file

from crosstune.data.tokens import Tokens
from crosstune.model.attach import attached
from crosstune.model.base import Base
from crosstune.progress import Progress, stage
from crosstune.store.run import Run
from crosstune.train.evaluate import score_base
from crosstune.train.exam import Exam, Marks
from crosstune.train.generate import begin
from crosstune.train.lane import LaneJob

ANSWERS = "answers.parquet"


@dataclass(frozen=True)
class Examiner:
    """The exam of a run, and who has taken it."""

    run: Run
    base: Base
    tokens: Tokens
    exam: Exam
    progress: Progress

    def examine(self, jobs: Sequence[LaneJob]) -> None:
        """Let the lanes of `jobs` take the exam together, those that are finished and haven't."""
        done = {(event["trial"], event["fold"]) for event in self.run.events("lane_examined")}
        finished = self.run.finished_lanes()
        jobs = [job for job in jobs if (job.trial, job.fold) in finished and (job.trial, job.fold) not in done]
        if not jobs:
            return
        with attached(self.base, [job.spec for job in jobs]) as slots:
            for k, job in enumerate(jobs):
                folder = self.run.lane_folder(job.trial, job.fold) / "adapter"
                slots.load(k, load_file(folder / "adapter_model.safetensors"))
            begin(slots)
            rows_K = [job.held_out for job in jobs]
            with stage(self.progress, "answer held-out rows", sum(map(len, rows_K))):
                marks_K = self.exam.take(self.base, rows_K, tick=self.progress.advance)
        for job, marks in zip(jobs, marks_K, strict=True):
            self.run.write_lane_rows(job.trial, job.fold, self._columns(marks), ANSWERS)
            self.run.record("lane_examined", trial=job.trial, fold=job.fold, scores=self.exam.scores(marks))

    def examine_base(self, name: str, held_out: Sequence[int], exam: Exam | None = None) -> None:
        """The untuned base takes the exam (or `exam`, its few-shot variant) on all held-out rows."""
        if any(event["name"] == name for event in self.run.events("base_examined")):
            return
        exam = exam or self.exam
        with stage(self.progress, f"answer held-out rows: {name}", len(held_out)):
            marks = exam.take(self.base, [held_out], tick=self.progress.advance)[0]
        self.run.write_table(f"answers-{name}.parquet", self._columns(marks))
        self.run.record("base_examined", name=name, scores=exam.scores(marks))

    def _columns(self, marks: Marks) -> dict[str, Any]:
        return self.exam.columns(marks, self.tokens.numbers)


def score_few_shot(run: Run, base: Base, shown: Tokens, held_out: Sequence[int], progress: Progress) -> None:
    """The base's loss on held-out rows that follow examples: `shown` holds the rows with them."""
    if run.events("few_shot_scored"):
        return
    with stage(progress, "evaluate the base with examples", len(held_out)):
        scores = score_base(base, shown, held_out, tick=progress.advance)
    columns = {"row": shown.numbers[scores.rows], "nll": scores.nll, "tokens": scores.targets, "hits": scores.hits}
    run.write_table("few-shot.parquet", columns)
    accuracy = float(scores.hits.sum() / max(1, scores.targets.sum()))
    run.record("few_shot_scored", loss=scores.loss, token_accuracy=accuracy, rows=len(np.unique(scores.rows)))
