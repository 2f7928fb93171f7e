"""Text → ids and targets: the whole data set as flat arrays, cached under a fingerprint of all that can change them.

`learn[j]` True means that token j is a target, predicted from token j − 1; the first token of a row never is one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.render import Renderer, Span, template_findings
from crosstune.data.rows import Row, Rows
from crosstune.data.template import DATE, RowError
from crosstune.data.tokenizer import find_stop_ids, load_tokenizer, ready_tokenizer
from crosstune.errors import DataError, Finding, Place
from crosstune.recipe import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Encoder", "Tokens", "load_tokenizer", "ready_tokenizer", "tokenize"]
_VERSION = 1  # raise it when the same input gives other ids
_BATCH_ROWS = 1000
_ROWS_SAID = 20
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


class Encoder:
    """Encodes spans apart, and joins them so that each sounds as it does in running text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.bos_id = tokenizer.bos_token_id
        self._lead = "" if self._joins_cleanly("") else "\n"

    def rows(self, rows: Sequence[Sequence[Span]]) -> list[tuple[list[int], list[bool]]]:
        """Ids and targets of each row of spans. One BOS at most at the start; the first token is no target."""
        inside, first = self._encode(rows)
        encoded = []
        for spans in rows:
            ids: list[int] = []
            learn: list[bool] = []
            for span in spans:
                at_start = all(i == self.bos_id for i in ids)
                part = (first if at_start else inside)[span.text, span.literal]
                if at_start and ids and part[:1] == [self.bos_id]:
                    part = part[1:]
                ids += part
                learn += [span.learn] * len(part)
            if learn:
                learn[0] = False
            encoded.append((ids, learn))
        return encoded

    def _encode(self, rows: Sequence[Sequence[Span]]) -> tuple[dict[tuple[str, bool], list[int]], ...]:
        """Every different span, once: as it is inside a row, and as it is at its start."""
        plain = {(span.text, span.literal) for spans in rows for span in spans}
        first = self._ids(plain, "")
        return (self._ids(plain, self._lead) if self._lead else first), first

    def _ids(self, keys: set[tuple[str, bool]], lead: str) -> dict[tuple[str, bool], list[int]]:
        ids: dict[tuple[str, bool], list[int]] = {}
        for literal in (False, True):
            texts = [text for text, flag in keys if flag is literal]
            if texts:
                cut = len(self._call([lead], literal)[0]) if lead else 0
                for text, got in zip(texts, self._call([lead + t for t in texts], literal), strict=True):
                    ids[text, literal] = got[cut:]
        return ids

    def _call(self, texts: list[str], literal: bool) -> list[list[int]]:
        return self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=literal, return_attention_mask=False, verbose=False
        )["input_ids"]

    def _joins_cleanly(self, lead: str) -> bool:
        """False for tokenizers that put a blank before every text (SentencePiece): a span inside a row has none."""
        alone, after, line = self._call(["b", "\nb", "\n"], False)
        return after[len(line) :] == alone


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
    fingerprint = _fingerprint(rows, tokenizer, data, max_tokens)
    file = cache / f"tokens-{fingerprint[:32]}.npz" if cache else None
    parts = _read_cache(file, fingerprint) if file else None
    if parts is None:
        parts = _encode_rows(rows, tokenizer, data, max_tokens, progress)
        if file:
            _write_cache(file, fingerprint, *parts)
    ids, learn, starts, findings = parts
    stops = tuple(sorted({*find_stop_ids(tokenizer), *stop_ids}))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    numbers = np.array([row.number for row in rows.rows], dtype=np.int64)
    findings = [*findings, *_limit_findings(data, limit, np.diff(starts))]
    return Tokens(ids, learn, starts, numbers, pad, stops, max_tokens, fingerprint, tuple(findings))


def _encode_rows(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data, max_tokens: int, progress: Progress | None
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64], list[Finding]]:
    renderer, encoder, faults = Renderer(tokenizer, data), Encoder(tokenizer), _Faults(data)
    ids: list[NDArray[np.int32]] = []
    learn: list[NDArray[np.bool_]] = []
    lengths: list[int] = []
    for begin in range(0, len(rows.rows), _BATCH_ROWS):
        batch = rows.rows[begin : begin + _BATCH_ROWS]
        encoded = encoder.rows([_spans_or_fault(renderer, row, faults) for row in batch])
        for row, (row_ids, row_learn) in zip(batch, encoded, strict=True):
            kept = sum(row_learn[:max_tokens])
            if row.number not in faults.refused:
                faults.judge(row, kept, sum(row_learn), len(row_ids) > max_tokens)
            lengths.append(min(len(row_ids), max_tokens))
            ids.append(np.array(row_ids[:max_tokens], dtype=np.int32))
            learn.append(np.array(row_learn[:max_tokens], dtype=np.bool_))
        if progress:
            progress(min(begin + _BATCH_ROWS, len(rows.rows)), len(rows.rows))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    talk = any(row.shape == "messages" for row in rows.rows)
    findings = [*template_findings(renderer, conversations=talk), *faults.findings(max_tokens, rows, renderer)]
    empty = np.zeros(0, dtype=np.int32)
    return np.concatenate([empty, *ids]), np.concatenate([empty.astype(bool), *learn]), starts, findings


def _spans_or_fault(renderer: Renderer, row: Row, faults: _Faults) -> list[Span]:
    try:
        return renderer.spans(row)
    except RowError as error:
        faults.refused[row.number] = error
        return []


class _Faults:
    """Rows whose targets are gone or cut, gathered over the pass."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.refused: dict[int, RowError] = {}
        self.masked: list[int] = []
        self.gone: list[tuple[int, int, int]] = []  # row number, targets left, targets before
        self.cut: list[tuple[int, int, int]] = []

    def judge(self, row: Row, kept: int, before: int, shortened: bool) -> None:
        if before == 0:
            self.masked.append(row.number)
        elif kept == 0:
            self.gone.append((row.number, kept, before))
        elif shortened and kept < before:
            self.cut.append((row.number, kept, before))

    def findings(self, max_tokens: int, rows: Rows, renderer: Renderer) -> Iterator[Finding]:
        where = Place(rows.name)
        yield from self._refused()
        if self.masked:
            many = f"{len(self.masked)} of {len(rows.rows)} rows"
            fix = ("Check data.answer_after: it must stand in the text exactly as written." if self.data.answer_after
                   else "End each conversation with an assistant turn.")  # fmt: skip
            yield self._row_error(
                "completion-mask-empty", f"nothing to learn in {many}: {_said(self.masked)}", fix, self.masked, where
            )
        if self.gone:
            numbers = [number for number, _, _ in self.gone]
            yield self._row_error(
                "response-fully-truncated",
                f"{len(numbers)} row(s) lose their whole answer at {max_tokens} tokens: {_shares(self.gone)}",
                "Raise data.max_tokens, shorten the prompts, or set data.skip_bad_rows: true.", numbers, where,
            )  # fmt: skip
        if self.cut:
            numbers = [number for number, _, _ in self.cut]
            yield Finding("response-truncated", "warning",
                          f"{len(numbers)} row(s) lose part of their answer at {max_tokens} tokens: {_shares(self.cut)}",
                          "Raise data.max_tokens, or shorten the rows; a cut answer has no stop token.",
                          tuple(numbers[:_ROWS_SAID]), len(numbers), where)  # fmt: skip
        if renderer.template_used and (numbers := renderer.template.unlike):
            yield Finding("generation-prompt-mismatch", "warning",
                          "the chat template opens an assistant turn otherwise than it writes one: what is learned begins at the content",
                          "Check that the template's generation prompt equals the header of its assistant turns.",
                          tuple(dict.fromkeys(numbers))[:_ROWS_SAID], len(set(numbers)), where)  # fmt: skip

    def _refused(self) -> Iterator[Finding]:
        by_code: dict[str, list[RowError]] = {}
        for error in self.refused.values():
            by_code.setdefault(error.code, []).append(error)
        for code, errors in by_code.items():
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            numbers = [error.row for error in errors]
            yield self._row_error(code, errors[0].problem + more, errors[0].fix, numbers, Place())

    def _row_error(self, code: str, message: str, fix: str, numbers: list[int], where: Place) -> Finding:
        # All numbers are named, not the first few: whoever leaves bad rows out needs them.
        return Finding(code, "error", message, fix, tuple(numbers), len(numbers), where)


def _said(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5]))
    return f"row(s) {shown}" + (" …" if len(numbers) > 5 else "")


def _shares(rows: Sequence[tuple[int, int, int]]) -> str:
    shown = ", ".join(f"row {number} ({kept} of {before} targets left)" for number, kept, before in rows[:5])
    return shown + (" …" if len(rows) > 5 else "")


def _limit_findings(data: Data, limit: int, lengths: NDArray[np.int64]) -> Iterator[Finding]:
    longest = int(lengths.max(initial=0))
    if data.max_tokens is None:
        yield Finding("max-tokens", "note", f"rows may have up to {limit:,} tokens, the model's own limit; the longest has {longest:,}",
                      "Set data.max_tokens for another.")  # fmt: skip
    elif data.max_tokens > limit and longest > limit:
        yield Finding("max-tokens-over-limit", "warning",
                      f"data.max_tokens is {data.max_tokens:,}, the model was made for {limit:,}; the longest row has {longest:,} tokens",
                      f"Set data.max_tokens to {limit} or less.")  # fmt: skip


# --- cache ---------------------------------------------------------------------------------------------------------


def _fingerprint(rows: Rows, tokenizer: PreTrainedTokenizerBase, data: Data, max_tokens: int) -> str:
    """SHA-256 over the rows, the tokenizer's whole state, the template and every option that changes ids or targets."""
    digest = hashlib.sha256()
    vocabulary = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    options = {
        "version": _VERSION, "rows": rows.fingerprint, "template": tokenizer.chat_template, "date": DATE.isoformat(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name != "pad_token"},
        "max_tokens": max_tokens, "learn": data.learn, "answer_after": data.answer_after, "special_text": data.special_text,
    }  # fmt: skip
    digest.update(vocabulary.encode("utf-8", "surrogatepass"))
    digest.update(json.dumps(options, sort_keys=True).encode())
    return digest.hexdigest()


def _read_cache(
    file: Path, fingerprint: str
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64], list[Finding]] | None:
    try:
        with np.load(file, allow_pickle=False) as stored:
            if stored["fingerprint"].item() != fingerprint:
                return None
            findings = [_finding(fields) for fields in json.loads(stored["findings"].item())]
            return stored["ids"], stored["learn"], stored["starts"], findings
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        return None  # absent, cut short or of another version: encode anew


def _write_cache(
    file: Path, fingerprint: str, ids: NDArray[Any], learn: NDArray[Any], starts: NDArray[Any], findings: list[Finding]
) -> None:
    said = json.dumps([asdict(finding) for finding in findings])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "wb") as out:
            np.savez(
                out, ids=ids, learn=learn, starts=starts, findings=np.array(said), fingerprint=np.array(fingerprint)
            )
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).replace(file)
    except OSError as error:
        raise DataError(
            f"the token cache {str(file.parent)!r} can't be written: {error}",
            "Free some disk, or choose another folder.",
        ) from None


def _finding(fields: dict[str, Any]) -> Finding:
    return Finding(**{**fields, "rows": tuple(fields["rows"]), "where": Place(**fields["where"])})
