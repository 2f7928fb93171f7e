"""Metrics by name, as `evaluate.metrics` in the recipe names them. Plain strings and arrays; no torch.

Three kinds, by what they need: `loss` (the lane's own forward pass), `text` (generated answers), `choice` (a
probability for each label).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from crosstune.errors import RecipeError, first_line
from crosstune.metrics import choice, text

Kind = Literal["loss", "text", "choice"]
ANY = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `row`: one number for one row, averaged; `whole`: one number for all rows at once.

    `rows`: of a choice, each row's number, where the metric is their mean. `limits`: the least and the most it can be.
    """

    name: str
    kind: Kind
    higher_is_better: bool
    description: str
    row: Callable[[str, str], float] | None = None
    whole: Callable[[Any, Any], Any] | None = None
    rows: Callable[[Any, Any], NDArray[np.float64]] | None = None
    limits: tuple[float, float] = ANY

    def by_row(self, predicted: Sequence[str], wanted: Sequence[str]) -> NDArray[np.float64] | None:
        """Each row's own score, where the metric has one."""
        if self.row is None:
            return None
        return np.array([self.row(one, two) for one, two in zip(predicted, wanted, strict=True)], dtype=np.float64)

    def of_texts(self, predicted: Sequence[str], wanted: Sequence[str]) -> float:
        """The score of generated answers. nan without rows."""
        assert self.kind == "text", self.name
        if not predicted:
            return math.nan
        if (rows := self.by_row(predicted, wanted)) is not None:
            return float(rows.mean())
        assert self.whole is not None
        return _as_score(self.name, self.whole(list(predicted), list(wanted)), len(predicted))

    def of_chances(self, labels: NDArray[np.intp], chances: NDArray[np.float64]) -> float:
        """The score of label probabilities. nan without rows."""
        assert self.kind == "choice" and self.whole is not None, self.name
        return float(self.whole(labels, chances)) if len(labels) else math.nan


def _as_score(name: str, value: Any, rows: int) -> float:
    """A user's function may give one number, or one a row."""
    scores = np.asarray(value, dtype=np.float64)
    if scores.shape not in ((), (rows,)):
        raise RecipeError(
            f"the metric {name} gave an array of shape {scores.shape} for {rows} rows",
            "Return one number, or one number a row.",
        )
    return float(scores.mean())


def _first_line(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def _loss(name: str, higher: bool, limits: tuple[float, float], description: str) -> Metric:
    return Metric(name, "loss", higher, description, limits=limits)


def _row(name: str, function: Callable[[str, str], float]) -> Metric:
    return Metric(name, "text", True, _first_line(function), row=function, limits=(0.0, 1.0))


def _corpus(name: str, function: Callable[[Sequence[str], Sequence[str]], float]) -> Metric:
    return Metric(name, "text", True, _first_line(function), whole=function, limits=(0.0, 100.0))


def _choice(
    name: str,
    function: Callable[[Any, Any], float],
    rows: Callable[[Any, Any], NDArray[np.float64]] | None = None,
    *,
    higher: bool = True,
    limits: tuple[float, float] = (0.0, 1.0),
) -> Metric:
    return Metric(name, "choice", higher, _first_line(function), whole=function, rows=rows, limits=limits)


METRICS = {
    metric.name: metric
    for metric in (
        _loss(
            "loss",
            False,
            (0.0, math.inf),
            "Mean −log probability of a target token, over all target tokens of the held-out rows.",
        ),
        _loss("perplexity", False, (1.0, math.inf), "exp(loss)."),
        _loss("token_accuracy", True, (0.0, 1.0), "Share of target tokens that are the model's first choice."),
        _row("exact_match", text.exact_match),
        _row("normalized_match", text.normalized_match),
        _row("token_f1", text.token_f1),
        _row("rouge1", text.rouge1),
        _row("rouge2", text.rouge2),
        _row("rougeL", text.rouge_l),
        _corpus("bleu", text.bleu),
        _corpus("chrf", text.chrf),
        _row("json_valid", text.json_valid),
        _row("json_fields", text.json_fields),
        _row("numeric_match", text.numeric_match),
        _choice("accuracy", choice.accuracy, choice.right_by_row),
        _choice("balanced_accuracy", choice.balanced_accuracy),
        _choice("macro_f1", choice.macro_f1),
        _choice("micro_f1", choice.micro_f1, choice.right_by_row),
        _choice("mcc", choice.mcc, limits=(-1.0, 1.0)),
        _choice("log_loss", choice.log_loss, choice.log_loss_by_row, higher=False, limits=(0.0, math.inf)),
        _choice("roc_auc", choice.roc_auc),
        _choice("brier", choice.brier, choice.brier_by_row, higher=False, limits=(0.0, 2.0)),
        _choice("ece", choice.ece, higher=False),
    )
}


def find_metric(name: str) -> Metric:
    """The metric of that name; `module:function` or `file.py:function` names a function of your own.

    Such a function takes two lists, what the model wrote and what the rows hold, and returns one number, or one a row;
    higher is better unless it has an attribute `higher_is_better = False`.
    """
    if name in METRICS:
        return METRICS[name]
    if ":" in name:
        return from_function(_load_function(name), name=name)
    plain = {known.lower(): known for known in METRICS}
    near = [plain[found] for found in difflib.get_close_matches(name.lower(), plain, n=2, cutoff=0.5)]
    near = near or [known for known in METRICS if name in known]
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(METRICS)}; or file.py:function."
    raise RecipeError(f"evaluate.metrics: unknown metric {name!r}", hint)


def limits_of(name: str) -> tuple[float, float]:
    """The least and the most that a metric can be; a function of your own may be anything."""
    return METRICS[name].limits if name in METRICS else ANY


def find_metrics(names: Sequence[str]) -> tuple[Metric, ...]:
    """All of them, or one `RecipeError` that names every mistake."""
    found, mistakes = [], []
    for name in names:
        try:
            found.append(find_metric(name))
        except RecipeError as error:
            mistakes.append(error)
    if mistakes:
        raise RecipeError(
            "\n  ".join(error.problem for error in mistakes), " ".join(dict.fromkeys(error.fix for error in mistakes))
        )
    return tuple(found)


def from_function(function: Callable[[list[str], list[str]], Any], *, name: str | None = None) -> Metric:
    """A Python function as a metric of generated text."""
    higher = bool(getattr(function, "higher_is_better", True))
    return Metric(name or function.__name__, "text", higher, _first_line(function), whole=function)


def _load_function(name: str) -> Callable[..., Any]:
    where, _, what = name.rpartition(":")
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            spec = importlib.util.spec_from_file_location(f"crosstune_metric_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except (ImportError, OSError, SyntaxError) as error:
        raise RecipeError(f"evaluate.metrics: {where!r} can't be loaded: {error}", "Give file.py:function.") from None
    except Exception as error:  # the user's own lines run here, and may raise anything
        raise RecipeError(
            f"evaluate.metrics: {where!r} can't be loaded: {type(error).__name__}: {first_line(error)}",
            "Mend that file: it is imported as it is.",
        ) from None
    if what not in vars(module):
        raise RecipeError(f"evaluate.metrics: {where} has no {what!r}", "Give file.py:function.")
    function = vars(module)[what]
    if not callable(function):
        raise RecipeError(f"evaluate.metrics: {name} is not a function", "Give file.py:function.")
    return function  # type: ignore[no-any-return]
