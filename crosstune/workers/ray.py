"""Waves over the GPUs and machines of a Ray cluster. Only this file and cluster.py import ray.

A worker is one actor with one base (worker.py). It is handed a wave and answers with a stream: events, progress, and
checkpoints, which are written here, so no file system has to be shared. A worker that is lost is replaced and its wave
handed out again from its last checkpoint; while the cluster has no place for the new one, the others go on. How lanes
form waves was decided before, so neither the number of workers nor who trained what changes a result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from crosstune.data.tokens import Tokens
from crosstune.errors import CrosstuneError, RunError
from crosstune.interrupt import Interrupts
from crosstune.memory.plan import Plan
from crosstune.memory.shape import ModelShape
from crosstune.memory.visible import show_gpus
from crosstune.progress import Progress, stage
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Model
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.events import GivenUp, LanesOver, Report
from crosstune.train.fault import WaveFault, reason_of
from crosstune.train.lane import LaneJob
from crosstune.train.recover import PlanChanged, WaveSplit
from crosstune.units import bytes_words
from crosstune.workers.cluster import connect, shares, why_silent
from crosstune.workers.waves import fail_wave, key
from crosstune.workers.worker import Asking, Kept, Moved, Order, Stopped, Worker

# A worker trains in one thread and hears "stop" and answers in another.
GROUPS = {"control": 1}
WAIT_SECONDS = 0.2  # for news of any worker, before signals are looked at again
SAY_SECONDS = 30.0  # of waiting for a place in the cluster, before it is said


@dataclass
class _Busy:
    """A wave that a worker trains, or will as soon as the worker has started."""

    jobs: Sequence[LaneJob]
    kept: Checkpoints
    worker: int
    stream: Any = None  # of news; None until it is handed out
    started: Any = None  # answers when a new worker runs
    tries: int = 1


class RayWorkers:
    """The workers of one run. `with RayWorkers(...) as workers:`; a cluster that was started here ends with it."""

    def __init__(
        self, recipe: Recipe, tokenizer: Any, progress: Progress, interrupts: Interrupts, *, threads: int
    ) -> None:
        self.recipe, self.tokenizer, self.threads = recipe, tokenizer, threads
        self.progress, self.interrupts = progress, interrupts
        if recipe.device.gpus != "auto":
            show_gpus([int(gpu) for gpu in recipe.device.gpus])  # a cluster that is started here finds these only
        self._joined = connect(recipe.device.ray or "auto")
        self._head = ray.get_runtime_context().gcs_address
        self._actors: list[Any] = []
        self._busy: list[_Busy] = []
        try:
            gpus, cpus, count = shares(recipe)
            share: dict[str, Any] = {"num_gpus": gpus, "num_cpus": cpus, "concurrency_groups": GROUPS}
            self._make: Any = ray.remote(**share)(Worker)
            self._actors = [self._create() for _ in range(count)]
            for actor in self._actors:
                self._equip(actor)
            self.facts = [self._get(actor.facts.remote()) for actor in self._actors]
        except BaseException:
            self.close()
            raise
        progress.say(f"ray: {count} workers on {len({fact['host'] for fact in self.facts})} machine(s)")

    def __enter__(self) -> RayWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, leave the cluster, and end it if it was started here."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._joined:
            ray.shutdown()

    def place(self) -> tuple[Any, int]:
        """The device of a worker, and the bytes that are free on the fullest of them."""
        found = [self._get(actor.place.remote()) for actor in self._actors]
        return found[0][0], min(free for _, free in found)

    def warm_up(self, model: Model, shape: ModelShape, *, dropout: bool) -> None:
        """A worker compiles a kernel when it first needs it."""

    def lay_out(self, plan: Plan) -> None:
        """Each worker has one GPU, and its base lies there."""
        assert plan.layout is None

    def apply(self, function: Callable[..., Any], *args: Any, tick: Callable[[int], None] | None = None) -> Any:
        """`function(base, *args)` in a worker that is free, or will be; how far it has come isn't told."""
        for left in reversed(range(self.recipe.device.retries + 1)):
            worker = min(self._free() or range(len(self._actors)))
            try:
                return self._get(self._actors[worker].apply.remote(function, *args))
            except RayActorError:
                if not left:
                    raise
                self._actors[worker] = self._create()
                self._equip(self._actors[worker])
        raise AssertionError("unreachable")

    def run_waves(
        self,
        waves: Iterable[Sequence[LaneJob]],
        tokens: Tokens,
        plan: Plan,
        *,
        report: Report,
        checkpoints: Callable[[Sequence[LaneJob]], Checkpoints],
        given_up: GivenUp | None = None,
    ) -> None:
        """Train the waves, as many at a time as there are workers; one at a time where `given_up` may end lanes early.

        Which lanes are given up depends on scores so far: side by side it would depend on who was faster.
        """
        task = _Task(ray.put(tokens), plan, report, given_up)
        waiting, busy = iter(waves), self._busy
        width = len(self._actors) if given_up is None else 1
        with stage(self.progress, "train"), self.interrupts.waiting_for_a_step():
            try:
                while True:
                    while len(busy) < width and not self.interrupts.asked and (jobs := next(waiting, None)) is not None:
                        busy.append(_Busy(jobs, checkpoints(jobs), min(self._free())))
                        self._hand_out(busy[-1], task)
                    if self.interrupts.asked:
                        self._stop_all()
                    if not busy:
                        return
                    for one in self._with_news():
                        if not self._hear(one, task):
                            busy.remove(one)
                            one.kept.close()
            finally:
                for one in busy:
                    one.kept.close()
                busy.clear()

    # — one wave —

    def _free(self) -> set[int]:
        return set(range(len(self._actors))) - {one.worker for one in self._busy}

    def _hand_out(self, one: _Busy, task: _Task) -> None:
        asks = task.given_up is not None
        order = Order(one.jobs, task.plan, one.kept.load(), self.recipe.train.checkpoint_every, asks)
        one.started = None
        one.stream = self._actors[one.worker].train.options(num_returns="streaming").remote(order, task.tokens)

    def _with_news(self) -> list[_Busy]:
        sources = [one.stream if one.started is None else one.started for one in self._busy]
        ready, _ = ray.wait(sources, timeout=WAIT_SECONDS)
        return [one for one, source in zip(self._busy, sources, strict=True) if any(source is r for r in ready)]

    def _hear(self, one: _Busy, task: _Task) -> bool:
        """Take the next item of a stream; False when the wave is over."""
        try:
            if one.started is not None:
                self._equip(self._actors[one.worker])
                self._hand_out(one, task)
                return True
            item = ray.get(next(one.stream))
        except StopIteration:
            one.kept.wait() if self.interrupts.asked else one.kept.drop()
            return False
        except RayError as error:
            return self._again(one, error, task.report)
        if isinstance(item, Moved):
            self.progress.advance(item.steps, **item.facts)
        elif isinstance(item, Kept):
            one.kept.save(item.packed)
        elif isinstance(item, Asking):
            answer = {key(job): task.given_up(job) for job in one.jobs} if task.given_up else {}
            self._actors[one.worker].answer.options(concurrency_group="control").remote(answer)
        elif isinstance(item, LanesOver):
            task.report(item)
            for event in item.lanes:
                task.report(event)
        elif not isinstance(item, Stopped):
            task.report(item)
        if isinstance(item, PlanChanged | WaveSplit):
            self.progress.say(str(item))
        if isinstance(item, PlanChanged):
            task.plan = item.after
        return True

    def _again(self, one: _Busy, error: RayError, report: Report) -> bool:
        """The worker was lost, or the wave raised: a new worker goes on, or the lanes fail after so many tries."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, CrosstuneError):
            raise cause
        one.kept.wait()
        if fault := why_silent(self._head):
            self._actors = []  # to end them, the head would be asked, in vain and for a minute
            raise RunError(
                f"ray-lost: the head node of the Ray cluster at {self._head} no longer answers: {fault}",
                "Start the cluster again and give the same command: the run goes on from its last checkpoints.",
            )
        what = "its worker was lost"
        if not isinstance(error, RayActorError):
            what = reason_of(cause)
        ray.kill(self._actors[one.worker])  # also where it only raised: after a CUDA error a process is of no more use
        self._actors[one.worker] = self._create()
        if one.tries > self.recipe.device.retries:
            self.progress.say(f"a wave failed {one.tries} times ({what}); its lanes are recorded as failed")
            step = cause.step if isinstance(cause, WaveFault) else _step_kept(one.kept)
            fail_wave(one.jobs, f"worker-failed: {what}, {one.tries} times", step, report)
            return False
        one.tries += 1
        self.progress.say(f"a wave goes on from its last checkpoint: {what}")
        one.started = self._actors[one.worker].facts.remote()
        return True

    def _stop_all(self) -> None:
        """Waves under way are to end after their step; those that wait for a worker, who may never come, end here."""
        for one in list(self._busy):
            if one.started is None:
                self._actors[one.worker].stop.options(concurrency_group="control").remote(self.interrupts.asked)
            else:
                one.kept.close()
                self._busy.remove(one)

    # — workers —

    def _create(self) -> Any:
        model, place = self.recipe.model, Path(self.recipe.model.name).absolute()
        if place.exists():  # a worker's working directory is its own
            model = model.model_copy(update={"name": str(place)})
        return self._make.remote(model, self.tokenizer, self.recipe.device, self.threads)

    def _equip(self, actor: Any) -> None:
        """Send a model in a folder through the object store, unless that machine has it, or has received it before."""
        place = Path(self.recipe.model.name).absolute()
        if not place.exists() or self._get(actor.sees.remote(str(place))):
            return
        files = {str(file.relative_to(place)): file for file in place.rglob("*") if file.is_file()}
        files = files or {place.name: place}  # a .gguf file
        sizes = {name: file.stat().st_size for name, file in files.items()}
        prints = {name: (sizes[name], file.stat().st_mtime_ns) for name, file in files.items()}
        name_there = hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()[:16]
        if not self._get(actor.holds.remote(name_there, sizes)):
            size = bytes_words(sum(sizes.values()))
            self.progress.say(f"ray: sending {place.name} to a machine that lacks it ({size})")
            for name, file in files.items():
                content = np.memmap(file, np.uint8, "r") if sizes[name] else np.zeros(0, np.uint8)
                self._get(actor.receive.remote(name_there, name, content))
        self._get(actor.use.remote(name_there, "" if place.is_dir() else place.name))

    def _get(self, reference: Any) -> Any:
        """The value, or what the worker raised, as if it had been raised here."""
        while not ray.wait([reference], timeout=SAY_SECONDS)[0]:
            if not self._busy:
                self.progress.say("ray: waiting for a worker (a free GPU, or a long evaluation)")
        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, CrosstuneError) else error from None


@dataclass
class _Task:
    """What all waves of a call share. `plan` becomes a smaller one when a worker runs out of memory."""

    tokens: Any  # in the object store
    plan: Plan
    report: Report
    given_up: GivenUp | None


def _step_kept(kept: Checkpoints) -> int:
    packed = kept.load()
    return 0 if packed is None else int(packed[1]["step"])
