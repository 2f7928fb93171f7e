"""The far side: one process with one base, which trains waves and tells what happens as a stream.

It never sees the run folder: events, checkpoints and progress all go to whoever holds the run. Knows nothing of Ray.
Torch is imported inside, after the GPUs of this process have been chosen for it.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.store.files import write_file

if TYPE_CHECKING:
    from crosstune.data.tokens import Tokens
    from crosstune.memory.plan import Plan
    from crosstune.recipe.sections import Device, Model
    from crosstune.store.state import Lane
    from crosstune.train.lane import LaneJob

TOLD_EVERY_SECONDS = 0.5  # progress of a worker; a step may last a millisecond


@dataclass(frozen=True)
class Moved:
    """Steps taken since the last one, and the newest facts for the progress display."""

    steps: int
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Kept:
    """The wave as it stands: tensors and header of a checkpoint."""

    packed: Any


@dataclass(frozen=True)
class Asking:
    """All events so far must be heard before the worker goes on: which lanes' trials are given up?"""


@dataclass(frozen=True)
class Stopped:
    """The wave was told to end; its checkpoint came before this."""

    number: int


@dataclass(frozen=True)
class Order:
    """A wave to train: all that it depends on but the tokens, which every worker shares."""

    jobs: Sequence[LaneJob]
    plan: Plan
    packed: Any  # its last checkpoint, or None
    checkpoint_every: int | str
    asks: bool  # whether lanes may be given up while under way


@dataclass
class Worker:
    """One base and the waves it trains. `threads`: of the CPU, the same for all, for sums depend on it to the bit."""

    model: Model
    tokenizer: Any
    device: Device
    threads: int
    started: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "torch_was_imported": "torch" in sys.modules,
        }
        self._base: Any = None
        self._stop: Any = None
        self._answers: queue.Queue[Mapping[Lane, str]] = queue.Queue()

    def facts(self) -> dict[str, Any]:
        """Who this is: process, host, GPUs, and whether torch was there before they were chosen."""
        return self.started

    def sees(self, path: str) -> bool:
        """Whether `path` exists where this worker runs."""
        return Path(path).exists()

    def holds(self, key: str, sizes: Mapping[str, int]) -> bool:
        """Whether the model that goes by `key` was sent to this machine, whole."""
        files = [(_sent(key) / name, size) for name, size in sizes.items()]
        return all(file.is_file() and file.stat().st_size == size for file, size in files)

    def receive(self, key: str, name: str, content: Any) -> None:
        """Keep one file of a model."""
        write_file(_sent(key) / name, content.tobytes())

    def use(self, key: str, name: str) -> None:
        """Load the base from the files that were sent."""
        self.model = self.model.model_copy(update={"name": str(_sent(key) / name)})

    def place(self) -> tuple[Any, int]:
        """The device here, with all that is decided about it, and the bytes that are free on it."""
        from crosstune.errors import DeviceError
        from crosstune.model.device import choose_device, free_bytes

        place = choose_device(self.device)
        if self.started["cuda_visible_devices"] and place.device.type == "cpu" and self.device.kind == "auto":
            raise DeviceError(
                f"device-unavailable: a worker on {self.started['host']} was given GPU "
                f"{self.started['cuda_visible_devices']}, and torch sees none there",
                "Install a torch with CUDA on that machine, or set device.kind: cpu.",
            )
        return place, free_bytes(place.device)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(base, *args)`, here."""
        return function(self._load(), *args)

    def stop(self, number: int) -> None:
        """End the wave under way after its step, keeping it, as for signal `number`."""
        if self._stop is not None:
            self._stop.asked = number

    def answer(self, given_up: Mapping[Lane, str]) -> None:
        """The answer to `Asking`: lane → why its trial is given up."""
        self._answers.put(given_up)

    def train(self, order: Order, tokens: Tokens) -> Iterator[Any]:
        """Train one wave: yields its events, `Moved`, `Kept`, `Asking`, and `Stopped` if it was told to stop."""
        from crosstune.interrupt import Interrupts

        out: queue.Queue[Any] = queue.Queue()
        self._stop = Interrupts()
        thread = threading.Thread(target=self._train, args=(order, tokens, out), daemon=True)
        thread.start()
        try:
            while not isinstance(item := out.get(), _Ended):
                yield item
        finally:  # also where nobody listens any more: the base must not be trained on by two
            self._stop.asked = self._stop.asked or signal.SIGTERM
            self._answers.put({})
            thread.join()
            self._answers = queue.Queue()
        if item.error is not None:
            raise item.error

    def _train(self, order: Order, tokens: Tokens, out: queue.Queue[Any]) -> None:
        import torch

        from crosstune.interrupt import Interrupted
        from crosstune.train.checkpoint import Checkpoints
        from crosstune.train.events import LaneFinished, LaneTrained
        from crosstune.train.run_wave import run_wave

        class Relayed(Checkpoints):
            """Checkpoints that are kept elsewhere."""

            def load(self) -> Any:
                return order.packed

            def save(self, packed: Any) -> None:
                self.note_saved(int(packed[1]["step"]))
                out.put(Kept(packed))

        def tell(event: Any) -> None:
            if not isinstance(event, LaneTrained | LaneFinished):  # `LanesOver` brings adapters: each travels once
                out.put(event)

        torch.set_num_threads(self.threads)
        kept = Relayed(Path(), order.checkpoint_every, self._stop, lambda text: None)
        progress = _Relay(out)
        try:
            run_wave(
                self._load(), order.jobs, tokens, order.plan,
                report=tell, progress=progress, checkpoints=kept,
                **({"given_up": self._asker(order, out)} if order.asks else {}),
            )  # fmt: skip
            progress.flush()
            out.put(_Ended(None))
        except Interrupted as end:
            out.put(Stopped(end.number))
            out.put(_Ended(None))
        except BaseException as error:  # raised again in `train`, in the thread that is listened to
            out.put(_Ended(error))
        finally:
            kept.close()

    def _asker(self, order: Order, out: queue.Queue[Any]) -> Callable[[LaneJob], str]:
        """Ask once an evaluation, for all lanes of the wave: `run_wave` asks for each lane in turn."""
        verdict: dict[Lane, str] = {}

        def given_up(job: LaneJob) -> str:
            lane = (job.trial, job.fold)
            if lane not in verdict:
                out.put(Asking())
                verdict.update({(other.trial, other.fold): "" for other in order.jobs})
                verdict.update(self._answers.get())
            return verdict.pop(lane)

        return given_up

    def _load(self) -> Any:
        if self._base is None:
            import torch

            from crosstune.model.base import load_base

            torch.set_num_threads(self.threads)
            place, _ = self.place()
            self._base = load_base(self.model, self.tokenizer, device=place.device, precision=place.precision.value)
        return self._base


def _sent(key: str) -> Path:
    cache = os.environ.get("CROSSTUNE_CACHE") or "~/.cache/crosstune"
    return Path(cache).expanduser() / "models" / key


@dataclass(frozen=True)
class _Ended:
    error: BaseException | None


class _Relay:
    """Progress that is shown elsewhere: passed on now and then."""

    def __init__(self, out: queue.Queue[Any]) -> None:
        self._out, self._steps, self._tokens, self._last = out, 0, 0, time.monotonic()
        self._facts: Mapping[str, Any] = {}
        self._depth = 0

    def start(self, stage: str, total: int | None = None) -> None:
        self._depth += 1

    def advance(self, n: int = 1, **facts: Any) -> None:
        if self._depth > 1:  # rows of an evaluation inside training: only steps are counted far away
            return
        self._steps += n
        self._tokens += int(facts.pop("tokens", 0))
        self._facts = {**self._facts, **facts}
        if time.monotonic() - self._last >= TOLD_EVERY_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._steps:
            self._out.put(Moved(self._steps, {**self._facts, "tokens": self._tokens}))
            self._steps, self._tokens, self._last = 0, 0, time.monotonic()

    def say(self, text: str) -> None:
        pass

    def stop(self) -> None:
        self._depth -= 1
