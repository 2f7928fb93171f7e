"""A trace of births and deaths → bytes allocated and reserved: a model of PyTorch's caching allocator for CUDA.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.8 to 2.13), for one stream:

    sizes are rounded up to 512 bytes; up to 1 MiB comes from the pool of small blocks, the rest from that of large ones
    a free block is taken by best fit, the lowest address among equals
    without one, a segment is reserved: 2 MiB for small, 20 MiB for sizes below 10 MiB, else the size in steps of 2 MiB
    a block is split where more than 1 MiB (small pool: 512 bytes) is left; an unsplit remainder counts as allocated
    freed neighbours inside a segment are joined; a segment is given back only by empty_cache, or when the limit is hit

With expandable segments each pool is one segment that grows at its end in steps of 20 MiB (small: 2 MiB), and every
remainder is split off; empty_cache gives back whole free steps anywhere, which leaves holes that are filled later.
What is allocated while a CUDA graph is captured comes from a pool of the graph's own, whose segments serve nothing
else as long as the graph lives.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from crosstune.memory.gpus import MIB

SMALL = MIB  # up to here the small pool serves
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_FROM, STEP = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB

Kind = Literal["born", "died", "mark", "begin", "empty", "capture", "captured", "dropped"]
# born: (key, bytes) · died: (key, bytes) · mark: (label, 0) · empty: empty_cache · begin: the same, and peaks count
# from here · capture … captured: a graph's pool, by its number · dropped: the graph is gone and its segments may go
Event = tuple[Kind, int | str, int]


class Block:
    """A stretch of a segment, in use or free."""

    __slots__ = ("address", "before", "free", "next", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: Block | None = None
        self.next: Block | None = None
        self.free = True


@dataclass(eq=False)
class Pool:
    """Free blocks of one kind, by size and then address."""

    small: bool
    graph: int = 0
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    holes: list[Block] = field(default_factory=list)  # expandable segments: given back, by address
    end: Block | None = None  # expandable segments: the last block of the pool's only segment

    def put(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block))

    def take(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        block.free = False

    @property
    def step(self) -> int:
        """By how much an expandable segment grows."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def best_fit(self, size: int) -> Block | None:
        place = bisect.bisect_left(self.free, (size, -1))
        return self.free[place][2] if place < len(self.free) else None


class Allocator:
    """Bytes allocated and reserved, now and at most. `failed`: the first request that `limit` refused."""

    def __init__(self, *, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.pools: dict[tuple[int, bool], Pool] = {}
        self.blocks: dict[int | str, Block] = {}
        self.segments: dict[int, int] = {}  # address → size
        self.graph = 0  # the pool that serves now: 0, or that of the graph being captured
        self.allocated = self.peak_allocated = self.reserved = self.peak_reserved = 0
        self.retries = 0
        self.failed: int | None = None
        self._next_address = 0

    def born(self, key: int | str, count: int) -> None:
        """Allocate `count` bytes under `key`."""
        size = max(512, -(-count // 512) * 512)
        small = size <= SMALL
        pool = self.pools.setdefault((self.graph, small), Pool(small, self.graph))
        block = pool.best_fit(size)
        if block is not None:
            pool.take(block)
        else:
            block = self._grow(pool, size) if self.expandable else self._segment(pool, size)
        left = block.size - size
        if left >= 512 if (pool.small or self.expandable) else left > SMALL:
            self._split(block, size)
        self.blocks[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def died(self, key: int | str) -> None:
        """Free what `born(key)` allocated; join it with free neighbours."""
        block = self.blocks.pop(key)
        self.allocated -= block.size
        pool = block.pool
        if block.before is not None and block.before.free:
            pool.take(block.before)
            self._join(block.before, block)
            block = block.before
        if block.next is not None and block.next.free:
            pool.take(block.next)
            self._join(block, block.next)
        pool.put(block)

    def empty(self) -> None:
        """torch.cuda.empty_cache(): give back what no tensor uses."""
        for pool in self.pools.values():
            if pool.graph:
                continue
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.next is None:
                    pool.take(block)
                    self.reserved -= self.segments.pop(block.address)

    def drop(self, graph: int) -> None:
        """A captured graph is gone: its pool's blocks join the others'."""
        for small in (True, False):
            pool = self.pools.pop((graph, small), None)
            if pool is None:
                continue
            home = self.pools.setdefault((0, small), Pool(small))
            seen = {id(block): block for _, _, block in pool.free}
            for block in [*seen.values(), *(b for b in self.blocks.values() if b.pool is pool)]:
                block.pool = home
            for block in seen.values():
                home.put(block)

    def _segment(self, pool: Pool, size: int) -> Block:
        count = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < LARGE_FROM else -(-size // STEP) * STEP
        self._reserve(count)
        block = Block(self._next_address, count, pool)
        block.free = False
        self.segments[block.address] = count
        self._next_address += count
        return block

    def _grow(self, pool: Pool, size: int) -> Block:
        for hole in pool.holes:
            if hole.size >= size:
                return self._fill(hole, size)
        end = pool.end
        have = end.size if end is not None and end.free else 0
        count = -(-(size - have) // pool.step) * pool.step
        self._reserve(count)
        if end is not None and end.free and end is pool.end:  # _reserve may have given it back
            pool.take(end)
            end.size += count
            return end
        end = pool.end
        # Pools lie far apart, and begin at a multiple of every step.
        address = end.address + end.size if end is not None else (len(self.pools) + 1) * (LARGE_SEGMENT << 24)
        block = Block(address, count, pool)
        block.free, block.before = False, end
        if end is not None:
            end.next = block
        pool.end = block
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole steps inside a free block; what is left of it on either side stays free."""
        pool = block.pool
        start = -(-block.address // pool.step) * pool.step
        stop = (block.address + block.size) // pool.step * pool.step
        if stop <= start:
            return
        pool.take(block)
        if start > block.address:
            self._split(block, start - block.address)
            pool.put(block)
            block = block.next  # type: ignore[assignment]
            pool.take(block)
        if stop < block.address + block.size:
            self._split(block, stop - block.address)
        self.reserved -= block.size
        if block.next is None:
            pool.end = block.before
            if block.before is not None:
                block.before.next = None
            return
        pool.holes.append(block)
        pool.holes.sort(key=lambda hole: hole.address)

    def _fill(self, hole: Block, size: int) -> Block:
        """Reserve as much of a hole as is wanted."""
        pool = hole.pool
        count = -(-size // pool.step) * pool.step
        pool.holes.remove(hole)
        self._reserve(count)
        if count < hole.size:
            self._split(hole, count)
            rest = hole.next
            assert rest is not None
            pool.take(rest)
            bisect.insort(pool.holes, rest, key=lambda block: block.address)
        return hole

    def _reserve(self, count: int) -> None:
        if self.limit is not None and self.reserved + count > self.limit:
            self.retries += 1
            self.empty()
            if self.reserved + count > self.limit and self.failed is None:
                self.failed = count
        self.reserved += count
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool)
        rest.before, rest.next, block.size = block, block.next, size
        if block.next is not None:
            block.next.before = rest
        elif block.pool.end is block:
            block.pool.end = rest
        block.next = rest
        block.pool.put(rest)

    def _join(self, first: Block, second: Block) -> None:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.before = first
        elif first.pool.end is second:
            first.pool.end = first


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
    """Run the trace through an Allocator. `first`: sizes that are allocated before it and stay (cuBLAS workspaces).

    Peaks count from the last "begin" event, as after torch.cuda.reset_peak_memory_stats, and so does `limit`: what
    comes before is the making of the base, which on meta tensors isn't that of a loaded one.
    """
    trace = list(trace)
    allocator = Allocator(expandable=expandable, limit=limit if all(event[0] != "begin" for event in trace) else None)
    for place, size in enumerate(first):
        allocator.born(f"first {place}", size)
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
            allocator.peak_allocated, allocator.peak_reserved = allocator.allocated, allocator.reserved
            allocator.limit = limit
            by_mark, since = {}, allocator.allocated
        elif kind == "capture":
            allocator.graph = int(key)
            for place, size in enumerate(first):  # a stream of its own, to which cuBLAS gives workspaces of its own
                if (name := f"first {place} of {key}") not in allocator.blocks:
                    allocator.born(name, size)
        elif kind == "captured":
            allocator.graph = 0
        else:
            allocator.drop(int(key))
    at = max(by_mark, key=lambda label: by_mark[label], default="")
    return Replay(
        allocator.allocated, allocator.reserved, allocator.peak_allocated, allocator.peak_reserved, by_mark, at,
        allocator.failed is None,
    )  # fmt: skip
