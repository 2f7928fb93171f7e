"""Batches without padding: rows of all lanes one after another, so that short rows cost their own tokens.

With real lengths, 20 to 2,000 tokens, a rectangle of the lanes' rows is half padding. Here a pass is one sequence of N
tokens, lane by lane; attention is told where rows begin (`cuts_R`), products where lanes end (`ends_K`). What is left
of padding fills up a lane to a multiple of 8 tokens, and the pass to a size that is recorded. It forms rows of its own.

Shapes: K lanes, N tokens, R rows, S targets of all lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches import Batch, PassSize, Unit, token_keys
from crosstune.data.tokens import Tokens

ALIGNED = 8  # tokens: the pieces in which a grouped product reads
WIDTH_MULTIPLE = 64  # tokens of a whole pass


def cut_flat(units_K: Sequence[Sequence[Unit]], lengths: NDArray[np.int64], most_tokens: int) -> list[list[list[Unit]]]:
    """One step's units → as few passes as hold `most_tokens` each, about equal: longest first, to the emptiest."""
    found = [
        (sum(aligned(int(lengths[row])) for row in unit), lane, place)
        for lane, units in enumerate(units_K)
        for place, unit in enumerate(units)
    ]
    found.sort(key=lambda unit: (-unit[0], unit[1], unit[2]))
    count = max(1, math.ceil(sum(size for size, _, _ in found) / most_tokens)) if found else 0
    while count:
        held = [0] * count
        passes: list[list[list[Unit]]] = [[[] for _ in units_K] for _ in range(count)]
        for size, lane, place in found:
            p = held.index(min(held))
            held[p] += size
            passes[p][lane].append(units_K[lane][place])
        if max(held) <= most_tokens or count == len(found):
            return passes
        count += 1
    return []


def flat_size(tokens: Tokens, units_K: Sequence[Sequence[Unit]], longest: int) -> PassSize:
    """The smallest size that holds a pass; `longest`: tokens that no row of the wave exceeds."""
    lanes = [[row for unit in units for row in unit] for units in units_K]
    width = sum(aligned(sum(int(tokens.lengths[row]) for row in rows)) for rows in lanes)
    width = max(1, math.ceil(width / WIDTH_MULTIPLE)) * WIDTH_MULTIPLE
    targets = sum(int(tokens.targets[row]) for rows in lanes for row in rows)
    return PassSize(sum(map(len, lanes)), width, max(1, targets), longest)


def collate_flat(
    tokens: Tokens,
    units_K: Sequence[Sequence[Unit]],
    *,
    weights_K: Sequence[float] | None = None,
    dropout_K: Sequence[tuple[int, int]] | None = None,
    size: PassSize,
) -> Batch:
    """Arrays of one pass, as `collate`'s, of a size that holds it."""
    ids_1N = np.full((1, size.width), tokens.pad_id, np.int64)
    position_1N = np.zeros((1, size.width), np.int64)
    key_1N = np.zeros((1, size.width), np.uint32) if dropout_K else None
    weights, cuts, ends, num_tokens, at = weights_K or [0.0] * len(units_K), [0], [], 0, 0
    index, target, weight, row_of, counts = [], [], [], [], []
    for lane, units in enumerate(units_K):
        counts.append(0)
        for row in (row for unit in units for row in unit):
            ids, learn = tokens.row(row)
            stop = at + len(ids)
            ids_1N[0, at:stop], position_1N[0, at:stop] = ids, np.arange(len(ids))
            if key_1N is not None and dropout_K is not None:
                key_1N[0, at:stop] = token_keys(*dropout_K[lane], row=int(tokens.numbers[row]), length=len(ids))
            where = np.flatnonzero(learn)
            index.append(at + where - 1)
            target.append(ids[where].astype(np.int64))
            weight.append(np.full(len(where), weights[lane], np.float32))
            row_of.append(np.full(len(where), row, np.int64))
            counts[-1] += len(where)
            cuts.append(stop)
            at, num_tokens = stop, num_tokens + len(ids)
        at = _pad_to(aligned(at), cuts, size.longest)
        ends.append(at)
    _pad_to(size.width, cuts, size.longest)
    ends[-1] = size.width
    count = size.targets
    return Batch(
        ids_1N, position_1N,
        _padded(index, count, 0), _padded(target, count, 0), _padded(weight, count, 0.0, np.float32),
        _padded(row_of, count, -1), None if key_1N is None else key_1N.view(np.int32),
        num_tokens, size,
        _cuts(cuts, size, len(units_K)), np.array(ends, np.int32), _spots(counts, count) if weights_K else None,
    )  # fmt: skip


def aligned(count: int) -> int:
    """Tokens, rounded up to what a grouped product reads."""
    return -(-count // ALIGNED) * ALIGNED


def _pad_to(stop: int, cuts: list[int], longest: int) -> int:
    """Rows of padding up to `stop`."""
    while cuts[-1] < stop:
        cuts.append(min(stop, cuts[-1] + longest))
    return stop


def _cuts(cuts: list[int], size: PassSize, lanes: int) -> NDArray[np.int32]:
    """As many as any pass of this size can have; empty rows at the end."""
    most = size.rows + lanes + math.ceil(size.width / size.longest) + 1
    return np.array(cuts + [size.width] * (most - len(cuts)), np.int32)


def _padded(parts: Sequence[NDArray[Any]], count: int, fill: float, dtype: type = np.int64) -> NDArray[Any]:
    given = np.concatenate([np.zeros(0, dtype), *parts])
    return np.concatenate([given, np.full(count - len(given), fill, dtype)])[None]


def _spots(counts: Sequence[int], count: int) -> NDArray[np.int64]:
    spot_KS = np.full((len(counts), count), count, np.int64)
    start = 0
    for lane, own in enumerate(counts):
        spot_KS[lane, :own] = np.arange(start, start + own)
        start += own
    return spot_KS
