"""From the winning setting to one adapter trained on all rows; or an ordinary fine-tune where there was no contest.

fit("runs/rows")                    the best trial of a run, ended at the epoch that its folds found best
fit("recipe.yaml", held_out=0.1)    no folds: a recipe as it stands
fit(["a.yaml", "b.yaml"], seeds=[1, 2])    several recipes over one base and the same rows, several seeds: side by side
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.errors import LaneFailed, ModelError, RecipeError, RunError
from crosstune.fitting.fitted import Fit, Fitted
from crosstune.fitting.task import Task, gather_run, task_of_recipes, task_of_run
from crosstune.inputs import Inputs, judge, read_asked_rows
from crosstune.interrupt import Interrupts
from crosstune.progress import Progress, choose_progress
from crosstune.recipe.asked import Asked, gather
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Folds
from crosstune.resources import checkpoints_of, end_recorded, make_plan, open_run, open_workers, random_state_kept
from crosstune.splits.splits import Fold, split_rows
from crosstune.store.run import Run
from crosstune.sweep.sweep import Trial, share_of_rows

if TYPE_CHECKING:
    from crosstune.data.load import Rows
    from crosstune.memory.plan import Plan
    from crosstune.train.lane import LaneJob
    from crosstune.workers.local import LocalWorkers
    from crosstune.workers.ray import RayWorkers


Source = Recipe | str | os.PathLike[str] | Mapping[str, Any]


def fit(
    source: Source | Sequence[Source],
    *,
    trial: int | str = "best",
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    held_out: float | None = None,
    seeds: Sequence[int] = (),
    again: bool = False,
    progress: Progress | None = None,
) -> Fit:
    """Train one adapter on all rows, and write it with tokenizer, stop tokens and card.

    source     a run's folder: its best trial (or `trial`) on all its rows; or a recipe, without folds; or several
               recipes that differ in lora and train only: one adapter each, trained side by side
    trial      "best" or a number, where `source` is a run
    data       rows in memory, where the run or recipe was made from such
    model      a transformers model in memory with its `tokenizer`, likewise
    held_out   a recipe only: share of the rows kept for scoring (equal rows stay together)
    seeds      a recipe only: one adapter a seed, trained side by side
    again      train once more where the folder has a fit

    The same call on a finished fit returns it. Ctrl-C keeps what was done, and the same call goes on from there.
    Raises LaneFailed if a lane became non-finite.
    """
    progress = progress or choose_progress()
    if isinstance(source, str | os.PathLike) and (Path(source) / "journal.jsonl").is_file() and not seeds:
        if held_out is not None:
            raise RecipeError("held_out is given, and a run's fit takes all rows", "Its folds have scored it already.")
        task = task_of_run(Path(source), trial, gather_run(Path(source), data, model, tokenizer))
    else:
        several = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
        every = [gather(one, data=data, model=model, tokenizer=tokenizer, sections={}) for one in several]
        task = task_of_recipes(every, held_out, seeds)
    with random_state_kept(), Interrupts().caught() as interrupts:
        return _fit(task, again, progress, interrupts)


def _fit(task: Task, again: bool, progress: Progress, interrupts: Interrupts) -> Fit:
    began, recipe = time.monotonic(), task.asked.recipe
    found = read_asked_rows(task.asked, progress)
    with open_run(recipe, found) as run:
        _refuse_other_settings(run, task)
        if again:
            for trial in task.trials:
                run.record("lane_again", trial=trial.index, fold=None)
        if all((trial.index, None) in run.finished_lanes() for trial in task.trials):
            progress.say(f"{recipe.output} holds this fit; nothing to do (again: train it once more)")
            return _found(run, task, 0.0)
    inputs = judge(task.asked, found, progress, has_folds=bool(task.expected))
    fold = _all_rows(inputs.rows, task)
    with open_workers(task.asked, inputs.tokenizer, progress, interrupts) as workers:
        plan = make_plan(workers, recipe, inputs, task.trials, [fold], progress)
        scene = _Scene(task, inputs, fold, workers)
        jobs = [_job(scene, trial) for trial in task.trials]
        with open_run(recipe, found, inputs.tokens) as run:
            with end_recorded(run, began):
                _train(run, scene, jobs, plan, progress, interrupts)
            return _found(run, task, time.monotonic() - began)


def _refuse_other_settings(run: Run, task: Task) -> None:
    """A folder of fits stays with its recipes and seeds: its adapters go by number."""
    if task.expected:
        return  # of a cross-validation's trials
    now = [{"trial": trial.index, "settings": dict(trial.settings)} for trial in task.trials]
    now = json.loads(json.dumps(now))  # as the journal has it
    known = run.events("trials")
    if known and known[-1]["trials"] != now:
        was = "; ".join(str(trial["settings"]) for trial in known[-1]["trials"])
        raise RunError(
            f"resume-recipe-changed: {str(run.folder)!r} holds fits of other settings or seeds: {was}",
            "Set output (--out) to another folder.",
        )
    if not known:
        run.record("trials", trials=now)


@dataclass(frozen=True)
class _Scene:
    """What the lanes of a fit are trained on, and by whom."""

    task: Task
    inputs: Inputs
    fold: Fold
    workers: LocalWorkers | RayWorkers


def _all_rows(rows: Rows, task: Task) -> Fold:
    """The fold of a fit: every row that the run's folds use, or all but the share that is held out."""
    asked = task.asked
    if task.held_out is not None:
        split = Folds(
            kind="shuffle", k=2, test_share=task.held_out, group=asked.recipe.folds.group, seed=asked.recipe.folds.seed
        )
        return split_rows(rows, split)[0]
    if not task.expected:
        return Fold(0, tuple(range(len(rows))), ())
    folds = split_rows(rows, asked.recipe.folds, splitter=asked.splitter)
    used = {row for fold in folds for row in (*fold.train, *fold.held_out)}
    return Fold(0, tuple(sorted(used)), ())


def _job(scene: _Scene, trial: Trial) -> LaneJob:
    """One lane on all rows. What early stopping decided on the folds is a number of epochs here."""
    from crosstune.model.targets import resolve_targets
    from crosstune.train.lane import LaneJob

    recipe, fold, expected = trial.recipe, scene.fold, scene.task.expected.get(trial.index)
    train = recipe.train
    if expected is not None:
        train = train.model_copy(update={"stop": None, "keep": "last"})
    return LaneJob(
        trial=trial.index,
        fold=None,
        lora=recipe.lora,
        train=train,
        evaluate=recipe.evaluate,
        train_rows=share_of_rows(fold.train, train.share, train.seed),
        held_out=fold.held_out,
        targets=scene.workers.apply(resolve_targets, recipe.lora.targets),
        packing=recipe.data.packing,
        ends_at=1.0 if expected is None else expected.ends_at,
    )


def _train(
    run: Run, scene: _Scene, jobs: Sequence[LaneJob], plan: Plan, progress: Progress, interrupts: Interrupts
) -> None:
    """Train the lanes that aren't over, and write each as it ends."""
    from crosstune.export.adapter import TokenizerFiles
    from crosstune.fitting.record import FitRecorder
    from crosstune.store.writers import Writers
    from crosstune.train.evaluate import score_base
    from crosstune.workers.waves import waves_left

    recipe = scene.task.asked.recipe
    tokens, held_out = scene.inputs.tokens, scene.fold.held_out
    score = partial(score_base, most_tokens=plan.evaluate_tokens)
    base_scores = scene.workers.apply(score, tokens, held_out) if held_out else None
    writers = Writers()
    recorder = FitRecorder(
        run=run,
        recipe=recipe,
        trials={trial.index: trial for trial in scene.task.trials},
        expected=scene.task.expected,
        tokens=tokens,
        tokenizer=scene.inputs.tokenizer,
        base_files=_base_files(scene.task.asked),
        base_scores=base_scores,
        writers=writers,
        tokenizer_files=TokenizerFiles(scene.inputs.tokenizer),
    )
    waves = waves_left(jobs, plan.lanes, over=run.lanes_over(), again=run.lanes_again())
    checkpoints = checkpoints_of(run, recipe, interrupts, progress)
    with writers:
        scene.workers.run_waves(waves, tokens, plan, report=recorder, checkpoints=checkpoints)


def _base_files(asked: Asked) -> dict[str, str]:
    """SHA-256 of the base's weight files, so that merging into others is refused."""
    from crosstune.export.weights import weights_checksums

    if asked.model is not None:
        return {}  # a model in memory has no files that are known to be its own
    try:
        return weights_checksums(asked.recipe.model.name, revision=asked.recipe.model.revision)
    except ModelError:  # pickled weights, which merge refuses anyway
        return {}


def _found(run: Run, task: Task, seconds: float) -> Fit:
    """The fits as the run folder has them; raises LaneFailed where a lane failed."""
    from crosstune.export.serve import serve_commands

    recipe, finished = task.asked.recipe, run.finished_lanes()
    failed = [trial.index for trial in task.trials if (trial.index, None) not in finished]
    if failed:
        reason = run.failed_lanes()[failed[0], None]["reason"]
        numbers = reason.startswith("non-finite")
        do = "Lower train.learning_rate, or set device.precision to fp32" if numbers else "Mend what it names"
        raise LaneFailed(
            f"the fit of trial {failed[0]} failed: {reason} ({len(failed)} of {len(task.trials)} lanes)",
            f"{do}; then fit again with again=True (--again).",
        )
    fits = []
    for trial in task.trials:
        event, folder = finished[trial.index, None], run.lane_folder(trial.index, None) / "adapter"
        name = run.folder.name if len(task.trials) == 1 else f"{run.folder.name}-{trial.index}"
        base, rank = recipe.model.name, trial.recipe.lora.rank
        commands = serve_commands(folder, kind="adapter", base_name=base, rank=rank, name=name)
        fits.append(
            Fitted(
                trial.index, folder, event["settings"], event["rows"], event["steps"], event["epochs"],
                task.expected.get(trial.index), event["held_out"], commands,
            )
        )  # fmt: skip
    return Fit(run.folder, tuple(fits), seconds)
