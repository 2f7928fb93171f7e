"""Everything wrong with a data set, a recipe or the model's tokenizer, found before training and listed by row.

`lint` passes over the rows once; `LintReport` holds the findings. `catalogue.py` has every code with its reason and
fix, and docs/findings.md is written from it.
"""

from crosstune.data.lint.onepass import lint, lint_rows
from crosstune.data.lint.report import LintReport

__all__ = ["LintReport", "lint", "lint_rows"]
