"""A wave for which memory doesn't do even with the smallest plan goes on in parts: half of its lanes, then the others.

Each part begins at the wave's exact state, taken lane by lane from what a checkpoint holds, and may be split again.
While a part runs, a checkpoint holds its state beside that of the other parts, so a run that is killed loses nothing.
Adapters keep the layout of the whole wave: a lane's row in a flat tensor is the same numbers in a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from crosstune.data.tokens import Tokens
from crosstune.memory.plan import Plan
from crosstune.model.attach import LaneSpec
from crosstune.model.base import Base
from crosstune.progress import Progress
from crosstune.train.checkpoint import Checkpoints, Packed
from crosstune.train.events import GivenUp, Report
from crosstune.train.lane import LaneJob
from crosstune.train.recover import WaveSplit


@dataclass(frozen=True)
class Shared:
    """What all parts of a wave are run with. `among`: all its lanes."""

    base: Base
    tokens: Tokens
    report: Report
    progress: Progress
    given_up: GivenUp
    among: tuple[LaneSpec, ...]


class Split(BaseException):
    """Memory doesn't do for all lanes, whatever the plan."""

    def __init__(self, packed: Packed, plan: Plan) -> None:
        super().__init__()
        self.packed, self.plan = packed, plan


def go_on_in_halves(
    packed: Packed, jobs: Sequence[LaneJob], plan: Plan, *, doing: str, message: str, report: Report
) -> NoReturn:
    """Tell of it, and leave the wave with its state before what ran out of memory: nothing has changed since."""
    named = {job.name: job for job in jobs}
    parts = tuple(tuple(named[name] for name in lane_names(part)) for part in halves(packed))
    report(WaveSplit(tuple(jobs), packed[1]["step"], doing, message, parts))
    raise Split(packed, plan)


def unbegun(names: Sequence[str]) -> Packed:
    """A packed wave of lanes that are still to be set up."""
    return {}, {"step": 0, "trained": 0, "due": [], "lanes": [{"name": name} for name in names], "begun": False}


def halves(packed: Packed) -> list[Packed]:
    """A packed wave (train/state.py) of two lanes or more as two. Tokens trained so far are counted in the first."""
    lanes = len(packed[1]["lanes"])
    first = -(-lanes // 2)
    one, other = _take(packed, range(first)), _take(packed, range(first, lanes))
    return [one, (other[0], {**other[1], "trained": 0})]


def join(parts: Sequence[Packed]) -> Packed:
    """Parts as one packed wave. Its step only ever grows, so that the newest checkpoint is the last by its name."""
    tensors = {f"part.{at}.{name}": tensor for at, part in enumerate(parts) for name, tensor in part[0].items()}
    metas = [dict(part[1]) for part in parts]
    return tensors, {"step": sum(meta["step"] for meta in metas), "parts": metas}


def parts_of(packed: Packed | None) -> list[Packed] | None:
    """The parts of a joined wave; None for one that was never split."""
    if packed is None or "parts" not in packed[1]:
        return None
    parts: list[Packed] = []
    for at, meta in enumerate(packed[1]["parts"]):
        begin = f"part.{at}."
        parts.append(({n.removeprefix(begin): t for n, t in packed[0].items() if n.startswith(begin)}, meta))
    return parts


def lane_names(packed: Packed) -> list[str]:
    """The lanes of a packed wave, or of all its parts."""
    meta = packed[1]
    if "parts" in meta:
        return [name for part in parts_of(packed) or [] for name in lane_names(part)]
    return [lane["name"] for lane in meta["lanes"]]


class PartCheckpoints(Checkpoints):
    """Checkpoints of one part: what is kept is the whole."""

    def __init__(self, whole: Checkpoints, parts: list[Packed], at: int) -> None:
        self.whole, self.parts, self.at = whole, parts, at
        self.folder, self.interrupts = whole.folder, whole.interrupts

    def load(self) -> Any:
        """The part's own state, in which it was left; None if it wasn't begun."""
        part = self.parts[self.at]
        return part if part[1].get("begun", True) else None

    def is_due(self, step: int, epoch_ended: bool) -> bool:
        """By the steps of all parts."""
        others = sum(part[1]["step"] for at, part in enumerate(self.parts) if at != self.at)
        return self.whole.is_due(step + others, epoch_ended)

    def save(self, packed: Packed) -> None:
        """Keep the part beside the others."""
        self.parts[self.at] = packed
        self.whole.save(join(self.parts))

    def wait(self) -> None:
        """Until the last one is written."""
        self.whole.wait()


def _take(packed: Packed, lanes: Sequence[int]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    tensors, meta = packed
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith("best."):
            found[name] = tensor[list(lanes)].clone()
            continue
        _, lane, *rest = name.split(".")
        if int(lane) in lanes:
            found[".".join(["best", str(lanes.index(int(lane))), *rest])] = tensor
    due = [lanes.index(lane) for lane in meta["due"] if lane in lanes]
    return found, {**meta, "lanes": [meta["lanes"][lane] for lane in lanes], "due": due}
