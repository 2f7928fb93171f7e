"""A trace of births and deaths → what CUDA's caching allocator would show: now, at most, and in which phase.

How the allocator answers is `allocator.py`'s; what was traced isn't known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from crosstune.memory.allocator import Allocator

Kind = Literal["born", "died", "mark", "begin", "empty", "capture", "captured"]
# born: (key, bytes) · died: (key, bytes) · mark: (label, 0) · empty: empty_cache · begin: the same, and peaks count
# from here · capture … captured: a graph's pool, by its number
Event = tuple[Kind, int | str, int]


@dataclass(frozen=True, slots=True)
class Replay:
    """What the allocator would show after the trace."""

    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int
    by_mark: dict[str, int]  # most allocated in the phase that a mark ends
    at: str  # the phase of the peak
    fits: bool


def replay(
    trace: Iterable[Event], *, expandable: bool = False, limit: int | None = None, first: Sequence[int] = ()
) -> Replay:
    """Run the trace through an Allocator.

    Peaks count from the last "begin" event, as after torch.cuda.reset_peak_memory_stats, and so does `limit`: what
    comes before is the making of the base, which on meta tensors isn't that of a loaded one.

    first   sizes that are allocated then and stay: cuBLAS's workspaces of both threads
    """
    trace = list(trace)
    begins = any(kind == "begin" for kind, _, _ in trace)
    allocator = Allocator(expandable=expandable, limit=None if begins else limit)

    def make_workspaces(of: str = "") -> None:
        for place, size in enumerate(first):
            if (name := f"first {place}{of}") not in allocator.blocks:
                allocator.born(name, size)

    if not begins:
        make_workspaces()
    by_mark: dict[str, int] = {}
    since = 0
    for kind, key, count in trace:
        if kind == "born":
            allocator.born(key, count)
            since = max(since, allocator.allocated)
        elif kind == "died":
            allocator.died(key)
        elif kind == "mark":
            by_mark[str(key)] = max(by_mark.get(str(key), 0), since)
            since = allocator.allocated
        elif kind == "empty":
            allocator.empty()
        elif kind == "begin":
            allocator.empty()
            make_workspaces()
            allocator.peak_allocated, allocator.peak_reserved = allocator.allocated, allocator.reserved
            allocator.limit = limit
            by_mark, since = {}, allocator.allocated
        elif kind == "capture":
            allocator.graph = int(key)
            make_workspaces(f" of {key}")  # a stream of its own, to which cuBLAS gives workspaces of its own
        else:
            allocator.graph = 0
    at = max(by_mark, key=lambda label: by_mark[label], default="")
    return Replay(
        allocator.allocated, allocator.reserved, allocator.peak_allocated, allocator.peak_reserved, by_mark, at,
        allocator.failed is None,
    )  # fmt: skip
