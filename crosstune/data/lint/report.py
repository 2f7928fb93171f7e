"""Findings gathered: `Collector` keeps them few while the rows stream by, `LintReport` shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from crosstune.data.lint.catalogue import FAULTS
from crosstune.errors import EXIT_REFUSED, Finding, Place, Refused

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_SINGLY = 100  # findings of one code and severity kept one by one; the rest become one finding with a count
SEVERITIES = ("error", "warning", "note")
COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
SHOWN_EXAMPLES = 2
MOST_ROWS = 1000  # row numbers written for one finding; `count` has the true number


class Collector:
    """Takes any number of findings in bounded memory."""

    def __init__(self) -> None:
        self._kept: list[Finding] = []
        self._more: dict[tuple[str, str], list[Any]] = {}  # (code, severity) → [first finding beyond, rows, count]
        self._seen: dict[tuple[str, str], int] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            key = (finding.code, finding.severity)
            self._seen[key] = seen = self._seen.get(key, 0) + 1
            if seen <= SHOWN_SINGLY:
                self._kept.append(finding)
                continue
            if key not in self._more:
                self._more[key] = [finding, [], 0]
            rest = self._more[key]
            rest[1] += finding.rows
            rest[2] += finding.count or len(finding.rows) or 1

    def findings(self) -> tuple[Finding, ...]:
        """All findings: errors first, in the catalogue's order within a severity, then by row."""
        found = list(self._kept)
        for (code, severity), (first, rows, count) in self._more.items():
            message = f"{self._seen[code, severity] - SHOWN_SINGLY} more of this kind, the first: {first.message}"
            found.append(replace(first, message=message, rows=tuple(rows), count=count, where=Place(first.where.file)))
        places = {code: place for place, code in enumerate(FAULTS)}
        found.sort(key=lambda f: (SEVERITIES.index(f.severity), places.get(f.code, len(places)), f.code))
        return tuple(found)


@dataclass(frozen=True)
class LintReport:
    """What lint found in a data set or recipe. `allowed` codes are listed, and stop nothing."""

    findings: tuple[Finding, ...]
    source: str = ""
    num_rows: int = 0
    allowed: tuple[str, ...] = ()
    left_out: frozenset[int] = field(default=frozenset(), repr=False)  # rows that data.skip_bad_rows leaves out

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Errors that stop a run: those whose code isn't allowed."""
        return tuple(f for f in self.findings if f.severity == "error" and f.code not in self.allowed)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.severity == "note")

    @property
    def allowed_errors(self) -> tuple[Finding, ...]:
        """Errors overridden by name: what a journal must hold."""
        return tuple(f for f in self.findings if f.severity == "error" and f.code in self.allowed)

    @property
    def exit_code(self) -> int:
        return EXIT_REFUSED if self.errors else 0

    def refuse(self) -> None:
        """Raise `Refused` with all errors, if there are any."""
        if self.errors:
            raise Refused(self.errors)

    def rows(self, code: str) -> tuple[int, ...]:
        """All row numbers named by findings of this code, in order, each once."""
        return tuple(sorted({row for finding in self.findings if finding.code == code for row in finding.rows}))

    def to_json_lines(self) -> str:
        """One JSON object a finding and line."""
        return "".join(
            json.dumps(as_json(finding, self.allowed), ensure_ascii=False) + "\n" for finding in self.findings
        )

    def show(self, console: Console | None = None) -> None:
        """A table for people: findings by code, with counts and two examples each."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = console or Console()
        if self.findings:
            table = Table(show_lines=True, expand=False)
            for heading in ("finding", "rows", "examples, and what to do"):
                table.add_column(heading, overflow="fold")
            for (severity, code), group in grouped(self.findings):
                name = Text(f"{severity}\n", style=COLOURS[severity]).append(code, style="bold")
                if code in self.allowed:
                    name.append("\nallowed", style="dim")
                table.add_row(name, Text(rows_words(group)), Text(_examples(group)))
            console.print(table)
        console.print(Text(self.summary()))

    def lines(self) -> Iterator[str]:
        """One line a code, for a log: `warning duplicate-rows (5: 1, 9, 3, 7, 11): rows 1 and 9 are equal`."""
        for (severity, code), group in grouped(self.findings):
            rows = f" ({rows_words(group)})" if group[0].rows else ""
            allowed = " (allowed)" if severity == "error" and code in self.allowed else ""
            yield f"{severity} {code}{allowed}{rows}: {group[0].message}"

    def summary(self) -> str:
        """`2 errors, 1 warning, 3 notes in 5,000 rows of rows.jsonl`."""
        counts = ((len(self.errors), "error"), (len(self.warnings), "warning"), (len(self.notes), "note"))
        words = ", ".join(f"{n:,} {name}{'' if n == 1 else 's'}" for n, name in counts)
        allowed = f", {len(self.allowed_errors):,} allowed" if self.allowed_errors else ""
        return f"{words}{allowed} in {self.num_rows:,} row{'' if self.num_rows == 1 else 's'} of {self.source}"


def as_json(finding: Finding, allowed: Sequence[str] = ()) -> dict[str, Any]:
    """A finding as plain values. `where` holds only what is known."""
    place = finding.where
    where = {"file": place.file, "line": place.line, "column": place.column, "byte": place.byte, "field": place.field}
    out: dict[str, Any] = {
        "code": finding.code,
        "severity": finding.severity,
        "rows": list(finding.rows[:MOST_ROWS]),
        "count": finding.count or len(finding.rows),
        "where": {name: value for name, value in where.items() if value not in (None, "")},
        "message": finding.message,
        "fix": finding.fix,
    }
    if finding.code in allowed and finding.severity == "error":
        out["allowed"] = True
    return out


def grouped(findings: Iterable[Finding]) -> Iterator[tuple[tuple[str, str], list[Finding]]]:
    """Findings by severity and code, in the order of their first."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    yield from groups.items()


def rows_words(findings: Sequence[Finding]) -> str:
    """`12: 3, 7, 11, …`: the true count, and the first row numbers."""
    numbers = [row for finding in findings for row in finding.rows]
    count = sum(finding.count or len(finding.rows) for finding in findings)
    if not numbers:
        return f"{count:,}" if count else "–"
    more = ", …" if count > 8 else ""
    return f"{count:,}: " + ", ".join(str(number) for number in numbers[:8]) + more


def _examples(findings: Sequence[Finding]) -> str:
    lines = []
    for finding in findings[:SHOWN_EXAMPLES]:
        place = str(replace(finding.where, file=""))
        lines.append(f"{place}: {finding.message}" if place else finding.message)
    fixes = dict.fromkeys(finding.fix for finding in findings[:SHOWN_EXAMPLES])
    return "\n".join(lines + [f"→ {fix}" for fix in fixes])
