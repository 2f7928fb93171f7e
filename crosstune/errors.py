"""Every way crosstune refuses, and `Finding`: something wrong with the input, listed rather than raised.

CrosstuneError              problem + fix; exit code 2 unless said otherwise
├── RecipeError             the recipe or an option
├── DataError               rows, files, columns, folds
├── ModelError              base model, tokenizer, adapter
├── DeviceError             GPU, precision, memory
├── RunError                the run folder, its journal, its lock
├── MissingExtra            an optional package; names the install command
├── Refused                 findings of severity "error", all at once
└── LaneFailed              training started and at least one lane failed; exit code 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
EXIT_REFUSED = 2
EXIT_LANE_FAILED = 3


class CrosstuneError(Exception):
    """Something the user can put right: what is wrong, and what to do."""

    exit_code = EXIT_REFUSED

    def __init__(self, problem: str, fix: str) -> None:  # positional: exceptions are rebuilt from args by pickle
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.fix}"


class RecipeError(CrosstuneError):
    """The recipe, an override or a keyword is wrong."""


class DataError(CrosstuneError):
    """The rows can't be read, or can't be split as asked."""


class ModelError(CrosstuneError):
    """The base model, its tokenizer or an adapter can't be used as asked."""


class DeviceError(CrosstuneError):
    """The device, its precision or its memory can't do what was asked."""


class RunError(CrosstuneError):
    """The run folder belongs to another recipe, is locked, or is damaged."""


class LaneFailed(CrosstuneError):
    """Training started and at least one lane failed; the others are finished and saved."""

    exit_code = EXIT_LANE_FAILED


class MissingExtra(CrosstuneError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"the package {package!r} is not installed", f"Install it: pip install 'crosstune[{extra}]'")
        self.args = (package, extra)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding lies: any part may be unknown. `line` and `column` are counted from 1, `byte` from 0."""

    file: str = ""
    line: int | None = None
    column: int | None = None
    byte: int | None = None
    field: str = ""

    def __str__(self) -> str:
        parts = [self.file] if self.file else []
        numbers = {"line": self.line, "column": self.column, "byte": self.byte}
        parts += [f"{name} {value}" for name, value in numbers.items() if value is not None]
        parts += [self.field] if self.field else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with the input. `rows` are row numbers counted from 1 (capped; `count` is the true number)."""

    code: str
    severity: Severity
    message: str
    fix: str
    rows: tuple[int, ...] = ()
    count: int = 0
    where: Place = field(default_factory=Place)

    def __str__(self) -> str:
        place = f" ({self.where})" if str(self.where) else ""
        return f"{self.severity} {self.code}{place}: {self.message}\n  {self.fix}"


class Refused(CrosstuneError):
    """Findings that stop a run before anything is trained."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        errors = [finding for finding in findings if finding.severity == "error"]
        super().__init__(
            "\n".join(str(finding) for finding in errors), f"{len(errors)} error(s) found; nothing was trained."
        )
        self.args = (tuple(findings),)
        self.findings = tuple(findings)


def refuse(findings: Sequence[Finding]) -> None:
    """Raise `Refused` if any finding is an error. Warnings and notes pass."""
    if any(finding.severity == "error" for finding in findings):
        raise Refused(findings)


def first_line(error: BaseException) -> str:
    """The first line of another library's message: the rest is advice about its own options."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def hub_fix(error: BaseException, otherwise: str) -> str:
    """What to do where the hub didn't give a model: `otherwise`, but where it said why."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    said: BaseException | None = error
    while said is not None:
        if isinstance(said, GatedRepoError):
            return "Ask for access on the model's page, then log in on this computer: hf auth login."
        if isinstance(said, RepositoryNotFoundError):
            return f"Check the spelling; if the model is private, log in: hf auth login. {otherwise}"
        if isinstance(said, RevisionNotFoundError):
            return "Check model.revision: a branch, tag or commit of that model; without it, the main branch is taken."
        if isinstance(said, HfHubHTTPError) and said.response.status_code == 401:
            return "The hub doesn't accept this computer's token (expired, or mistyped in HF_TOKEN): hf auth login."
        if isinstance(said, LocalEntryNotFoundError):
            return "Check the connection, or download the model where there is one (hf download) and give its folder."
        said = said.__cause__
    return otherwise
