"""`TokenFaults`: rows with nothing to learn, or whose answer is cut, gathered over a pass and said once each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from crosstune.data.render import Renderer
from crosstune.data.rows import Row
from crosstune.data.template import RowError
from crosstune.errors import Finding, Place
from crosstune.recipe.sections import Data

_ROWS_SAID = 20
# Keys of a turn that hold something to be learned or answered to; others (name, id, weight) say something about it.
_WRITTEN = ("tool_calls", "reasoning_content", "reasoning", "thinking")


class TokenFaults:
    """Rows whose targets are gone or cut, gathered over the pass."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.refused: dict[int, RowError] = {}
        self.masked: list[int] = []
        self.extras: dict[str, list[Row]] = {}  # rows whose turns carry this key besides role and content
        self.gone: list[tuple[int, int, int]] = []  # row number, targets left, targets before
        self.cut: list[tuple[int, int, int]] = []

    def judge(self, row: Row, kept: int, before: int, shortened: bool) -> None:
        if before == 0:
            self.masked.append(row.number)
        elif kept == 0:
            self.gone.append((row.number, kept, before))
        elif shortened and kept < before:
            self.cut.append((row.number, kept, before))

    def look(self, row: Row) -> None:
        """Remember the keys that a template may fail to write."""
        for turn in row.turns:
            for key in turn.extra:
                if key in _WRITTEN and (not self.extras.get(key) or self.extras[key][-1] is not row):
                    self.extras.setdefault(key, []).append(row)

    def findings(self, max_tokens: int, renderer: Renderer, *, name: str, num_rows: int) -> Iterator[Finding]:
        """What there is to say about `num_rows` rows of the source `name`."""
        where = Place(name)
        yield from self._refused()
        if self.masked:
            many = f"{len(self.masked)} of {num_rows} rows"
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
                          f"{len(numbers)} row(s) lose part of their answer at {max_tokens} tokens: "
                          f"{_shares(self.cut)}",
                          "Raise data.max_tokens, or shorten the rows; a cut answer has no stop token.",
                          tuple(numbers[:_ROWS_SAID]), len(numbers), where)  # fmt: skip
        yield from self._unwritten(renderer, where)
        if renderer.template_used and (numbers := renderer.template.unlike):
            yield Finding("generation-prompt-mismatch", "warning",
                          "the chat template opens an assistant turn otherwise than it writes one: what is "
                          "learned begins at the content",
                          "Check that the template's generation prompt equals the header of its assistant turns.",
                          tuple(dict.fromkeys(numbers))[:_ROWS_SAID], len(set(numbers)), where)  # fmt: skip

    def _unwritten(self, renderer: Renderer, where: Place) -> Iterator[Finding]:
        """Tool calls and thoughts that the template leaves out: the model would learn an answer without them."""
        for key, rows in self.extras.items():
            numbers = [row.number for row in rows]
            if renderer.ignored(rows[0], key):
                # Templates that think leave the thoughts of earlier turns out on purpose: no more than a warning.
                yield Finding("unsupported-field", "error" if key == "tool_calls" else "warning",
                              f"the chat template writes nothing of {key}, which {len(rows)} row(s) have: "
                              f"{_said(numbers)}",
                              f"Use a chat template that writes {key}, or remove it from the rows.",
                              tuple(numbers), len(numbers), where)  # fmt: skip

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


def limit_findings(data: Data, limit: int, lengths: NDArray[np.int64]) -> Iterator[Finding]:
    longest = int(lengths.max(initial=0))
    if data.max_tokens is None:
        yield Finding("max-tokens", "note", f"rows may have up to {limit:,} tokens, the model's own limit; the "
                                            f"longest has {longest:,}",
                      "Set data.max_tokens for another.")  # fmt: skip
    elif data.max_tokens > limit and longest > limit:
        yield Finding("max-tokens-over-limit", "warning",
                      f"data.max_tokens is {data.max_tokens:,}, the model was made for {limit:,}; the longest "
                      f"row has {longest:,} tokens",
                      f"Set data.max_tokens to {limit} or less.")  # fmt: skip
