"""`Encoder`: spans → ids and targets of rows. Spans are encoded apart; each different text is encoded once a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crosstune.data.render import Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
