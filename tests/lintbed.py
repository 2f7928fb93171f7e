"""A place to lint in: tiny models by name, made once, and the findings of a file as `{code: rows}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.data.lint import LintReport, lint
from crosstune.recipe.sections import Data
from tests.tiny import make_tiny

# Findings that any data set under the tiny model has: the shape that was told, the pad token that was chosen, 384
# embedding rows for 369 entries, the length limit.
ALWAYS = {"shape", "pad-chosen", "vocabulary-below-embedding", "max-tokens"}
VARIANTS: dict[str, dict[str, Any]] = {
    "instruct": {},
    "base": {"variant": "base"},
    "genprompt": {"variant": "genprompt"},
    "notemplate": {"variant": "notemplate"},
    "untrained": {"variant": "base", "zero_rows": (366, 367, 368)},
}


def tiny_models(folder: Path) -> dict[str, Path]:
    """One folder a variant."""
    return {name: make_tiny(folder / name, **options) for name, options in VARIANTS.items()}


def found(report: LintReport, *severities: str) -> dict[str, tuple[int, ...]]:
    """Codes and all rows that they name, those that are always there left out."""
    wanted = severities or ("error", "warning", "note")
    codes = dict.fromkeys(f.code for f in report.findings if f.severity in wanted and f.code not in ALWAYS)
    return {code: report.rows(code) for code in codes}


def lint_file(path: Path, model: Path | None = None, options: Mapping[str, Any] | None = None) -> LintReport:
    """Lint a file; `options` are those of the data section."""
    return lint(path, model=str(model) if model else None, data=Data(path=str(path), **(options or {})))


def write_rows(folder: Path, *rows: Mapping[str, Any]) -> Path:
    """A file of these rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
