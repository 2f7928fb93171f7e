"""`Fault`: what one finding code means. Feeds the findings' severity and fix, the documentation and its tests.

Knows nothing of how a fault is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosstune.errors import Finding, Place, Severity


@dataclass(frozen=True, slots=True)
class Fault:
    """One code. `bad` is the smallest input that has the fault, `good` the same input put right.

    Both are the text of `file`: rows, lines of a recipe (.yaml), a chat template (.jinja), or, where `file` is empty, a
    description. `under` are recipe overrides that they are read with, `given` what else each is read with, in words.
    """

    code: str
    severity: Severity
    title: str
    why: str
    fix: str
    bad: str | bytes = ""
    good: str | bytes = ""
    under: tuple[str, ...] = ()
    given: tuple[str, str] = ("", "")
    file: str = "rows.jsonl"
    source: str = ""

    def found(
        self,
        message: str,
        rows: Sequence[int] = (),
        where: Place | None = None,
        *,
        fix: str = "",
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this code. `severity` only where the same fault weighs less in some settings."""
        return Finding(
            code=self.code,
            severity=severity or self.severity,
            message=message,
            fix=fix or self.fix,
            rows=tuple(rows),
            count=len(rows),
            where=where or Place(),
        )
