"""Cross-validated LoRA fine-tuning: the base loaded once, every fold an adapter, all folds trained together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crosstune.crossval import cross_validate
    from crosstune.data.lint import LintReport, lint
    from crosstune.deploy import average, merge
    from crosstune.errors import CrosstuneError
    from crosstune.export.answer import generate
    from crosstune.fitting.fit import fit
    from crosstune.memory.explain import plan
    from crosstune.nested import nested_cross_validate
    from crosstune.recipe.recipe import Recipe
    from crosstune.report.report import write_report
    from crosstune.results.result import Result

__version__ = "0.1.0"
__all__ = [
    "CrosstuneError",
    "LintReport",
    "Recipe",
    "Result",
    "average",
    "cross_validate",
    "fit",
    "generate",
    "lint",
    "merge",
    "nested_cross_validate",
    "plan",
    "write_report",
]

# Names are imported when they are first used, so that `import crosstune` and `crosstune --help` load nothing.
_HOMES = {
    "CrosstuneError": "errors",
    "LintReport": "data.lint",
    "Recipe": "recipe.recipe",
    "Result": "results.result",
    "average": "deploy",
    "cross_validate": "crossval",
    "fit": "fitting.fit",
    "generate": "export.answer",
    "lint": "data.lint",
    "merge": "deploy",
    "nested_cross_validate": "nested",
    "plan": "memory.explain",
    "write_report": "report.report",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"crosstune.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'crosstune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
