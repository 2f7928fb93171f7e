"""The pass over the rows: every check of one row, and what must be kept of it for the checks of all rows together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from crosstune.data.lint.balance import Labels, Languages
from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.duplicates import Conflicts, Duplicates, NearDuplicates
from crosstune.data.lint.kept import check_big_integers, check_words_kept
from crosstune.data.lint.lengths import Lengths
from crosstune.data.lint.marks import Marks
from crosstune.data.lint.report import Collector
from crosstune.data.lint.text import TEXT_CHECKS, Parts, check_empty_prompt, check_empty_response, parts_of
from crosstune.data.lint.turns import check_turns
from crosstune.data.load import Row
from crosstune.errors import Finding
from crosstune.recipe.sections import Data


class RowPass:
    """Takes the rows in batches; knows nothing of tokens."""

    def __init__(self, file: str, data: Data, collector: Collector, marks: Marks, *, label: str | None = None) -> None:
        self.data, self.collector, self.marks = data, collector, marks
        self.is_csv = file.lower().endswith((".csv", ".tsv"))
        self.learn_all = data.learn == "all"
        self.num_rows = 0
        self.duplicates, self.near, self.conflicts = Duplicates(file), NearDuplicates(file), Conflicts(file)
        self.labels, self.languages = Labels(file, label), Languages(file)
        self.lengths: Lengths | None = Lengths(file)  # None: a tokenizer knows better

    def add(self, rows: Sequence[Row]) -> None:
        """Check some thousand rows: the needles of each check are looked for in all their text at once."""
        all_parts = [parts_of(row) for row in rows]
        text = "\n".join([text for parts in all_parts for _, _, text in parts])
        checks = [check.check for check in TEXT_CHECKS if check.may_find(text)]
        if self.marks.may_find(text):
            checks.append(self.marks.check)
        add = self.collector.add
        for row, parts in zip(rows, all_parts, strict=True):
            if row.shape == "messages":
                add(check_turns(row, learn_all=self.learn_all) if row.turns else check_empty_conversation(row))
            if not all(text and not text.isspace() for _, _, text in parts):
                add(check_empty_response(row, parts))
                add(check_empty_prompt(row, parts))
            for check in checks:
                add(check(row, parts))
            if self.is_csv:
                add(check_words_kept(row, parts))
            if parts:
                self._keep(row, parts)
        self.num_rows += len(rows)

    def _keep(self, row: Row, parts: Parts) -> None:
        self.duplicates.add(row)
        self.near.add(row, self.duplicates.normal[-1])
        self.conflicts.add(row)
        if row.columns:
            self.labels.add(row)
            self.collector.add(check_big_integers(row))
        if self.languages.is_listening:
            self.languages.add(row.number, " ".join(text for _, role, text in parts if role != "system"))
        if self.lengths is not None:
            self.lengths.add(row.number, sum(len(text) for _, _, text in parts))

    def finish(self) -> None:
        """What only all rows together show."""
        for kept in (self.duplicates, self.near, self.conflicts, self.labels, self.languages, self.lengths):
            if kept is not None:
                self.collector.add(kept.findings())


def check_empty_conversation(row: Row) -> Iterator[Finding]:
    """No turn at all."""
    where = replace(row.where, field="messages")
    yield FAULTS["empty-conversation"].found("the conversation has no turn", [row.number], where)
