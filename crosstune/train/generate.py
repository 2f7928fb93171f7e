"""Prompts → answers, all lanes at once: one prefill, then one token a pass from a key-value cache.

A row's answer doesn't depend on the rows beside it: prompts are padded on the left and masked, positions count from the
row's own first token, and sampling draws come from (seed, row number, token), not from a shared generator.

Shapes: N rows of all lanes (lane by lane, equally many), T positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crosstune.errors import DeviceError
from crosstune.memory.peaks import CACHE_SHARE
from crosstune.memory.peaks import POSITIONS_A_BATCH as POSITIONS_A_BATCH  # also offered here
from crosstune.model.attach import Slots
from crosstune.model.base import Base
from crosstune.model.device import free_bytes, live_bytes, machine_of, release
from crosstune.model.head import next_logits
from crosstune.train.recover import is_out_of_memory

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0: the likeliest (greedy)."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What a lane wrote for one row: ids without the stop token; `stopped` False: cut off at max_new_tokens."""

    row: int
    ids: tuple[int, ...]
    stopped: bool


@dataclass(frozen=True)
class Prompt:
    """A row's prompt. `row` is its position, `number` (from 1) the seed of its draws."""

    row: int
    number: int
    ids: NDArray[np.int32]


def generate_lanes(
    base: Base,
    prompts_K: Sequence[Sequence[Prompt]],
    sampling: Sampling,
    *,
    pad_id: int,
    stop_ids: Sequence[int],
    tick: Callable[[int], None] | None = None,
) -> list[list[Answer]]:
    """Answer `prompts_K[k]` with lane k's adapter, all lanes together; K is 1 for a bare base. In order of `row`."""
    answers: list[list[Answer]] = [[] for _ in prompts_K]
    with torch.inference_mode(), without_checkpointing(base):
        batches = cut_batches(base, prompts_K, sampling.max_new_tokens)
        for batch_K, found in work_through(
            base, batches, lambda batch_K: _answer_batch(base, batch_K, sampling, pad_id, stop_ids)
        ):
            for lane, answered in enumerate(found):
                answers[lane] += answered
            if tick is not None:
                tick(sum(len(batch) for batch in batch_K))
    return [sorted(lane, key=lambda answer: answer.row) for lane in answers]


def cut_batches(
    base: Base, prompts_K: Sequence[Sequence[Prompt]], more: int, *, copies: int = 1
) -> Iterator[list[list[Prompt]]]:
    """Prompts of all lanes in batches, longest first, as many as the cache may hold. `copies`: of each row's cache."""
    queues = [sorted(prompts, key=lambda prompt: (-len(prompt.ids), prompt.row)) for prompts in prompts_K]
    limit = POSITIONS_A_BATCH[base.device.type]
    if base.device.type == "cuda":
        free = free_bytes(base.device) - live_bytes(base.device) - machine_of(base.device).context_bytes
        limit = min(limit, int(CACHE_SHARE * max(0, free) / cache_bytes_a_position(base)))
    place = 0
    while any(place < len(queue) for queue in queues):
        longest = max(len(queue[place].ids) for queue in queues if place < len(queue))
        each = max(1, limit // (len(queues) * (longest + more) * copies))
        yield [queue[place : place + each] for queue in queues]
        place += each


def work_through(
    base: Base, batches: Iterable[list[list[Prompt]]], work: Callable[[list[list[Prompt]]], Result]
) -> Iterator[tuple[list[list[Prompt]], Result]]:
    """(batch, what `work` makes of it) for each; one for which memory runs out is done in two halves."""
    for whole_K in batches:
        waiting = [whole_K]
        while waiting:
            batch_K = waiting.pop(0)
            try:
                result = work(batch_K)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                yield batch_K, result
                continue
            release(base.device)  # outside of the handler: the error's traceback holds the tensors
            waiting = [*_halves(batch_K), *waiting]


def _halves(batch_K: Sequence[list[Prompt]]) -> list[list[list[Prompt]]]:
    half = max(len(batch) for batch in batch_K) // 2
    if not half:
        longest = max(len(prompt.ids) for batch in batch_K for prompt in batch)
        raise DeviceError(
            f"out of memory while {len(batch_K)} lanes answer one row each, of {longest} tokens",
            "Set evaluate.max_new_tokens or device.lanes lower, or free memory that other programs hold.",
        )
    return [[batch[:half] for batch in batch_K], [batch[half:] for batch in batch_K]]


def cache_bytes_a_position(base: Base) -> int:
    """Bytes of keys and values that one position takes in all layers."""
    config = base.model.config.get_text_config().to_dict()
    all_heads, hidden = config["num_attention_heads"], config["hidden_size"]
    heads, size = config.get("num_key_value_heads") or all_heads, config.get("head_dim") or hidden // all_heads
    return int(2 * config["num_hidden_layers"] * heads * size * base.dtype.itemsize)


@dataclass
class Filled:
    """Prompts in the cache. Rows of short lanes are filled up with copies of a single pad token."""

    cache: Any
    mask_NT: Tensor
    next_position_N: Tensor
    hidden_NH: Tensor  # of each prompt's last token
    rows_each: int


def fill_cache(base: Base, batch_K: Sequence[Sequence[Prompt]], pad_id: int) -> Filled:
    """Run the prompts through the model once, padded on the left."""
    each = max(len(batch) for batch in batch_K)
    width = max(len(prompt.ids) for batch in batch_K for prompt in batch)
    ids_NT = np.full((len(batch_K) * each, width), pad_id, np.int64)
    mask_NT = np.zeros_like(ids_NT)
    mask_NT[:, -1] = 1  # a row of no prompt sees one pad token: attention over nothing would be nan
    for lane, batch in enumerate(batch_K):
        for place, prompt in enumerate(batch):
            ids_NT[lane * each + place, width - len(prompt.ids) :] = prompt.ids
            mask_NT[lane * each + place, width - len(prompt.ids) :] = 1
    position_NT = np.maximum(mask_NT.cumsum(1) - 1, 0)
    mask = torch.from_numpy(mask_NT).to(base.device)
    cache = base.new_cache()
    hidden_NTH = base.hidden_cached(
        torch.from_numpy(ids_NT).to(base.device), torch.from_numpy(position_NT).to(base.device), mask, cache
    )
    return Filled(cache, mask, mask.sum(1), hidden_NTH[:, -1], each)


def _answer_batch(
    base: Base, batch_K: Sequence[Sequence[Prompt]], sampling: Sampling, pad_id: int, stop_ids: Sequence[int]
) -> list[list[Answer]]:
    filled = fill_cache(base, batch_K, pad_id)
    lanes, each = len(batch_K), filled.rows_each
    real_N = torch.tensor([place < len(batch) for batch in batch_K for place in range(each)], device=base.device)
    stops = torch.tensor(sorted(stop_ids), device=base.device, dtype=torch.long)
    draw_NT = _draws(batch_K, each, sampling).to(base.device)
    mask_NT, position_N, hidden_NH = filled.mask_NT, filled.next_position_N, filled.hidden_NH
    over_N = ~real_N
    written = []
    for step in range(sampling.max_new_tokens):
        token_N = choose_tokens(
            next_logits(base, hidden_NH), sampling, draw_NT[:, step] if sampling.temperature else None
        )
        token_N = torch.where(over_N, pad_id, token_N)
        written.append(token_N)
        over_N = over_N | torch.isin(token_N, stops)
        if step + 1 == sampling.max_new_tokens or bool(over_N.all()):
            break
        mask_NT = torch.cat([mask_NT, torch.ones_like(mask_NT[:, :1])], 1)
        hidden_NH = base.hidden_cached(token_N[:, None], position_N[:, None], mask_NT, filled.cache)[:, -1]
        position_N = position_N + 1
    ids_NT = torch.stack(written, 1).cpu().numpy()
    answers: list[list[Answer]] = []
    for lane in range(lanes):
        rows = ids_NT[lane * each : lane * each + len(batch_K[lane])]
        answers.append([_cut(prompt.row, ids, stop_ids) for prompt, ids in zip(batch_K[lane], rows, strict=True)])
    return answers


def _cut(row: int, ids: NDArray[np.int64], stop_ids: Sequence[int]) -> Answer:
    stops = np.flatnonzero(np.isin(ids, list(stop_ids)))
    return Answer(row, tuple(ids[: stops[0]].tolist()), True) if len(stops) else Answer(row, tuple(ids.tolist()), False)


def _draws(batch_K: Sequence[Sequence[Prompt]], each: int, sampling: Sampling) -> Tensor:
    """Uniform numbers (N, new tokens). All lanes draw alike for a row: trials then differ by their adapters alone."""
    if not sampling.temperature:
        return torch.zeros(0, 0)
    draws = np.zeros((len(batch_K) * each, sampling.max_new_tokens))
    for lane, batch in enumerate(batch_K):
        for place, prompt in enumerate(batch):
            rng = np.random.default_rng([sampling.seed % 2**32, prompt.number])
            draws[lane * each + place] = rng.random(sampling.max_new_tokens)
    return torch.from_numpy(draws)


def choose_tokens(logits_NV: Tensor, sampling: Sampling, draw_N: Tensor | None) -> Tensor:
    """The likeliest token of each row, or the one at the draw's place in the (cut) distribution.

    top_p keeps the likeliest tokens until their mass reaches it, the first at least, as transformers' TopPLogitsWarper.
    """
    if draw_N is None:
        return logits_NV.argmax(-1)
    chance_NV, token_NV = torch.softmax(logits_NV.double() / sampling.temperature, -1).sort(-1, descending=True)
    mass_NV = chance_NV.cumsum(-1)
    if sampling.top_p < 1:
        chance_NV = chance_NV * (mass_NV - chance_NV < sampling.top_p)
        mass_NV = chance_NV.cumsum(-1)
    place_N1 = torch.searchsorted(mass_NV, draw_N[:, None] * mass_NV[:, -1:], right=True)
    kept_N1 = (chance_NV > 0).sum(-1, keepdim=True)
    return token_NV.gather(1, torch.minimum(place_N1, kept_N1 - 1))[:, 0]


@contextmanager
def without_checkpointing(base: Base) -> Iterator[None]:
    """A layer that recomputes its activations drops the cache it is given (transformers 5, modeling_layers.py)."""
    layers = [layer for layer in base.decoder_layers if layer.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def begin(slots: Slots) -> Base:
    """The base with all lanes' adapters answering and dropout off."""
    slots.begin_pass(None)
    return slots.base


def longest_answer(lengths: Sequence[int], asked: int | None) -> int:
    """max_new_tokens: as asked, or a quarter more than the longest answer of the data, 16 to 512 tokens."""
    return asked or max(16, min(512, math.ceil(1.25 * max(lengths, default=16)) + 1))
