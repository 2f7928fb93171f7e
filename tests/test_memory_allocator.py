"""The allocator model against what torch's source says, and against slow plain bookkeeping."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstune.memory.allocator import Allocator
from crosstune.memory.gpus import MIB
from crosstune.memory.replay import replay
from tests.allocator_run import all_shown, events
from tests.tiny import CASES


def test_sizes_are_rounded_to_512_bytes_and_served_from_2_mib():
    allocator = Allocator()
    allocator.born(1, 1)
    allocator.born(2, 513)
    assert (allocator.allocated, allocator.reserved) == (512 + 1024, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "reserved"), [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (21 * MIB, 22)]
)
def test_segments_are_as_large_as_in_cuda_caching_allocator(size, reserved):
    allocator = Allocator()
    allocator.born(1, size)
    assert allocator.reserved == reserved * MIB


def test_a_remainder_of_up_to_1_mib_is_not_split_off_and_counts():
    allocator = Allocator()
    allocator.born(1, 11 * MIB)  # a segment of 12 MiB
    assert allocator.allocated == 12 * MIB
    allocator = Allocator()
    allocator.born(1, 19 * MIB - 512)  # a segment of 20 MiB: 1 MiB + 512 bytes are left, which is enough
    assert allocator.allocated == 19 * MIB - 512
    allocator = Allocator()
    allocator.born(1, 5 * MIB)
    assert allocator.allocated == 5 * MIB


def test_freed_neighbours_are_joined_and_used_again():
    allocator = Allocator()
    for key in (1, 2, 3):
        allocator.born(key, 4 * MIB)
    allocator.died(1)
    allocator.died(2)
    allocator.born(4, 8 * MIB)
    assert allocator.reserved == 20 * MIB


def test_best_fit_takes_the_smallest_hole():
    allocator = Allocator()
    for key, size in ((1, 8), (2, 2), (3, 4), (4, 2)):
        allocator.born(key, size * MIB)
    allocator.died(1)
    allocator.died(3)
    allocator.born(5, 4 * MIB)
    assert allocator.blocks[5].address == 10 * MIB


def test_empty_cache_gives_back_whole_free_segments_only():
    allocator = Allocator()
    allocator.born(1, 30 * MIB)
    allocator.born(2, 4 * MIB)
    allocator.born(3, 4 * MIB)
    allocator.died(1)
    allocator.died(2)
    allocator.empty()
    assert allocator.reserved == 20 * MIB


def test_a_limit_first_empties_the_cache_and_then_fails():
    allocator = Allocator(limit=40 * MIB)
    allocator.born(1, 30 * MIB)
    allocator.died(1)
    allocator.born(2, 32 * MIB)
    assert (allocator.retries, allocator.failed) == (1, None)
    allocator.born(3, 20 * MIB)
    assert allocator.failed == 20 * MIB
    allocator.born(4, 2 * MIB)
    assert (allocator.retries, allocator.failed) == (3, 20 * MIB)  # the first that failed is told


def test_what_reaches_the_limit_and_not_beyond_fits():
    allocator = Allocator(limit=40 * MIB)
    allocator.born(1, 30 * MIB)
    allocator.born(2, 10 * MIB)
    assert (allocator.reserved, allocator.retries) == (40 * MIB, 0)


def test_the_limit_counts_from_where_peaks_do():
    making = [("born", 1, 30 * MIB), ("died", 1, 0), ("begin", 0, 0)]
    assert replay([*making, ("born", 2, 20 * MIB)], limit=20 * MIB).fits
    assert not replay([*making, ("born", 2, 30 * MIB)], limit=20 * MIB).fits


def test_expandable_segments_grow_in_place():
    native, expandable = Allocator(), Allocator(expandable=True)
    for allocator in (native, expandable):
        for size in (30, 40, 50):  # each larger than the hole that the one before left
            allocator.born(1, size * MIB)
            allocator.died(1)
    assert (native.reserved, expandable.reserved) == (120 * MIB, 60 * MIB)


def test_unmapped_addresses_of_just_the_size_are_mapped_again():
    allocator = Allocator(expandable=True)
    allocator.born(1, 40 * MIB)
    allocator.born(2, 20 * MIB)
    place = allocator.blocks[1].address
    allocator.died(1)
    allocator.empty()
    allocator.born(3, 40 * MIB)
    assert allocator.blocks[3].address == place


@pytest.mark.parametrize("expandable", [False, True])
def test_a_graphs_pool_serves_nothing_else_even_when_the_cache_is_emptied(expandable):
    trace = [
        ("capture", 1, 0), ("born", 1, 40 * MIB), ("died", 1, 0), ("captured", 1, 0), ("empty", 0, 0),
        ("born", 2, 40 * MIB),
    ]  # fmt: skip
    assert replay(trace, expandable=expandable).reserved == 80 * MIB
    again = [*trace, ("capture", 1, 0), ("born", 3, 40 * MIB), ("captured", 1, 0)]
    assert replay(again, expandable=expandable).reserved == 80 * MIB


def test_peaks_by_phase_and_after_a_reset():
    trace = [("born", 1, MIB), ("mark", "a", 0), ("born", 2, 5 * MIB), ("died", 2, 5 * MIB), ("mark", "b", 0)]
    shown = replay(trace)
    assert (shown.by_mark, shown.at, shown.peak_allocated) == ({"a": MIB, "b": 6 * MIB}, "b", 6 * MIB)
    anew = replay([*trace, ("begin", 0, 0), ("mark", "c", 0)])
    assert (anew.peak_allocated, anew.peak_reserved, anew.by_mark) == (MIB, 2 * MIB, {"c": MIB})
    assert replay([*trace, ("empty", 0, 0), ("mark", "c", 0)]).peak_allocated == 6 * MIB


def test_a_recorded_pass_has_workspaces_of_its_own_made_once():
    once = [("capture", 1, 0), ("born", 1, MIB), ("died", 1, MIB), ("captured", 1, 0)]
    assert replay([*once, *once, ("mark", "c", 0)], first=(8 * MIB, 8 * MIB)).allocated == 32 * MIB


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), expandable=st.booleans())
def test_bookkeeping_holds_for_random_traces(seed, expandable):
    """Oracle: blocks in use never overlap, lie inside what is reserved, and all memory comes back in the end."""
    draw, allocator, sizes = random.Random(seed), Allocator(expandable=expandable), {}
    for key in range(200):
        if sizes and draw.random() < 0.45:
            gone = draw.choice(list(sizes))
            allocator.died(gone)
            del sizes[gone]
        else:
            sizes[key] = draw.choice((1, 700, 300_000, MIB, 3 * MIB, 12 * MIB, 40 * MIB))
            allocator.born(key, sizes[key])
        spans = sorted((block.address, block.address + block.size) for block in allocator.blocks.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated == sum(end - start for start, end in spans)
        assert sum(sizes.values()) <= allocator.allocated <= allocator.reserved <= allocator.peak_reserved
    for key in list(sizes):
        allocator.died(key)
    allocator.empty()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


def modelled(seed, expandable):
    allocator, found = Allocator(expandable=expandable), []
    for kind, key, count in events(seed):
        if kind == "born":
            allocator.born(key, count)
        elif kind == "died":
            allocator.died(key)
        else:
            allocator.empty()
        found.append([allocator.allocated, allocator.reserved])
    return found


@pytest.mark.parametrize("line", json.loads((CASES / "h200_allocator.json").read_text()), ids=str)
def test_random_traces_show_what_they_showed_on_an_h200(line):
    assert modelled(line["seed"], line["expandable"]) == line["shown"]


@pytest.mark.gpu
def test_random_traces_show_what_they_show_on_this_gpu():
    for line in all_shown():
        assert modelled(line["seed"], line["expandable"]) == line["shown"], (line["seed"], line["expandable"])
