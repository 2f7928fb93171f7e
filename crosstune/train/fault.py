"""Whose is an exception? A lane's own ends the lane, a wave's its lanes; what no other lane would escape ends the run.

The one place that catches whatever is raised. What it lets pass: what the user can put right (`CrosstuneError`, the
disk), memory with nothing left to make smaller, a CUDA context that is dead, our own assertions, an interrupt.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from crosstune.errors import CrosstuneError, first_line
from crosstune.train.recover import is_out_of_memory

Result = TypeVar("Result")


class WaveFault(Exception):
    """A wave raised, and nothing says which of its lanes is to blame. `step`: optimizer steps it had taken."""

    def __init__(self, reason: str, step: int) -> None:  # positional: Ray pickles it
        super().__init__(reason, step)
        self.reason, self.step = reason, step

    def __str__(self) -> str:
        return self.reason


def ends_the_run(error: BaseException) -> bool:
    """Whether an exception is nobody's own: going on with other lanes would be of no use, or would hide it."""
    if isinstance(error, CrosstuneError | OSError | AssertionError) or not isinstance(error, Exception):
        return True
    said = str(error)
    # Libraries in Rust raise what the disk said as an exception of their own: "… (os error 28)".
    return is_out_of_memory(error) or "(os error" in said or (isinstance(error, RuntimeError) and "CUDA error" in said)


def reason_of(error: BaseException) -> str:
    """Why a lane failed, in one line: what was raised, and where."""
    if isinstance(error, WaveFault):
        return error.reason
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    said = str(error).strip()
    return f"{type(error).__name__}" + (f": {first_line(error)}" if said else "") + where


@contextmanager
def blamed(tell: Callable[[str], None]) -> Iterator[None]:
    """What one lane does. If it raises, `tell` hears why; what ends the run is raised."""
    try:
        yield
    except Exception as error:
        if ends_the_run(error):
            raise
        reason = reason_of(error)
    else:
        return
    tell(reason)  # outside of the handler: what it raises itself has nothing to do with the lane's


def blame_each(
    together: Callable[[], Result],
    alone: Callable[[int], object],
    lanes: Iterable[int],
    tell: Callable[[int, str], None],
) -> Result:
    """What lanes do together and could do again. If it raises, each does it alone, to learn whose fault it is.

    `tell` hears of every lane that raises alone too; it is then done together once more, and must leave those out.
    """
    try:
        return together()
    except Exception as error:
        if ends_the_run(error):
            raise
        told: list[int] = []
        for k in lanes:

            def at_fault(reason: str, k: int = k) -> None:
                told.append(k)
                tell(k, reason)

            with blamed(at_fault):
                alone(k)
        if not told:
            raise
    return together()


@contextmanager
def blamed_on_wave(step: int) -> Iterator[None]:
    """What a wave computes for all its lanes at once, after `step` steps."""
    try:
        yield
    except Exception as error:
        if ends_the_run(error) or isinstance(error, WaveFault):
            raise
        raise WaveFault(reason_of(error), step) from error
