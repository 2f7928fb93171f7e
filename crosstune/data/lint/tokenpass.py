"""The rows under a tokenizer: what the chat template refuses, what max_tokens cuts, which control tokens are used.

Rows come in batches, as in `rowpass`; their ids are looked at and forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.lengths import Lengths
from crosstune.data.lint.report import Collector
from crosstune.data.load import Row
from crosstune.data.render import Renderer, Span, template_findings
from crosstune.data.template import RowError
from crosstune.data.token_faults import TokenFaults, limit_findings
from crosstune.data.tokens import Encoder
from crosstune.errors import Finding, ModelError, Place
from crosstune.recipe.sections import Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Under 0.1% a stray symbol is meant; above it a script is missing, or the tokenizer isn't the model's.
UNKNOWN_SHARE = 0.001
SEAM_CHARACTERS = 24  # no token of a word-based pre-tokenizer reaches farther over the seam in practice


class TokenPass:
    """Takes the rows in batches."""

    def __init__(
        self, file: str, tokenizer: PreTrainedTokenizerBase, data: Data, collector: Collector, *, limit: int
    ) -> None:
        self.file, self.tokenizer, self.data, self.collector = file, tokenizer, data, collector
        self.renderer, self.encoder, self.faults = Renderer(tokenizer, data), Encoder(tokenizer), TokenFaults(data)
        self.limit, self.max_tokens = limit, data.max_tokens or limit
        self.lengths = Lengths(file, unit="tokens")
        self.used = UsedTokens(file, tokenizer)
        self.seams = Seams(file, tokenizer)
        self.num_rows = self.longest = 0
        self._no_template = False

    def add(self, rows: Sequence[Row]) -> None:
        """Render and encode some thousand rows."""
        spans = [self._spans(row) for row in rows]
        for row, parts, (ids, learn) in zip(rows, spans, self.encoder.rows([s or [] for s in spans]), strict=True):
            if parts is None:
                continue
            before, kept = sum(learn), sum(learn[: self.max_tokens])
            self.faults.judge(row, kept, before, len(ids) > self.max_tokens)
            self.faults.look(row)
            self.lengths.add(row.number, min(len(ids), self.max_tokens))
            self.longest = max(self.longest, len(ids))
            self.used.add(row.number, ids)
        self.seams.add(row for row in rows if row.shape == "prompt")
        self.num_rows += len(rows)

    def _spans(self, row: Row) -> list[Span] | None:
        talk, learn_all = row.shape == "messages", self.data.learn == "all"
        unanswered = talk and all(turn.role != "assistant" for turn in row.turns)  # told by the check of its turns
        if (talk and self._no_template) or (unanswered and not learn_all):
            return None
        try:
            return self.renderer.spans(row)
        except RowError as error:
            self.faults.refused[row.number] = error
        except ModelError as error:
            self._no_template = True
            code = "no-template" if not self.tokenizer.chat_template else "template-error"
            self.collector.add([FAULTS[code].found(error.problem, [row.number], Place(self.file), fix=error.fix)])
        return None

    def finish(self) -> None:
        """What only all rows together show."""
        add = self.collector.add
        add(template_findings(self.renderer, conversations=self.has_conversations))
        add(self.faults.findings(self.max_tokens, self.renderer, name=self.file, num_rows=self.num_rows))
        add(limit_findings(self.data, self.limit, np.array([self.longest])))
        for kept in (self.lengths, self.used, self.seams):
            add(kept.findings())

    @property
    def has_conversations(self) -> bool:
        """Whether the chat template was used."""
        return self.renderer.template_used


class UsedTokens:
    """Which control tokens the rows use, and how many tokens the tokenizer doesn't know."""

    def __init__(self, file: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.file = file
        self.special = np.array(sorted({i for i, token in tokenizer.added_tokens_decoder.items() if token.special}))
        unknown = tokenizer.unk_token_id
        # Some tokenizers use one token for unknown text and for the end (GPT-2); that one tells nothing.
        self.unknown = None if unknown in (None, tokenizer.eos_token_id, tokenizer.bos_token_id) else int(unknown)
        self.ids: set[int] = set()
        self.num_tokens = self.num_unknown = 0
        self.unknown_rows: list[int] = []
        self.highest = -1

    def add(self, row_number: int, ids: Sequence[int]) -> None:
        if not len(ids):
            return
        array = np.asarray(ids)
        self.num_tokens += len(array)
        self.highest = max(self.highest, int(array.max()))
        if len(self.special):
            self.ids.update(array[np.isin(array, self.special)].tolist())
        if self.unknown is not None and (count := int((array == self.unknown).sum())):
            self.num_unknown += count
            self.unknown_rows.append(row_number)

    def findings(self) -> Iterator[Finding]:
        if self.num_unknown:
            share = self.num_unknown / self.num_tokens
            message = f"{self.num_unknown:,} of {self.num_tokens:,} tokens ({share:.2%}) are the unknown token"
            severity = None if share >= UNKNOWN_SHARE else "note"
            yield FAULTS["unknown-tokens"].found(message, self.unknown_rows, Place(self.file), severity=severity)  # type: ignore[arg-type]


class Seams:
    """Rows whose prompt and completion would be cut otherwise where they meet, were they encoded together."""

    def __init__(self, file: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.file, self.tokenizer = file, tokenizer
        self.rows: list[int] = []
        self.example = ""
        self.looked_at = 0

    def add(self, rows: Iterable[Row]) -> None:
        pairs = [(row.number, row.prompt[-SEAM_CHARACTERS:], row.completion[:SEAM_CHARACTERS]) for row in rows]
        pairs = [pair for pair in pairs if pair[1] and pair[2]]
        if not pairs:
            return
        self.looked_at += len(pairs)
        before, after, both = (
            self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            for texts in ([p for _, p, _ in pairs], [c for _, _, c in pairs], [p + c for _, p, c in pairs])
        )
        for (number, prompt, completion), left, right, joined in zip(pairs, before, after, both, strict=True):
            if left + right != joined:
                self.rows.append(number)
                self.example = self.example or f"{prompt[-8:]!r} + {completion[:8]!r}"

    def findings(self) -> Iterator[Finding]:
        if self.rows:
            message = f"in {len(self.rows):,} of {self.looked_at:,} rows the two would merge: {self.example}"
            yield FAULTS["seam-merge"].found(message, self.rows, Place(self.file))
