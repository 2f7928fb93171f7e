"""Births and deaths → bytes allocated and reserved: a model of PyTorch's caching allocator for CUDA.

The rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.8 to 2.13), for one stream:

    sizes are rounded up to 512 bytes; up to 1 MiB comes from the pool of small blocks, the rest from that of large ones
    a free block is taken by best fit, the lowest address among equals
    without one, a segment is reserved: 2 MiB for small, 20 MiB for sizes below 10 MiB, else the size in steps of 2 MiB
    a block is split where more than 1 MiB (small pool: 512 bytes) is left; an unsplit remainder counts as allocated
    freed neighbours inside a segment are joined; a segment is given back only by empty_cache, or when the limit is hit

With expandable segments each pool is one segment of addresses without end, mapped in steps of 20 MiB (small: 2 MiB):

    a free block with unmapped addresses behind it counts as large as it can become, so best fit spares the last one
    without a fit, the lowest run of free and unmapped blocks that is long enough is mapped as far as is wanted
    every remainder is split off; empty_cache unmaps whole free steps anywhere

What is allocated while a CUDA graph is captured comes from a pool of the graph's own, whose segments serve nothing
else as long as the graph lives: here, to the end.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from crosstune.memory.gpus import MIB

SMALL = MIB  # up to here the small pool serves
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_FROM, STEP = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
ENDLESS = LARGE_SEGMENT << 24  # addresses of an expandable segment: a multiple of every step


class Block:
    """A stretch of a segment: in use, free, or addresses without memory (free and not mapped)."""

    __slots__ = ("address", "before", "free", "mapped", "next", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.mapped = mapped

    @property
    def reach(self) -> int:
        """Bytes that the block can become by mapping what is behind it."""
        behind = self.next
        return self.size + (behind.size if behind is not None and not behind.mapped else 0)


@dataclass(eq=False)
class Pool:
    """Free blocks of one kind, by size and then address; unmapped ones by address."""

    small: bool
    graph: int = 0
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[Block] = field(default_factory=list)

    def put(self, block: Block) -> None:
        block.free = True
        if block.mapped:
            bisect.insort(self.free, (block.size, block.address, block))
        else:
            bisect.insort(self.unmapped, block, key=_address)

    def take(self, block: Block) -> None:
        block.free = False
        if block.mapped:
            del self.free[bisect.bisect_left(self.free, (block.size, block.address))]
        else:
            self.unmapped.remove(block)

    @property
    def step(self) -> int:
        """In what pieces an expandable segment is mapped."""
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def best_fit(self, size: int) -> Block | None:
        place = bisect.bisect_left(self.free, (size, -1))
        if place == len(self.free):
            return None
        while place + 1 < len(self.free) and self.free[place + 1][2].reach < self.free[place][2].reach:
            place += 1
        return self.free[place][2]

    def lowest_run(self, size: int) -> Block:
        """The first block of the lowest run of free and unmapped ones, an unmapped one among its first two."""
        for block in self.unmapped:
            first = block.before if block.before is not None and block.before.free else block
            found = 0
            behind: Block | None = first
            while behind is not None and behind.free and found < size:
                found, behind = found + behind.size, behind.next
            if found >= size:
                return first
        raise AssertionError("a segment has no end")


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
        pool = self._pool(size <= SMALL)
        block = pool.best_fit(size) or self._reserved(pool, size)
        pool.take(block)
        left = block.size - size
        if left >= 512 if (pool.small or self.expandable) else left > SMALL:
            pool.put(self._cut(block, size))
        self.blocks[key] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def died(self, key: int | str) -> None:
        """Free what `born(key)` allocated; join it with free neighbours."""
        block = self.blocks.pop(key)
        self.allocated -= block.size
        self._put_joined(block)

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

    def _pool(self, small: bool) -> Pool:
        key = (self.graph, small)
        if key not in self.pools:
            pool = self.pools[key] = Pool(small, self.graph)
            if self.expandable:
                pool.put(Block(self._next_address, ENDLESS, pool, mapped=False))
                self._next_address += ENDLESS
        return self.pools[key]

    def _reserved(self, pool: Pool, size: int) -> Block:
        """A free block of memory that wasn't reserved; where the limit refuses it, what is cached goes first."""
        reserve = self._map_run if self.expandable else self._segment
        block = reserve(pool, size)
        if block is None:
            self.retries += 1
            self.empty()
            block = reserve(pool, size)
        if block is None:
            self.failed, limit = self.failed or size, self.limit
            self.limit = None
            block = reserve(pool, size)
            self.limit = limit
        assert block is not None
        return block

    def _segment(self, pool: Pool, size: int) -> Block | None:
        count = SMALL_SEGMENT if pool.small else LARGE_SEGMENT if size < LARGE_FROM else -(-size // STEP) * STEP
        if not self._reserve(count):
            return None
        block = Block(self._next_address, count, pool)
        self.segments[block.address] = count
        self._next_address += count
        pool.put(block)
        return block

    def _map_run(self, pool: Pool, size: int) -> Block | None:
        block = pool.lowest_run(size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            behind = block.next
            assert behind is not None
            mapped = self._map(behind, min(size - block.size, behind.size))
            if mapped is None:
                return None
            block = mapped
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Reserve the first `size` bytes of an unmapped block, in whole steps; the free block that they are now in."""
        pool = block.pool
        count = -(-size // pool.step) * pool.step
        if not self._reserve(count):
            return None
        pool.take(block)
        if count < block.size:
            pool.put(self._cut(block, count))
        block.mapped = True
        return self._put_joined(block)

    def _unmap(self, block: Block) -> None:
        """Give back the whole steps inside a free block; what is left of it on either side stays free."""
        pool = block.pool
        start = -(-block.address // pool.step) * pool.step
        stop = (block.address + block.size) // pool.step * pool.step
        if stop <= start:
            return
        pool.take(block)
        if start > block.address:
            inner = self._cut(block, start - block.address)
            pool.put(block)
            block = inner
        if stop < block.address + block.size:
            pool.put(self._cut(block, stop - block.address))
        self.reserved -= block.size
        block.mapped = False
        self._put_joined(block)

    def _reserve(self, count: int) -> bool:
        if self.limit is not None and self.reserved + count > self.limit:
            return False
        self.reserved += count
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _cut(self, block: Block, size: int) -> Block:
        """Shorten a block; what is left, which is in no list yet."""
        rest = Block(block.address + size, block.size - size, block.pool, mapped=block.mapped)
        rest.before, rest.next, block.size = block, block.next, size
        if block.next is not None:
            block.next.before = rest
        block.next = rest
        return rest

    def _put_joined(self, block: Block) -> Block:
        """Free a block, joined with neighbours that are free and mapped, or unmapped, as it is."""
        before, behind = block.before, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            block.pool.take(before)
            self._join(before, block)
            block = before
        if behind is not None and behind.free and behind.mapped == block.mapped:
            block.pool.take(behind)
            self._join(block, behind)
        block.pool.put(block)
        return block

    def _join(self, first: Block, second: Block) -> None:
        first.size += second.size
        first.next = second.next
        if second.next is not None:
            second.next.before = first


def _address(block: Block) -> int:
    return block.address
