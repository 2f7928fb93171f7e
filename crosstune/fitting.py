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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.asked import Asked, gather
from crosstune.errors import LaneFailed, ModelError, RecipeError, RunError
from crosstune.fitted import Expected, Fit, Fitted, expected_of
from crosstune.inputs import Inputs, judge, read_asked_rows
from crosstune.interrupt import Interrupted, Interrupts
from crosstune.progress import Progress, choose_progress
from crosstune.recipe import Recipe
from crosstune.resources import open_run, open_workers, plan_lanes, random_state_kept, settle_plan
from crosstune.result import Result
from crosstune.sections import Folds
from crosstune.splits import Fold, split_rows
from crosstune.store.run import Run
from crosstune.sweep import Trial, make_trial, read_sweep, share_of_rows

if TYPE_CHECKING:
    from crosstune.data.load import Rows
    from crosstune.memory.plan import Plan
    from crosstune.train.lane import LaneJob
    from crosstune.workers.local import LocalWorkers
    from crosstune.workers.ray import RayWorkers


Source = Recipe | str | os.PathLike[str] | Mapping[str, Any]
MAY_DIFFER = ("lora", "train")  # between recipes that are fitted together; the rest is shared by all lanes


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
        task = _from_run(Path(source), trial, gather_run(Path(source), data, model, tokenizer))
    else:
        several = source if isinstance(source, Sequence) and not isinstance(source, str) else [source]
        every = [gather(one, data=data, model=model, tokenizer=tokenizer, sections={}) for one in several]
        task = _from_recipes(every, held_out, seeds)
    with random_state_kept(), Interrupts().caught() as interrupts:
        return _fit(task, again, progress, interrupts)


@dataclass(frozen=True)
class Task:
    """What is to be fitted, before anything heavy is loaded."""

    asked: Asked
    trials: tuple[Trial, ...]
    held_out: float | None = None
    expected: Mapping[int, Expected] = field(default_factory=dict)


def gather_run(folder: Path, data: Any = None, model: Any = None, tokenizer: Any = None) -> Asked:
    """The recipe of a run, and the things in memory that it was made from."""
    stored = Run.read(folder).stored_recipe()
    asked = gather({**stored, "output": str(folder)}, data=None, model=model, tokenizer=tokenizer, sections={})
    if data is not None:
        return Asked(asked.recipe, data, asked.model, asked.tokenizer, asked.splitter)
    if asked.recipe.data.path.endswith(" in memory"):
        raise RunError(
            f"the rows of {str(folder)!r} were a {asked.recipe.data.path}", "Pass them again: data=…, from Python."
        )
    return asked


def _from_run(folder: Path, trial: int | str, asked: Asked) -> Task:
    result = Result.read(folder)
    known = {entry["trial"]: entry for entry in result.trials if entry["finished"]}
    if not known:
        raise RunError(f"{str(folder)!r} has no finished fold yet", f"Finish it: crosstune run {folder}/recipe.yaml")
    number = result.best["trial"] if trial == "best" else trial
    if number not in known:
        raise RunError(
            f"{str(folder)!r} has no trial {trial!r} with a score",
            f"Choose best, or one of {', '.join(map(str, known))}.",
        )
    axes = read_sweep(asked.recipe)[1] if asked.recipe.sweep else ()
    alone = {axis.name: axis.values[0] for axis in axes if not axis.is_range and len(axis.values) == 1}
    chosen = make_trial(asked.recipe, int(number), {**alone, **known[number]["settings"]})
    return Task(asked, (chosen,), expected={chosen.index: expected_of(Run.read(folder), chosen)})


def _from_recipes(every: Sequence[Asked], held_out: float | None, seeds: Sequence[int]) -> Task:
    if held_out is not None and not 0 < held_out < 1:
        raise RecipeError(f"held_out is {held_out}", "Give a share between 0 and 1, such as 0.1.")
    for recipe in (asked.recipe for asked in every):
        if recipe.sweep:
            raise RecipeError(
                "the recipe has a sweep: which of its settings is to be fitted isn't known yet",
                f"Run it, then fit the winner: crosstune fit {recipe.output}",
            )
        if recipe.train.stop is not None and recipe.train.stop.on == "held_out" and held_out is None:
            raise RecipeError(
                "train.stop.on is held_out, and no row is held out", "Give held_out=0.1, or stop on own_rows."
            )
    asked = every[0]
    of_seeds = [{"train.seed": seed} for seed in seeds] or [{}]
    settings = [own | seed for own in _differences([one.recipe for one in every]) for seed in of_seeds]
    return Task(asked, tuple(make_trial(asked.recipe, i, setting) for i, setting in enumerate(settings)), held_out)


def _differences(recipes: Sequence[Recipe]) -> list[dict[str, Any]]:
    """What each recipe sets that isn't the same in all: lora and train by dotted name. Refuses other differences."""
    trees = [recipe.model_dump() for recipe in recipes]
    flat = [
        {f"{name}.{key}": value for name, part in tree.items() for key, value in _parts(part).items()} for tree in trees
    ]
    differing = [name for name in flat[0] if any(one[name] != flat[0][name] for one in flat)]
    for number, one in enumerate(flat, start=1):
        unlike = [
            f"{name.rstrip('.')} is {one[name]!r}, not {flat[0][name]!r}"
            for name in differing
            if name.split(".")[0] not in MAY_DIFFER and one[name] != flat[0][name]
        ]
        if unlike:
            raise RecipeError(
                f"recipe {number} can't be fitted together with the first: {'; '.join(unlike)}",
                "Recipes fitted together share base, rows and output, and differ in lora and train only: set what "
                "differs for all of them (KEY=VALUE, --out DIR), or fit them one by one.",
            )
    found = [{name: one[name] for name in differing} for one in flat]
    twins = [number for number, own in enumerate(found, start=1) if own in found[: number - 1]]
    if twins:
        raise RecipeError(
            f"recipe {twins[0]} has the same settings as one before it", "Name each once; for several runs use seeds."
        )
    return found


def _parts(section: Any) -> Mapping[str, Any]:
    return section if isinstance(section, Mapping) else {"": section}


def _fit(task: Task, again: bool, progress: Progress, interrupts: Interrupts) -> Fit:
    began, recipe = time.monotonic(), task.asked.recipe
    found = read_asked_rows(task.asked, progress)
    with open_run(recipe, found) as run:
        was_finished = run.is_finished
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
        place, free_bytes = workers.place()
        progress.say(f"device: {place}")
        plan = plan_lanes(recipe, inputs.shape, inputs.tokens, task.trials, [fold], place, free_bytes)
        plan = settle_plan(plan, inputs.config, progress)
        workers.lay_out(plan)
        progress.say(f"plan: {plan}")
        scene = _Scene(task, inputs, fold, workers)
        jobs = [_job(scene, trial) for trial in task.trials]
        with open_run(recipe, found, inputs.tokens) as run:
            try:
                _train(run, scene, jobs, plan, progress, interrupts)
            except Interrupted as end:
                run.record("interrupted", signal=end.number)
                raise
            finally:
                run.record("closed", seconds=time.monotonic() - began)
            if was_finished:
                run.record("run_finished", failed=len(run.failed_lanes()))
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
    from crosstune.fit_record import FitRecorder
    from crosstune.train.checkpoint import Checkpoints
    from crosstune.train.evaluate import score_base
    from crosstune.workers.waves import waves_left

    recipe = scene.task.asked.recipe

    def checkpoints(wave: Sequence[LaneJob]) -> Checkpoints:
        lanes = [(job.trial, job.fold) for job in wave]
        return Checkpoints(run.checkpoint_folder(lanes), recipe.train.checkpoint_every, interrupts, progress.say)

    tokens, held_out = scene.inputs.tokens, scene.fold.held_out
    score = partial(score_base, most_tokens=plan.evaluate_tokens)
    base_scores = scene.workers.apply(score, tokens, held_out) if held_out else None
    recorder = FitRecorder(
        run=run,
        recipe=recipe,
        trials={trial.index: trial for trial in scene.task.trials},
        expected=scene.task.expected,
        tokens=tokens,
        tokenizer=scene.inputs.tokenizer,
        base_files=_base_files(scene.task.asked),
        base_scores=base_scores,
    )
    waves = waves_left(jobs, plan.lanes, over=run.lanes_over(), again=run.lanes_again())
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
