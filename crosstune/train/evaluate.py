"""Rows → losses, at inference cost: no autograd, large batches, each lane on its own rows.

The result of a row does not depend on the rows beside it: rows are padded on the right, where a causal model never
looks, and per-row sums are made in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from crosstune.data.batches import Batch, Unit, collate
from crosstune.data.flat import collate_flat, flat_size
from crosstune.data.tokens import Tokens
from crosstune.errors import DeviceError
from crosstune.memory.widths import LENGTH_MULTIPLE
from crosstune.model.attach import Slots
from crosstune.model.base import Base
from crosstune.model.block import kind_of
from crosstune.model.fuse import fused_without_lanes
from crosstune.model.head import head_loss
from crosstune.train.cutting import FLAT_ON
from crosstune.train.lane import RowScores
from crosstune.train.recover import survive
from crosstune.train.step import DeviceBatch

# Tokens of a batch without autograd. Enough to fill the device; hidden states of one layer are all that is alive.
TOKENS_A_BATCH = {"cpu": 4096, "mps": 8192, "cuda": 32768}


def score_lanes(
    slots: Slots,
    tokens: Tokens,
    rows_K: Sequence[Sequence[int]],
    *,
    tick: Callable[[int], None] | None = None,
    most_tokens: int | None = None,
) -> list[RowScores]:
    """Score lane k's adapter on `rows_K[k]`, all lanes together. `tick` is told how many rows a batch held.

    `most_tokens`: of a batch, padding included, where the plan says fewer than the device's usual number.
    """
    return _score(slots.base, slots, tokens, rows_K, tick, most_tokens)


def score_base(
    base: Base,
    tokens: Tokens,
    rows: Sequence[int],
    *,
    tick: Callable[[int], None] | None = None,
    most_tokens: int | None = None,
) -> RowScores:
    """Score the untuned base on `rows`. Where memory runs out, again with half the tokens a batch."""
    least = max((int(tokens.lengths[row]) for row in rows), default=1)
    most = min(TOKENS_A_BATCH[base.device.type], most_tokens or sys.maxsize)
    done = told = 0

    def count(rows_of_batch: int) -> None:
        nonlocal done, told
        done += rows_of_batch
        if tick is not None and done > told:
            tick(done - told)
            told = done

    def shrink(message: str) -> None:
        nonlocal most, done
        if most <= least:
            raise DeviceError(
                f"out of memory in an evaluation of the base, of one row of {least} tokens: {message}",
                "Set data.max_tokens or model.quantization: nf4, or free memory that other programs hold.",
            )
        most, done = max(least, most // 2), 0

    with fused_without_lanes(base):
        return survive(lambda: _score(base, None, tokens, [rows], count, most)[0], shrink, base.device)


@torch.inference_mode()
def _score(
    base: Base,
    slots: Slots | None,
    tokens: Tokens,
    rows_K: Sequence[Sequence[int]],
    tick: Callable[[int], None] | None,
    most_tokens: int | None,
) -> list[RowScores]:
    nll = np.zeros((len(rows_K), len(tokens.lengths)))
    hits = np.zeros_like(nll, dtype=np.int64)
    waiting = []
    most_tokens = min(TOKENS_A_BATCH[base.device.type], most_tokens or sys.maxsize)
    is_flat = FLAT_ON[kind_of(base.device, base.dtype)] and (base.takes_flat if slots is None else slots.takes_flat)
    batches = _flat_batches if is_flat and _differ(tokens, rows_K) else _batches
    for batch in batches(tokens, rows_K, base.device.type, most_tokens):
        on_device = DeviceBatch.of(batch, base.device)
        hidden_NTH = on_device.hidden(base, slots)
        out = head_loss(base, hidden_NTH, on_device.index_KS, on_device.target_KS, on_device.weight_KS)
        waiting.append((batch, out.nll_KS, out.hit_KS))  # read back after all is queued
        if tick is not None:
            tick(len(np.unique(batch.row_KS[batch.row_KS >= 0])))
    for batch, nll_KS, hit_KS in waiting:
        real = batch.row_KS >= 0
        where = (batch.lane_of_target()[real], batch.row_KS[real])
        np.add.at(nll, where, nll_KS.double().cpu().numpy()[real])
        np.add.at(hits, where, hit_KS.cpu().numpy()[real])
    return [
        RowScores(chosen, nll[k, chosen], tokens.targets[chosen].astype(np.int64), hits[k, chosen])
        for k, chosen in enumerate(np.array(sorted(rows), dtype=np.int64) for rows in rows_K)
    ]


def _differ(tokens: Tokens, rows_K: Sequence[Sequence[int]]) -> bool:
    return len({int(tokens.lengths[row]) for rows in rows_K for row in rows}) > 1


def _flat_batches(
    tokens: Tokens, rows_K: Sequence[Sequence[int]], device_type: str, most_tokens: int
) -> Iterator[Batch]:
    """Flat batches of all lanes, longest rows first: a row after another until the next would be too many tokens."""
    waiting = sorted(
        ((int(tokens.lengths[row]), lane, row) for lane, rows in enumerate(rows_K) for row in rows),
        key=lambda found: (-found[0], found[1:]),
    )
    while waiting:
        units_K: list[list[Unit]] = [[] for _ in rows_K]
        longest, left = waiting[0][0], most_tokens
        taken = 0
        for length, lane, row in waiting:
            if taken and length > left:
                break
            units_K[lane].append((row,))
            taken, left = taken + 1, left - length
        waiting = waiting[taken:]
        yield collate_flat(tokens, units_K, size=flat_size(tokens, units_K, longest))


def _batches(tokens: Tokens, rows_K: Sequence[Sequence[int]], device_type: str, most_tokens: int) -> Iterator[Batch]:
    """Batches of all lanes, longest rows first, as many rows a lane as the token budget holds at that length."""
    queues: list[list[Unit]] = [
        [(row,) for row in sorted(rows, key=lambda row: -int(tokens.lengths[row]))] for rows in rows_K
    ]
    place = 0
    while any(place < len(queue) for queue in queues):
        longest = max(int(tokens.lengths[queue[place][0]]) for queue in queues if place < len(queue))
        each = max(1, most_tokens // (len(queues) * longest))
        units_K = [queue[place : place + each] for queue in queues]
        yield collate(tokens, units_K, multiple=LENGTH_MULTIPLE[device_type])
        place += each
