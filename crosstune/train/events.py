"""What happens to the lanes of a wave, as it is told to whoever keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from crosstune.train.lane import LaneJob, RowScores, Status
from crosstune.train.recover import PlanChanged, WaveSplit


@dataclass(frozen=True)
class LaneEvaluated:
    """A lane was scored on its held-out rows, under way or at the end."""

    job: LaneJob
    step: int
    epoch: float
    scores: RowScores


@dataclass(frozen=True)
class StepKept:
    """The adapter of this step is the best so far and may be the one that is kept (train.keep: best)."""

    job: LaneJob
    step: int
    adapter: Mapping[str, Tensor]


@dataclass(frozen=True)
class LaneTrained:
    """A lane took its last step; `adapter()` is what `LaneFinished` will hold once the lane is scored.

    Told so that fetching and writing it needn't wait for the scores: another thread may do both. Whoever isn't helped
    by that may pass it over.
    """

    job: LaneJob
    adapter: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class LaneFinished:
    """A lane is over: its adapter under PEFT's names, its final scores, its training losses step by step."""

    job: LaneJob
    status: Status
    reason: str
    steps: int
    kept_step: int
    scores: RowScores
    adapter: Mapping[str, Tensor]
    losses: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class LanesOver:
    """These lanes are over, and each is told by itself next.

    Told so that they can be saved side by side: whoever saves them begins all, then waits for each as it is told.
    Whoever isn't helped by that may pass it over.
    """

    lanes: tuple[LaneFinished, ...]


@dataclass(frozen=True)
class LaneRetired:
    """A lane failed. Nothing of it is kept."""

    job: LaneJob
    reason: str
    step: int


@dataclass(frozen=True)
class LaneGivenUp:
    """A lane's trial was given up by the sweep while the lane was under way. Nothing of it is kept."""

    job: LaneJob
    reason: str
    step: int


@dataclass(frozen=True)
class WaveFinished:
    """All lanes of the wave are over. Bytes of the device: alive before and after, and the peak between."""

    jobs: tuple[LaneJob, ...]
    steps: int
    tokens: int
    seconds: float
    live_bytes_before: int
    live_bytes_after: int
    peak_bytes: int


LaneEvent = LaneEvaluated | StepKept | LaneTrained | LaneFinished | LaneRetired | LaneGivenUp
Event = LaneEvent | LanesOver | PlanChanged | WaveSplit | WaveFinished
Report = Callable[[Event], None]
GivenUp = Callable[[LaneJob], str]  # why the lane's trial is given up; empty if it isn't
