"""What was asked → rows, tokenizer and tokens: all that can be refused before a model is loaded or a folder written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.data.lint import lint_rows
from crosstune.data.load import Rows, load_rows
from crosstune.data.tokenizer import ReadyTokenizer, longest_row, ready_tokenizer
from crosstune.data.tokens import Tokens, tokenize
from crosstune.errors import refuse
from crosstune.memory.shape import ModelShape
from crosstune.progress import Progress, stage
from crosstune.recipe.asked import Asked
from crosstune.results.suspects import read_row_numbers


@dataclass(frozen=True)
class Inputs:
    """Rows as they are trained on, encoded; the tokenizer with its padding and stop tokens; the model's sizes."""

    rows: Rows
    tokens: Tokens
    tokenizer: Any
    shape: ModelShape
    config: Mapping[str, Any]  # the model's config.json


def read_asked_rows(asked: Asked, progress: Progress) -> Rows:
    """The rows that were asked for, less those of data.exclude."""
    data = asked.recipe.data
    rows = load_rows(asked.source, data)
    if data.exclude is not None:
        gone = read_row_numbers(data.exclude)
        rows = rows.without(gone)
        progress.say(f"{data.exclude}: {len(gone)} rows left out")
    progress.say(f"{rows.name}: {len(rows)} rows, shape {rows.shape}")
    return rows


def judge(asked: Asked, rows: Rows, progress: Progress, *, has_folds: bool = True) -> Inputs:
    """Lint rows, tokenizer, folds and settings; encode the rows. Raises `Refused` with every error found.

    `has_folds` False: a fit on all rows, for which the recipe's folds don't count.
    """
    recipe = asked.recipe
    config = _config(asked)
    ready = ready_tokenizer(recipe.model, asked.tokenizer, stops=asked.stop_ids)
    report = lint_rows(rows, recipe, tokenizer=ready, splitter=asked.splitter, has_folds=has_folds, progress=progress)
    for line in report.lines():
        if not line.startswith("error") or "(allowed)" in line:
            progress.say(line)
    report.refuse()
    rows = rows.without(report.left_out)
    tokens = _encode(rows, ready, asked, config, progress)
    refuse([finding for finding in tokens.findings if finding.code not in recipe.lint.allow])
    return Inputs(rows, tokens, ready.tokenizer, ModelShape.from_config(config), config)


def _config(asked: Asked) -> dict[str, Any]:
    if asked.model is not None:
        return dict(asked.model.config.to_dict())
    from crosstune.model.base import load_config

    return load_config(asked.recipe.model)


def _encode(rows: Rows, ready: ReadyTokenizer, asked: Asked, config: Mapping[str, Any], progress: Progress) -> Tokens:
    limit, done = longest_row(config, ready.tokenizer), 0

    def tick(rows_done: int, _: int) -> None:
        nonlocal done
        progress.advance(rows_done - done)
        done = rows_done

    with stage(progress, "tokenise", len(rows)):
        return tokenize(
            rows,
            ready.tokenizer,
            asked.recipe.data,
            cache=_cache(),
            progress=tick,
            limit=limit,
            stop_ids=ready.stop_ids,
        )


def _cache() -> Path | None:
    """Folder for encoded rows, shared by runs; CROSSTUNE_CACHE moves it, an empty value turns it off."""
    place = os.environ.get("CROSSTUNE_CACHE", "~/.cache/crosstune")
    return Path(place).expanduser() / "tokens" if place else None
