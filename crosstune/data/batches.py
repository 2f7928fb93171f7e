"""(seed, lane, step) → batch. Nothing to save, so nothing to restore.

A lane's training rows are cut into *units*: a row, or several packed rows. A step takes `batch_size` units of the
lane's own order; a pass takes up to `micro_batch` of them from every lane at once. Within one optimizer step a lane's
units go longest first, so that all lanes' passes have like lengths; which rows make up a step, and the order of the
steps, are each lane's own. The loss is a token mean over the step, so the order inside it changes only rounding.

Shapes: K lanes, N rows of a pass (K × micro-batch), T tokens of a row (padded on the right), S targets of a lane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from crosstune.data.tokens import Tokens

Unit = tuple[int, ...]  # positions into Tokens of the rows that form one sequence


@dataclass(frozen=True, order=True)
class PassSize:
    """Sizes of a pass: rows of a lane, T, S. Of a flat one (flat.py): all rows, all tokens, all targets, longest row.

    A larger one can hold it, for padding is invisible.
    """

    rows: int
    width: int
    targets: int
    longest: int = 0  # tokens; 0: not flat

    def holds(self, other: PassSize) -> bool:
        """Whether a pass of the other size can be padded to this one."""
        if self.longest == 0 and self.rows != other.rows:  # a row of padding costs as much as any other
            return False
        return (self.longest > 0) == (other.longest > 0) and all(
            mine >= its for mine, its in zip(astuple(self), astuple(other), strict=True)
        )


@dataclass(frozen=True)
class Batch:
    """One pass's arrays. `position_NT` only where rows are packed, `key_KS` only where a lane has dropout."""

    ids_NT: NDArray[np.int64]
    position_NT: NDArray[np.int64] | None
    index_KS: NDArray[np.int64]  # which of the lane's N/K × T positions predicts the target
    target_KS: NDArray[np.int64]
    weight_KS: NDArray[np.float32]  # 0 where padded
    row_KS: NDArray[np.int64]  # position in Tokens of the row that the target belongs to; -1 where padded
    key_KS: NDArray[np.int32] | None  # hashed (lane seed, step, row, position), a key a token
    num_tokens: int  # without padding
    size: PassSize
    # Of a flat pass only (flat.py), whose N and K above are 1:
    cuts_R: NDArray[np.int32] | None = None  # where rows begin and end
    ends_K: NDArray[np.int32] | None = None  # where each lane's tokens end
    spot_KS: NDArray[np.int64] | None = None  # of targets to learn: each lane's among all; behind the last where padded

    def lane_of_target(self) -> NDArray[np.int64]:
        """The lane of each target, of `row_KS`'s shape; meaningless where padded."""
        if self.ends_K is None:
            return np.broadcast_to(np.arange(len(self.row_KS))[:, None], self.row_KS.shape)
        return np.searchsorted(self.ends_K, self.index_KS, side="right")


def lane_seed(seed: int, fold: int | None) -> int:
    """The seed of a fold's lane: of (seed, fold) alone, so it depends on nothing that ran before or beside."""
    return int(
        _mix(np.array([seed & 0xFFFFFFFF], np.uint32) ^ _mix(np.array([0 if fold is None else fold + 1], np.uint32)))[0]
    )


@lru_cache(maxsize=32)  # every step of an epoch asks; 40 ms a step of 5 lanes of 100,000 units, were it drawn anew
def unit_order(seed: int, epoch: int, num_units: int) -> NDArray[np.int64]:
    """Order of the units in one epoch: Philox, a counter-based generator, keyed by (lane seed, epoch)."""
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_units)
    order.flags.writeable = False
    return order


def steps_an_epoch(num_units: int, batch_size: int) -> int:
    """Optimizer steps an epoch; the last one may have fewer rows."""
    return math.ceil(num_units / batch_size)


def units_of_step(units: Sequence[Unit], *, seed: int, step: int, batch_size: int) -> list[Unit]:
    """The units of a lane's optimizer step (from 0)."""
    epoch, place = divmod(step, steps_an_epoch(len(units), batch_size))
    order = unit_order(seed, epoch, len(units))
    return [units[i] for i in order[place * batch_size : (place + 1) * batch_size]]


def pack_rows(lengths: NDArray[np.int64], rows: Sequence[int], max_tokens: int) -> list[Unit]:
    """Best-fit decreasing: each row goes where the least room is left. Rows of equal length keep their order."""
    by_room: dict[int, list[list[int]]] = {}
    packs: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-int(lengths[row]), row)):
        length = int(lengths[row])
        room = min((room for room in by_room if room >= length), default=None)
        if room is None:
            pack: list[int] = []
            packs.append(pack)
            room = max_tokens
        else:
            pack = by_room[room].pop(0)
            if not by_room[room]:
                del by_room[room]
        pack.append(row)
        by_room.setdefault(room - length, []).append(pack)
    return [tuple(pack) for pack in packs]


def cut_step(units_K: Sequence[Sequence[Unit]], lengths: NDArray[np.int64], micro_batch: int) -> list[list[list[Unit]]]:
    """One step's units of every lane → passes of at most `micro_batch` units a lane, longest first."""
    ordered = [sorted(units, key=lambda unit: -sum(int(lengths[row]) for row in unit)) for units in units_K]
    passes = math.ceil(max((len(units) for units in ordered), default=0) / micro_batch)
    return [[units[p * micro_batch : (p + 1) * micro_batch] for units in ordered] for p in range(passes)]


def pass_size(tokens: Tokens, units_K: Sequence[Sequence[Unit]], multiple: int = 1) -> PassSize:
    """The smallest size that holds a pass: T is its longest unit, rounded up to `multiple`."""
    longest = max((sum(int(tokens.lengths[row]) for row in unit) for units in units_K for unit in units), default=1)
    targets = max(sum(int(tokens.targets[row]) for unit in units for row in unit) for units in units_K)
    rows = max(len(units) for units in units_K)
    return PassSize(max(1, rows), max(2, math.ceil(longest / multiple) * multiple), max(1, targets))


def collate(
    tokens: Tokens,
    units_K: Sequence[Sequence[Unit]],
    *,
    weights_K: Sequence[float] | None = None,
    dropout_K: Sequence[tuple[int, int]] | None = None,
    multiple: int = 1,
    size: PassSize | None = None,
) -> Batch:
    """Arrays of one pass. `weights_K`: weight of a target of each lane; `dropout_K`: (lane seed, step) of each lane.

    A lane with fewer units than the others gets rows of padding. No weights: nothing is to be learned. `size`: larger
    than needed, where one is fixed.
    """
    size = size or pass_size(tokens, units_K, multiple)
    num_lanes, rows_each, width = len(units_K), size.rows, size.width
    ids_NT = np.full((num_lanes * rows_each, width), tokens.pad_id, np.int64)
    packed = any(len(unit) > 1 for units in units_K for unit in units)
    position_NT = np.tile(np.arange(width), (len(ids_NT), 1)) if packed else None
    key_NT = np.zeros(ids_NT.shape, np.uint32) if dropout_K else None
    found: list[list[tuple[NDArray[np.int64], NDArray[np.int64], int]]] = [[] for _ in units_K]
    num_tokens = 0
    for lane, units in enumerate(units_K):
        for place, unit in enumerate(units):
            n, start = lane * rows_each + place, 0
            for row in unit:
                ids, learn = tokens.row(row)
                stop = start + len(ids)
                ids_NT[n, start:stop] = ids
                if position_NT is not None:
                    position_NT[n, start:stop] = np.arange(len(ids))
                    position_NT[n, stop:] = np.arange(width - stop)
                if key_NT is not None and dropout_K is not None:
                    key_NT[n, start:stop] = token_keys(*dropout_K[lane], row=int(tokens.numbers[row]), length=len(ids))
                where = np.flatnonzero(learn)
                found[lane].append((place * width + start + where - 1, ids[where].astype(np.int64), row))
                start, num_tokens = stop, num_tokens + len(ids)
    targets = _targets(found, weights_K or [0.0] * num_lanes, size.targets)
    return Batch(ids_NT, position_NT, *targets, _keys(key_NT, num_lanes), num_tokens, size)


def _targets(
    found: Sequence[Sequence[tuple[NDArray[np.int64], NDArray[np.int64], int]]], weights_K: Sequence[float], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    shape = (len(found), count)
    index_KS, target_KS, row_KS = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    weight_KS = np.zeros(shape, np.float32)
    for lane, parts in enumerate(found):
        start = 0
        for index, target, row in parts:
            part = slice(start, start + len(index))
            index_KS[lane, part], target_KS[lane, part], row_KS[lane, part] = index, target, row
            weight_KS[lane, part] = weights_K[lane]
            start += len(index)
    return index_KS, target_KS, weight_KS, row_KS


def _keys(key_NT: NDArray[np.uint32] | None, num_lanes: int) -> NDArray[np.int32] | None:
    return None if key_NT is None else key_NT.reshape(num_lanes, -1).view(np.int32)


def token_keys(seed: int, step: int, *, row: int, length: int) -> NDArray[np.uint32]:
    start = np.array([seed & 0xFFFFFFFF], np.uint32)
    for part in (step, row):
        start = _mix(start ^ _mix(np.array([part & 0xFFFFFFFF], np.uint32)))
    return _mix(start ^ _mix(np.arange(length, dtype=np.uint32)))


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijection of 32-bit numbers that scatters neighbours (lowbias32: nullprogram.com/blog/2018/07/31)."""
    x = (x + np.uint32(0x9E3779B9)).astype(np.uint32)
    x = ((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)).astype(np.uint32)
    x = ((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)).astype(np.uint32)
    return (x ^ (x >> np.uint32(16))).astype(np.uint32)
