"""The state of a run and of each of its lanes: a replay of the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crosstune.store.journal import Event

Lane = tuple[int, int | None]  # trial, fold; fold None is all rows

# Events that change the state are on the disk before the run goes on; the others may be lost in a crash.
DURABLE = frozenset(
    {
        "created",
        "plan",
        "lane_finished",
        "lane_failed",
        "lane_given_up",
        "lane_again",
        "run_finished",
        "interrupted",
        "closed",
    }
)


@dataclass
class State:
    """What the journal says: filled by `see`, one event after another."""

    finished: dict[Lane, Event] = field(default_factory=dict)
    failed: dict[Lane, Event] = field(default_factory=dict)
    given_up: dict[Lane, Event] = field(default_factory=dict)
    again: set[Lane] = field(default_factory=set)
    is_finished: bool = False

    def see(self, event: Event) -> None:
        """Take one event into account."""
        kind = event["event"]
        over = {"lane_finished": self.finished, "lane_failed": self.failed, "lane_given_up": self.given_up}
        if kind in over or kind == "lane_again":
            lane = (event["trial"], event["fold"])
            for lanes in over.values():
                lanes.pop(lane, None)
            if kind == "lane_again":
                self.again.add(lane)
            else:
                over[kind][lane] = event
            self.is_finished &= lane[1] is None  # a fit on all rows is no part of what was cross-validated
        elif kind == "run_finished":
            self.is_finished = True


def replay(events: Iterable[Event]) -> State:
    """The state after these events."""
    state = State()
    for event in events:
        state.see(event)
    return state


def earlier_seconds(events: Iterable[Event]) -> float:
    """How long the sittings before this one lasted: as each said at its end or, if it was killed, by the clock."""
    sittings: list[list[Event]] = []
    for event in events:
        if event["event"] == "opened":
            sittings.append([])
        if sittings:
            sittings[-1].append(event)
    return sum(map(_seconds, sittings[:-1]))


def _seconds(sitting: list[Event]) -> float:
    first, last = sitting[0], sitting[-1]
    if last["event"] == "closed":
        return float(last["seconds"])
    return max(0.0, float(last["at"] - first["at"]))  # a clock that was put back takes no hours away


def in_order(lanes: Mapping[Lane, Event]) -> dict[Lane, Event]:
    """By trial and fold, whoever came first: sums over lanes must not depend on it."""
    return dict(sorted(lanes.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or 0)))
