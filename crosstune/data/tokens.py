"""Text → ids and targets: the whole data set as flat arrays, cached under a fingerprint of all that can change them.

`learn[j]` True means that token j is a target, predicted from token j − 1; the first token of a row never is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from crosstune.data.encode import Encoder
from crosstune.data.render import Renderer, Span, template_findings
from crosstune.data.rows import Row, Rows
from crosstune.data.template import RowError
from crosstune.data.token_cache import fingerprint_of, read_cache, write_cache
from crosstune.data.token_faults import TokenFaults, limit_findings
from crosstune.data.tokenizer import find_stop_ids, load_tokenizer, ready_tokenizer
from crosstune.errors import Finding
from crosstune.recipe.sections import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoder", "Tokens", "load_tokenizer", "ready_tokenizer", "tokenize"]
_BATCH_ROWS = 1000
Progress = Callable[[int, int], None]  # rows done, rows in all


@dataclass(frozen=True)
class Tokens:
    """A data set, encoded; position i is `rows.rows[i]`."""

    ids: NDArray[np.int32]  # (all tokens,)
    learn: NDArray[np.bool_]  # (all tokens,)
    starts: NDArray[np.int64]  # (rows + 1,)
    numbers: NDArray[np.int64]  # (rows,) row numbers counted from 1
    pad_id: int
    stop_ids: tuple[int, ...]
    max_tokens: int
    fingerprint: str
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.starts)

    @cached_property
    def targets(self) -> NDArray[np.int64]:
        """Targets of each row."""
        sums = np.concatenate([[0], np.cumsum(self.learn, dtype=np.int64)])
        return sums[self.starts[1:]] - sums[self.starts[:-1]]

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Ids and targets of the row at position i."""
        place = slice(self.starts[i], self.starts[i + 1])
        return self.ids[place], self.learn[place]

    def without(self, numbers: Iterable[int]) -> Tokens:
        """The same less the rows with these numbers, as `Rows.without` does."""
        keep = ~np.isin(self.numbers, list(numbers))
        tokens = np.repeat(keep, self.lengths)
        starts = np.concatenate([[0], np.cumsum(self.lengths[keep])]).astype(np.int64)
        return replace(self, ids=self.ids[tokens], learn=self.learn[tokens], starts=starts, numbers=self.numbers[keep])


def tokenize(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    *,
    cache: Path | None,
    progress: Progress | None = None,
    limit: int,
    stop_ids: Sequence[int] = (),
) -> Tokens:
    """Encode all rows, each cut to `data.max_tokens` or else to `limit`, the model's own.

    `cache` is a folder, or None. `stop_ids` are added to those the tokenizer knows (`ReadyTokenizer.stop_ids`).
    A row that can't be rendered or has no target stays in its place, without targets, and is named by an error.
    """
    max_tokens = data.max_tokens or limit
    fingerprint = fingerprint_of(rows, tokenizer, data, max_tokens)
    file = cache / f"tokens-{fingerprint[:32]}.npz" if cache else None
    parts = read_cache(file, fingerprint) if file else None
    if parts is None:
        parts = _encode_rows(rows, tokenizer, data, max_tokens, progress)
        if file:
            write_cache(file, fingerprint, *parts)
    ids, learn, starts, findings = parts
    stops = tuple(sorted({*find_stop_ids(tokenizer), *stop_ids}))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    numbers = np.array([row.number for row in rows.rows], dtype=np.int64)
    findings = [*findings, *limit_findings(data, limit, np.diff(starts))]
    return Tokens(ids, learn, starts, numbers, pad, stops, max_tokens, fingerprint, tuple(findings))


def _encode_rows(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data, max_tokens: int, progress: Progress | None
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64], list[Finding]]:
    renderer, encoder, faults = Renderer(tokenizer, data), Encoder(tokenizer), TokenFaults(data)
    ids: list[NDArray[np.int32]] = []
    learn: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    for begin in range(0, len(rows.rows), _BATCH_ROWS):
        batch = rows.rows[begin : begin + _BATCH_ROWS]
        encoded = encoder.rows([_spans_or_fault(renderer, row, faults) for row in batch])
        for row, (row_ids, row_learn) in zip(batch, encoded, strict=True):
            kept = sum(row_learn[:max_tokens])
            faults.look(row)
            if row.number not in faults.refused:
                faults.judge(row, kept, sum(row_learn), len(row_ids) > max_tokens)
            lengths.append(min(len(row_ids), max_tokens))
            ids.append(np.array(row_ids[:max_tokens], dtype=np.int32))
            learn.append(np.array(row_learn[:max_tokens], dtype=np.bool_))
        if progress:
            progress(min(begin + _BATCH_ROWS, len(rows.rows)), len(rows.rows))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    talk = any(row.shape == "messages" for row in rows.rows)
    said = faults.findings(max_tokens, renderer, name=rows.name, num_rows=len(rows))
    findings = [*template_findings(renderer, conversations=talk), *said]
    empty = np.zeros(0, dtype=np.int32)
    return np.concatenate([empty, *ids]), np.concatenate([empty.astype(bool), *learn]), starts, findings


def _spans_or_fault(renderer: Renderer, row: Row, faults: TokenFaults) -> list[Span]:
    try:
        return renderer.spans(row)
    except RowError as error:
        faults.refused[row.number] = error
        return []
