"""Waves over the GPUs and machines of a Ray cluster: the only `import ray`.

A worker is one actor with one base (worker.py). It is handed a wave and answers with a stream: events, progress, and
checkpoints, which are written here, so no file system has to be shared. A worker that is lost is replaced and its wave
handed out again from its last checkpoint. How lanes form waves was decided before, so neither the number of workers
nor who trained what changes a result.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from crosstune.data.tokens import Tokens
from crosstune.errors import CrosstuneError, DeviceError
from crosstune.interrupt import Interrupts
from crosstune.memory.plan import Plan
from crosstune.progress import Progress, stage
from crosstune.recipe import Recipe
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.lane import LaneJob
from crosstune.train.wave import GivenUp, LaneRetired, Report
from crosstune.workers.waves import key
from crosstune.workers.worker import Asking, Kept, Moved, Order, Stopped, Worker

# A worker trains in one thread and hears "stop" and answers in another.
GROUPS = {"control": 1}


@dataclass
class _Busy:
    """A wave that is being trained somewhere."""

    jobs: Sequence[LaneJob]
    kept: Checkpoints
    worker: int
    stream: Any
    tries: int = 1
    step: int = 0  # of the newest checkpoint


class RayWorkers:
    """The workers of one run. `with RayWorkers(...) as workers:`; the cluster that was started here ends with it."""

    def __init__(
        self, recipe: Recipe, tokenizer: Any, progress: Progress, interrupts: Interrupts, *, threads: int
    ) -> None:
        self.interrupts = interrupts
        self.recipe, self.tokenizer, self.progress, self.threads = recipe, tokenizer, progress, threads
        self._joined = _connect(recipe.device.ray or "auto")
        self._gpus_each, self._cpus_each, count = _shares(recipe)
        shares: dict[str, Any] = {
            "num_gpus": self._gpus_each,
            "num_cpus": self._cpus_each,
            "concurrency_groups": GROUPS,
        }
        self._actor: Any = ray.remote(**shares)(Worker)
        self._actors = [self._start() for _ in range(count)]
        self.facts = [self._get(actor.facts.remote()) for actor in self._actors]
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

    def apply(self, function: Callable[..., Any], *args: Any, tick: Callable[[int], None] | None = None) -> Any:
        """`function(base, *args)` in one of the workers; how far it has come isn't told."""
        return self._get(self._actors[0].apply.remote(function, *args))

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
        shared = ray.put(tokens)
        waiting, busy = iter(waves), list[_Busy]()
        width = len(self._actors) if given_up is None else 1
        ask = given_up or (lambda job: "")
        with stage(self.progress, "train"), self.interrupts.waiting_for_a_step():
            try:
                while True:
                    while len(busy) < width and not self.interrupts.asked and (jobs := next(waiting, None)) is not None:
                        busy.append(self._hand_out(jobs, checkpoints(jobs), plan, shared, busy, given_up is not None))
                    if not busy:
                        return
                    self._pass_on_stop(busy)
                    for one in self._ready(busy):
                        again = self._hear(one, report, ask, plan, shared, given_up is not None)
                        if not again:
                            busy.remove(one)
                            one.kept.close()
            finally:
                for one in busy:
                    one.kept.close()

    # — one wave —

    def _hand_out(
        self, jobs: Sequence[LaneJob], kept: Checkpoints, plan: Plan, shared: Any, busy: Sequence[_Busy], asks: bool
    ) -> _Busy:
        worker = min(set(range(len(self._actors))) - {one.worker for one in busy})
        return _Busy(jobs, kept, worker, self._order(worker, jobs, kept, plan, shared, asks))

    def _order(
        self, worker: int, jobs: Sequence[LaneJob], kept: Checkpoints, plan: Plan, shared: Any, asks: bool
    ) -> Any:
        order = Order(jobs, plan, kept.load(), self.recipe.train.checkpoint_every, asks)
        return self._actors[worker].train.options(num_returns="streaming").remote(order, shared)

    def _ready(self, busy: Sequence[_Busy]) -> Iterator[_Busy]:
        ready, _ = ray.wait([one.stream for one in busy], timeout=0.2)
        return (one for one in list(busy) if any(one.stream is stream for stream in ready))

    def _hear(self, one: _Busy, report: Report, ask: GivenUp, plan: Plan, shared: Any, asks: bool) -> bool:
        """Take the next item of a stream; False when the wave is over."""
        try:
            item = ray.get(next(one.stream))
        except StopIteration:
            one.kept.drop() if not one.kept.interrupts.asked else one.kept.wait()
            return False
        except (RayActorError, RayTaskError, RayError) as error:
            return self._again(one, error, report, plan, shared, asks)
        if isinstance(item, Moved):
            self.progress.advance(item.steps, **item.facts)
        elif isinstance(item, Kept):
            one.kept.save(item.packed)
        elif isinstance(item, Asking):
            answer = {key(job): ask(job) for job in one.jobs}
            self._actors[one.worker].answer.options(concurrency_group="control").remote(answer)
        elif not isinstance(item, Stopped):
            report(item)
        return True

    def _again(self, one: _Busy, error: Exception, report: Report, plan: Plan, shared: Any, asks: bool) -> bool:
        """The worker was lost, or the wave raised: hand it out again, or let its lanes fail after so many tries."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, CrosstuneError):
            raise cause
        one.kept.wait()
        what = f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        if isinstance(error, RayActorError):
            what = "its worker was lost"
        ray.kill(self._actors[one.worker])  # also where it only raised: after a CUDA error a process is of no more use
        self._actors[one.worker] = self._start()
        if one.tries > self.recipe.device.retries:
            self.progress.say(f"a wave failed {one.tries} times ({what}); its lanes are given up")
            for job in one.jobs:
                report(LaneRetired(job, f"worker-failed: {what}, {one.tries} times", _step_kept(one.kept)))
            return False
        one.tries += 1
        self.progress.say(f"a wave goes on from its last checkpoint: {what}")
        one.stream = self._order(one.worker, one.jobs, one.kept, plan, shared, asks)
        return True

    def _pass_on_stop(self, busy: Sequence[_Busy]) -> None:
        if self.interrupts.asked:
            for one in busy:
                self._actors[one.worker].stop.options(concurrency_group="control").remote(self.interrupts.asked)

    # — workers —

    def _start(self) -> Any:
        return self._actor.remote(self.recipe.model, self.tokenizer, self.recipe.device, self.threads)

    def _get(self, reference: Any) -> Any:
        """The value, or what the worker raised, as if it had been raised here."""
        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, CrosstuneError) else error from None


def _step_kept(kept: Checkpoints) -> int:
    packed = kept.load()
    return 0 if packed is None else int(packed[1]["step"])


def _connect(address: str) -> bool:
    """Join the cluster at `address`, or start one on this machine; False where this process had joined one before."""
    if ray.is_initialized():
        return False
    if address != "auto":
        _refuse_silent(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING, "include_dashboard": False}
    if address != "auto":
        options.pop("include_dashboard")
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DeviceError(
            f"ray-unreachable: no Ray cluster answers at {address!r}: {error}",
            "Start one there (ray start --head), or set device.ray: auto to use this machine.",
        ) from None
    return True


def _refuse_silent(address: str) -> None:
    """Ray itself waits for minutes where nobody listens."""
    host, _, port = address.rpartition(":")
    problem = ""
    if address.startswith("ray://") or not host or not port.isdigit():
        problem = "it isn't of the form HOST:PORT (port 6379 of the head node)"
    else:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            problem = str(error.strerror or error)
    if problem:
        raise DeviceError(
            f"ray-unreachable: no Ray cluster answers at {address!r}: {problem}",
            "Start one there (ray start --head), or set device.ray: auto to use this machine.",
        )


def _shares(recipe: Recipe) -> tuple[int, float, int]:
    """GPUs a worker, CPUs a worker, number of workers."""
    whole = ray.cluster_resources()
    gpus, cpus = int(whole.get("GPU", 0)), whole.get("CPU", 1)
    wanted = recipe.device.workers
    if recipe.device.kind == "cpu" or (recipe.device.kind == "auto" and not gpus):
        count = 1 if wanted == "auto" else int(wanted)
        return 0, max(0.01, min(1.0, cpus / count)), count
    if not gpus:
        raise DeviceError("device-unavailable: no node of the Ray cluster has a GPU", "Set device.kind to auto or cpu.")
    count = gpus if wanted == "auto" else int(wanted)
    if count > gpus:
        raise DeviceError(f"device.workers is {count}, and the Ray cluster has {gpus} GPUs", "Ask for as many at most.")
    return 1, min(1.0, cpus / count), count
