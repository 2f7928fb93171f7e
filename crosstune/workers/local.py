"""One wave after another, on this device and in this process. The base is loaded once, before the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from crosstune.data.tokens import Tokens
from crosstune.memory.plan import Plan
from crosstune.model.base import Base
from crosstune.progress import Progress
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.lane import LaneJob
from crosstune.train.wave import GivenUp, Report, run_wave


def run_waves(
    base: Base,
    waves: Iterable[Sequence[LaneJob]],
    tokens: Tokens,
    plan: Plan,
    *,
    report: Report,
    progress: Progress,
    checkpoints: Callable[[Sequence[LaneJob]], Checkpoints],
    given_up: GivenUp = lambda job: "",
) -> None:
    """Train the waves in order. A wave's checkpoints go when all that it reported is recorded."""
    for jobs in waves:
        kept = checkpoints(jobs)
        try:
            run_wave(
                base, jobs, tokens, plan, report=report, progress=progress, checkpoints=kept, given_up=given_up
            )
            kept.drop()
        finally:
            kept.close()
