"""The story of a cross-validation: read this first. Each line is one concern with a home of its own.

The one door to torch: imported inside functions, after everything that can be refused without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.load import Rows
from crosstune.data.tokens import Tokens
from crosstune.errors import RecipeError
from crosstune.inputs import Inputs, judge, read_asked_rows
from crosstune.interrupt import Interrupts
from crosstune.memory.plan import Plan
from crosstune.metrics import find_metric
from crosstune.progress import Progress, choose_progress
from crosstune.recipe.asked import Asked, gather
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Folds
from crosstune.resources import checkpoints_of, end_recorded, make_plan, open_run, open_workers, random_state_kept
from crosstune.results.result import Result, make_report, write_out_of_fold, write_scores
from crosstune.results.review import review_rows
from crosstune.results.scores import record_pooled
from crosstune.splits.fold_units import rows_together
from crosstune.splits.splits import Fold, fold_table, split_rows
from crosstune.stats import held_out_share
from crosstune.store.run import Run
from crosstune.sweep.search import open_search
from crosstune.sweep.sweep import Trial, share_of_rows, trials_to_plan

if TYPE_CHECKING:
    from crosstune.train.exam import Exam
    from crosstune.train.lane import LaneJob
    from crosstune.workers.local import LocalWorkers
    from crosstune.workers.ray import RayWorkers


def cross_validate(
    recipe: Recipe | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    lora: Any = None,
    folds: Any = None,
    progress: Progress | None = None,
    retry_failed: bool = False,
    **sections: Any,
) -> Result:
    """Train every fold of every trial on one shared base, and score each on rows it never saw.

    recipe      a Recipe, a YAML file or a mapping; keywords change or replace it
    data        a path, hub id, pandas DataFrame, Hugging Face Dataset, or a mapping (the data section)
    model       a name, a mapping (the model section), or a transformers model in memory, with `tokenizer`
    lora        a mapping (the lora section) or a `peft.LoraConfig`
    folds       how many, a mapping (the folds section), or a scikit-learn splitter
    sections    train={…}, evaluate={…}, device={…}, output="runs/x", …
    retry_failed  train the lanes that failed in an earlier call once more

    Raises CrosstuneError (problem and fix) before anything is written if anything is wrong. A lane that fails is in
    `Result.failed`; the others finish. The same call goes on with an unfinished run; of a finished one it returns the
    result.
    SIGINT and SIGTERM finish the step, keep it and raise `Interrupted`, a KeyboardInterrupt.
    """
    asked = gather(recipe, data=data, model=model, tokenizer=tokenizer, lora=lora, folds=folds, sections=sections)
    if asked.recipe.folds.outer:
        raise RecipeError(
            f"folds.outer: {asked.recipe.folds.outer} asks for a nested cross-validation",
            "Call crosstune.nested_cross_validate, or crosstune run; or set folds.outer: 0.",
        )
    with random_state_kept(), Interrupts().caught() as interrupts:
        return _cross_validate(asked, progress or choose_progress(), interrupts, retry_failed)


def _cross_validate(asked: Asked, progress: Progress, interrupts: Interrupts, retry_failed: bool) -> Result:
    recipe, began = asked.recipe, time.monotonic()
    found = read_asked_rows(asked, progress)
    trials = trials_to_plan(recipe)
    planned: Mapping[str, Any] = {}
    if (Path(recipe.output) / "journal.jsonl").exists():
        with open_run(recipe, found) as run:  # refuses another recipe or other rows before anything is loaded
            if retry_failed:
                run.retry_failed()
            if run.is_finished:
                progress.say(f"{recipe.output} holds this run, finished; nothing to do")
                return Result(run.folder, make_report(run))
            planned = next(iter(reversed(run.events("plan"))), {})

    inputs = judge(asked, found, progress)
    rows, tokens, tokenizer = inputs.rows, inputs.tokens, inputs.tokenizer
    folds = split_rows(rows, recipe.folds, splitter=asked.splitter)
    exam = _exam(recipe, inputs, folds, progress)
    with open_workers(asked, tokenizer, progress, interrupts) as workers:
        plan = make_plan(workers, recipe, inputs, trials, folds, progress, planned)
        for trial in trials:
            make_jobs(workers, trial, folds)  # refuses targets that match no layer before anything is written
        work = _Work(recipe, rows, folds, tokens, tokenizer, workers, plan, exam, progress, interrupts)
        with open_run(recipe, found, tokens) as run:
            with end_recorded(run, began):
                _train(run, work)
            run.drop_checkpoints()
            write_scores(run)  # before the run counts as finished: a crash between the two does it again
            run.record("run_finished", failed=len(run.failed_lanes()))
            return Result(run.folder, make_report(run))


@dataclass(frozen=True)
class _Work:
    """What a run trains and scores, once all is read and loaded."""

    recipe: Recipe
    rows: Rows
    folds: Sequence[Fold]
    tokens: Tokens
    tokenizer: Any
    workers: LocalWorkers | RayWorkers
    plan: Plan
    exam: Exam | None
    progress: Progress
    interrupts: Interrupts

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Positions of all rows that some fold holds out."""
        return np.array(sorted({row for fold in self.folds for row in fold.held_out}), dtype=np.int64)


def _train(run: Run, work: _Work) -> None:
    """Everything between an opened run and its last lane."""
    from crosstune.record import Recorder
    from crosstune.store.writers import Writers
    from crosstune.train.fault import blamed
    from crosstune.workers.schedule import Schedule

    recipe, plan, progress = work.recipe, work.plan, work.progress
    held_out = sorted(fold_table(work.rows, work.folds))
    run.write_folds({"row": [row for row, _ in held_out], "fold": [fold for _, fold in held_out]})
    _write_groups(run, work.rows, recipe.folds)
    run.record("plan", **plan.settings, peak_bytes=plan.peak_bytes, waves=plan.waves, allowed=list(recipe.lint.allow))
    run.record("workers", device=str(work.workers.place()[0]), workers=work.workers.facts)
    base_scores = _score_base(run, work)
    examine = _examine_base(run, work)
    trials: dict[int, Trial] = {}
    writers = Writers()
    recorder = Recorder(run, recipe, trials, work.tokens, work.tokenizer, base_scores, writers)
    metric = str(recipe.sweep.get("metric", "loss"))
    share = held_out_share([(len(fold.train), len(fold.held_out)) for fold in work.folds])
    search = open_search(
        recipe, folds=len(work.folds), test_share=share, higher_is_better=find_metric(metric).higher_is_better
    )
    schedule = Schedule(
        run, search, lambda trial: _as_kept(run, make_jobs(work.workers, trial, work.folds)),
        trials=trials, lanes=plan.lanes, metric=metric, report=recorder, examine=examine,
    )  # fmt: skip
    with writers:
        work.workers.run_waves(
            schedule.waves(), work.tokens, plan, report=schedule.report,
            checkpoints=checkpoints_of(run, recipe, work.interrupts, progress),
            given_up=schedule.given_up if search.waits else None,
        )  # fmt: skip
    schedule.catch_up()
    write_out_of_fold(run)
    with blamed(_refuse_metric):  # all lanes are over: no lane's fault
        record_pooled(run)
    review_rows(run, work.rows, say=progress.say)


def _examine_base(run: Run, work: _Work) -> Callable[[Sequence[LaneJob]], None] | None:
    """Baselines beyond the base's loss, and what lets finished lanes take the exam; None where the loss is all."""
    from crosstune.train.exam import few_shot_exam, few_shot_rows
    from crosstune.workers.examine import Examiner, score_few_shot

    examiner = None if work.exam is None else Examiner(run, work.workers, work.tokens, work.exam, work.progress)
    if examiner is not None:
        if work.exam is not None and work.exam.choices is not None and not run.events("labels"):
            run.record("labels", labels=list(work.exam.choices.names))
        examiner.examine_base("base", work.held_out.tolist())
    evaluate = work.recipe.evaluate
    if evaluate.shots:
        shown = few_shot_rows(
            work.rows, work.tokens, work.folds, work.tokenizer, work.recipe.data,
            shots=evaluate.shots, seed=evaluate.seed,
        )  # fmt: skip
        score_few_shot(
            run, work.workers, shown, work.held_out.tolist(), work.progress, most_tokens=work.plan.evaluate_tokens
        )
        if examiner is not None and work.exam is not None:
            examiner.examine_base("few-shot", work.held_out.tolist(), few_shot_exam(work.exam, shown))
    return None if examiner is None else examiner.examine


def _refuse_metric(reason: str) -> None:
    raise RecipeError(
        f"evaluate.metrics: judging all answers together raised {reason}",
        "Mend that metric and give the same command again: every lane is kept.",
    )


def _write_groups(run: Run, rows: Rows, folds: Folds) -> None:
    """groups.parquet: which rows stay together, for intervals that draw them together. Not written if none do."""
    sets = rows_together(rows, folds)
    if len(set(sets)) < len(sets) and run.read_table("groups.parquet") is None:
        run.write_table("groups.parquet", {"row": [row.number for row in rows.rows], "group": sets})


def _exam(recipe: Recipe, inputs: Inputs, folds: Sequence[Fold], progress: Progress) -> Exam | None:
    """What is asked of held-out rows beyond the loss; refuses labels and metrics that can't be."""
    from crosstune.train.exam import refuse_undefined, set_exam

    exam = set_exam(recipe.evaluate, inputs.rows, inputs.tokens, inputs.tokenizer, recipe.data)
    if exam is not None:
        refuse_undefined(exam, str(recipe.sweep.get("metric", "loss")), folds)
        if exam.choices is not None and (others := exam.choices.others):
            progress.say(
                f"{len(others)} of {len(inputs.rows)} rows answer none of evaluate.labels, such as row "
                f"{inputs.rows.rows[others[0]].number}: metrics of choices leave them out"
            )
    return exam


def make_jobs(workers: LocalWorkers | RayWorkers, trial: Trial, folds: Sequence[Fold]) -> list[LaneJob]:
    """The trial's lanes, one a fold. Refuses targets that match no layer."""
    from crosstune.model.targets import resolve_targets
    from crosstune.train.lane import LaneJob

    recipe = trial.recipe
    targets = workers.apply(resolve_targets, recipe.lora.targets)
    return [
        LaneJob(
            trial.index, fold.index, recipe.lora, recipe.train, recipe.evaluate,
            share_of_rows(fold.train, recipe.train.share, recipe.train.seed), fold.held_out, targets,
            packing=recipe.data.packing,
        )
        for fold in folds
    ]  # fmt: skip


def _as_kept(run: Run, jobs: Sequence[LaneJob]) -> Sequence[LaneJob]:
    """The jobs, once it is sure that what an earlier call kept of them are adapters of their layers."""
    from crosstune.export.saved import refuse_other_layers

    finished = run.finished_lanes()
    for job in jobs:
        if (job.trial, job.fold) in finished:
            refuse_other_layers(run.lane_folder(job.trial, job.fold) / "adapter", job.targets)
    return jobs


def _score_base(run: Run, work: _Work) -> Any:
    from crosstune.record import read_base_scores, write_base_scores
    from crosstune.train.evaluate import score_base

    stored = read_base_scores(run, work.tokens, work.held_out)
    if stored is not None:
        return stored
    score = partial(score_base, most_tokens=work.plan.evaluate_tokens)
    work.progress.start("evaluate the untuned base", len(work.held_out))
    scores = work.workers.apply(score, work.tokens, work.held_out, tick=work.progress.advance)
    work.progress.stop()
    write_base_scores(run, work.tokens, scores)
    return scores
