"""What a person sees while it runs: a bar on a terminal, one line in a notebook, a line now and then in a log.

Whoever does the work calls `start`, `advance`, `say`, `stop` and knows nothing of where it is shown; stages nest
(evaluation inside training). It all goes to stderr, so that stdout stays for results.

    with stage(progress, "train", total=400):
        progress.advance(losses=[1.42, 1.39], tokens=1024, held_bytes=20615843020)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

from crosstune.store.secrets import redact
from crosstune.units import bytes_words, count_words, seconds_words

LINE_EVERY_SECONDS = 10.0  # a log of an hour then has some 360 lines
SHOWN_LANES = 8  # more losses than this become mean and range
UNITS = {"train": "step", "lint": "row", "load": "shard", "tokenise": "row", "evaluate": "row", "answer": "row"}


class Progress(Protocol):
    """Where progress is told. Facts known to every display, all optional:

    losses       one training loss a lane (None or nan: the lane is out)
    tokens       tokens worked on since the last call; shown as tokens a second
    held_bytes   memory held now
    note         a few words, shown as they are
    """

    def start(self, stage: str, total: int | None = None) -> None: ...
    def advance(self, n: int = 1, **facts: Any) -> None: ...
    def say(self, text: str) -> None: ...
    def stop(self) -> None: ...


@contextmanager
def stage(progress: Progress, name: str, total: int | None = None) -> Iterator[None]:
    """A stage that ends when the block does, whatever happens inside."""
    progress.start(name, total)
    try:
        yield
    finally:
        progress.stop()


@dataclass
class Stage:
    """One stage under way: how far, since when, and the newest facts."""

    name: str
    total: int | None
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, n: int, facts: Mapping[str, Any]) -> None:
        self.done += n
        self.tokens += int(facts.get("tokens", 0))
        self.facts.update(facts)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def words(self) -> str:
        """`step 120/400 · 5 lanes · loss 1.42 1.39 1.44 1.40 1.41 · 8.1k tok/s · 19.2 GiB`."""
        unit = UNITS.get(self.name.split(" ")[0], "")
        parts = [f"{unit} {self.done}".lstrip() + (f"/{self.total}" if self.total else "")]
        losses = self.facts.get("losses")
        if losses is not None and len(losses):
            parts += [f"{len(losses)} lane" + ("s" if len(losses) > 1 else ""), loss_words(losses)]
        if self.tokens and self.seconds > 0:
            parts.append(f"{count_words(self.tokens / self.seconds)} tok/s")
        if self.facts.get("held_bytes"):
            parts.append(bytes_words(self.facts["held_bytes"]))
        if self.facts.get("note"):
            parts.append(str(self.facts["note"]))
        return " · ".join(parts)

    def line(self) -> str:
        """The words, after the stage's name where they don't tell which it is."""
        return self.words() if self.name == "train" else f"{self.name}: {self.words()}"


def loss_words(losses: Sequence[float | None]) -> str:
    """`loss 1.42 1.39 –`: a lane that is out shows a dash; many lanes show their mean and range."""
    known = [float(loss) for loss in losses if loss is not None and loss == loss]
    if len(losses) > SHOWN_LANES and known:
        return f"loss {sum(known) / len(known):.2f} ({min(known):.2f}–{max(known):.2f})"
    return "loss " + " ".join("–" if loss is None or loss != loss else f"{loss:.2f}" for loss in losses)


class Quiet:
    """Tells nobody."""

    def start(self, stage: str, total: int | None = None) -> None:
        pass

    def advance(self, n: int = 1, **facts: Any) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def stop(self) -> None:
        pass


class Lines:
    """A plain line now and then, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None, *, every_seconds: float = LINE_EVERY_SECONDS) -> None:
        self.stream, self.every_seconds = stream or sys.stderr, every_seconds
        self.stages: list[Stage] = []
        self._last_line = float("-inf")

    def start(self, stage: str, total: int | None = None) -> None:
        self.stages.append(Stage(stage, total))

    def advance(self, n: int = 1, **facts: Any) -> None:
        current = self.stages[-1]
        current.add(n, facts)
        if self._is_time():
            self._write(current.line())

    def say(self, text: str) -> None:
        print(redact(text), file=self.stream, flush=True)

    def stop(self) -> None:
        ended = self.stages.pop()
        if ended.done and (not self.stages or self._is_time()):  # each epoch's evaluation would be a line otherwise
            self._write(f"{ended.line()} · {seconds_words(ended.seconds)}")

    def _is_time(self) -> bool:
        return time.monotonic() - self._last_line >= self.every_seconds

    def _write(self, line: str) -> None:
        print(line, file=self.stream, flush=True)
        self._last_line = time.monotonic()


class NotebookLine(Lines):
    """One output line, rewritten in place. rich's own notebook display needs ipywidgets, which many kernels lack."""

    def __init__(self) -> None:
        super().__init__(every_seconds=0.5)
        self._line: Any = None

    def _write(self, line: str) -> None:
        from IPython.display import display

        content = {"text/plain": line}
        if self._line is None:
            self._line = display(content, raw=True, display_id=True)
        else:
            self._line.update(content, raw=True)
        self._last_line = time.monotonic()

    def say(self, text: str) -> None:
        print(redact(text), flush=True)
        self._line = None  # the next progress line goes below what was said


class Bars:
    """A bar for each stage under way, by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self.stages: list[tuple[Stage, Any]] = []
        words = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # the only one that gives way on a narrow terminal
        self._rich = RichProgress(
            TextColumn("{task.fields[stage]}", table_column=Column(no_wrap=True, max_width=24)),
            BarColumn(bar_width=10, table_column=Column(min_width=10)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
            TextColumn("{task.description}", markup=False, table_column=words),
            console=Console(stderr=True),
            transient=True,
            expand=True,
        )

    def start(self, stage: str, total: int | None = None) -> None:
        if not self.stages:
            self._rich.start()
        self.stages.append((Stage(stage, total), self._rich.add_task("", total=total, stage=stage)))

    def advance(self, n: int = 1, **facts: Any) -> None:
        current, bar = self.stages[-1]
        current.add(n, facts)
        self._rich.update(bar, advance=n, description=current.words())

    def say(self, text: str) -> None:
        self._rich.console.print(redact(text), markup=False, highlight=False)

    def stop(self) -> None:
        ended, bar = self.stages.pop()
        self._rich.remove_task(bar)
        if not self.stages:
            if ended.done:
                self.say(f"{ended.line()} · {seconds_words(ended.seconds)}")
            self._rich.stop()


def choose_progress() -> Progress:
    """The display that suits where we run: notebook, terminal, or anything else."""
    if in_notebook():
        return NotebookLine()
    return Bars() if sys.stderr.isatty() else Lines()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is asked only where it already runs."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return type(get_ipython()).__name__ in ("ZMQInteractiveShell", "Shell")  # Jupyter's; Colab's is called Shell
