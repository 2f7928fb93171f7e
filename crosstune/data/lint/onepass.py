"""`lint`: all findings about a file or a recipe, and `lint_rows`: about rows in memory. One pass over the rows each."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstune.data.lint import settings
from crosstune.data.lint.base import (
    check_base,
    check_stop_token,
    check_template_source,
    config_of,
    generation_stops,
    shape_of,
)
from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.folds import check_split
from crosstune.data.lint.marks import Marks
from crosstune.data.lint.report import Collector, LintReport
from crosstune.data.lint.rowpass import RowPass
from crosstune.data.lint.tokenpass import TokenPass
from crosstune.data.load import Row, Rows, leave_out, load_rows, read_rows
from crosstune.data.template import ChatTemplate
from crosstune.data.tokenizer import NO_LIMIT, ReadyTokenizer, choose_pad, find_stop_ids, longest_row, ready_tokenizer
from crosstune.errors import DataError, Finding, ModelError, Place
from crosstune.memory.shape import ModelShape
from crosstune.progress import Progress, Quiet, stage
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data, Model
from crosstune.results.suspects import read_row_numbers
from crosstune.splits.splits import Fold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 2000  # rows a batch: some hundred KB of text, small enough to stay in the processor's cache


def lint(
    source: Any,
    *,
    model: Model | PreTrainedTokenizerBase | str | None = None,
    data: Data | None = None,
    allow: Iterable[str] = (),
    progress: Progress | None = None,
) -> LintReport:
    """List everything wrong with a data set, or with a recipe and what it names.

    source     a `Recipe` or its YAML file; or rows: a path, hub id, pandas DataFrame, `datasets.Dataset`, mappings
    model      name, folder, .gguf file, `Model` section, or a tokenizer in memory; without one, nothing about tokens
    data       how the rows are to be read, where `source` is rows
    allow      codes of errors that stop nothing, besides the recipe's lint.allow

    A file of rows streams by in bounded memory; a recipe's rows are loaded, since its folds are looked at too.
    """
    progress = progress or Quiet()
    if isinstance(source, str | os.PathLike) and Path(source).suffix.lower() in (".yaml", ".yml"):
        source = Recipe.load(source)
    if isinstance(source, Recipe):
        return _lint_recipe(source, model, tuple(allow), progress)
    file = str(source) if isinstance(source, str | os.PathLike) else "rows"
    name = Model(name=model) if isinstance(model, str) else model if isinstance(model, Model) else None
    ready = with_pad(model) if model is not None and not isinstance(model, str | Model) else None
    look = Look(file, data or Data(path=file), name, ready)
    try:
        look.over(read_rows(source, look.data), progress)
    except DataError as error:
        look.collector.add([FAULTS["unreadable"].found(error.problem, where=Place(file), fix=error.fix)])
    look.finish()
    return look.report(tuple(allow))


def lint_rows(
    rows: Rows,
    recipe: Recipe,
    *,
    tokenizer: ReadyTokenizer | None = None,
    splitter: Any = None,
    has_folds: bool = True,
    progress: Progress | None = None,
) -> LintReport:
    """The same for rows in memory under a recipe. `splitter`: a scikit-learn splitter in place of the recipe's folds.
    `has_folds` False: all rows are trained on, and none is held out.

    With `data.skip_bad_rows`, errors that name rows are warnings, and `left_out` has the rows to leave out, with those
    that loading has left out already.
    """
    look = Look(rows.name, recipe.data, recipe.model, tokenizer, label=recipe.folds.by)
    look.over([*rows.findings, *rows.rows], progress or Quiet())
    look.finish()
    findings, left_out = look.collector.findings(), set[int]()
    if recipe.data.skip_bad_rows:
        said, left_out = leave_out(findings)
        findings = tuple(said)
        left_out.update(
            row for f in rows.findings if f.code in FAULTS and FAULTS[f.code].severity == "error" for row in f.rows
        )
    kept = rows.without(left_out)
    about_folds: Sequence[Finding] = ()
    folds: Sequence[Fold] = [Fold(0, tuple(range(len(kept))), ())]
    if has_folds:
        about_folds, folds = check_split(kept, recipe.folds, tokens_per_row=look.tokens_of(kept), splitter=splitter)
    collector = Collector()
    collector.add([*findings, *about_folds, *_about_settings(recipe, kept, folds, look)])
    return look.report(recipe.lint.allow, collector.findings(), left_out)


def _lint_recipe(recipe: Recipe, model: Any, allow: tuple[str, ...], progress: Progress) -> LintReport:
    allow = (*recipe.lint.allow, *allow)
    recipe = recipe.model_copy(update={"lint": recipe.lint.model_copy(update={"allow": allow})})
    if isinstance(model, str | Model):
        recipe = recipe.model_copy(update={"model": Model(name=model) if isinstance(model, str) else model})
    try:
        rows = load_rows(recipe.data.path, recipe.data)
        if recipe.data.exclude is not None:
            rows = rows.without(read_row_numbers(recipe.data.exclude))
    except DataError as error:
        finding = FAULTS["unreadable"].found(error.problem, where=Place(recipe.data.path, field="data"), fix=error.fix)
        others = _about_settings(recipe, None, (), None)
        return LintReport((finding, *others), recipe.data.path, allowed=allow)
    given = with_pad(model) if model is not None and not isinstance(model, str | Model) else None
    return lint_rows(rows, recipe, tokenizer=given, progress=progress)


def _about_settings(recipe: Recipe, rows: Rows | None, folds: Sequence[Fold], look: Look | None) -> Iterator[Finding]:
    """Settings of the recipe, and of each trial of its sweep, said once."""
    shape = shape_of(recipe.model.name)
    yield from settings.check_without_effect(recipe)
    yield from settings.check_allowed(recipe.lint.allow)
    said: set[str] = set()
    for trial in _trials(recipe):
        for finding in _about_trial(trial, shape, rows, folds, look):
            if finding.message not in said:
                said.add(finding.message)
                yield finding


def _trials(recipe: Recipe) -> list[Recipe]:
    if not recipe.sweep:
        return [recipe]
    from crosstune.sweep.sweep import trials_to_plan  # brings scikit-learn, a second of start-up

    return [trial.recipe for trial in trials_to_plan(recipe)]


def _about_trial(
    recipe: Recipe, shape: ModelShape | None, rows: Rows | None, folds: Sequence[Fold], look: Look | None
) -> Iterator[Finding]:
    for check in (settings.check_adapter_scale, settings.check_learning_rate, settings.check_dropout):
        yield from check(recipe)
    yield from settings.check_targets(recipe, shape)
    num_sequences = None
    if rows is not None and folds:
        smallest = min(folds, key=lambda fold: len(fold.train))
        num_rows = num_sequences = math.ceil(len(smallest.train) * recipe.train.share)
        lengths = look.tokens_of(rows) if look is not None else None
        if recipe.data.packing and lengths is not None and look is not None:
            tokens = int(lengths[list(smallest.train)].sum() * recipe.train.share)
            num_sequences = min(num_rows, math.ceil(tokens / look.max_tokens))
            yield from settings.check_packing(recipe, num_rows, num_sequences)
        yield from settings.check_steps(recipe, num_sequences)
    yield from settings.check_warmup(recipe, num_sequences)


def with_pad(tokenizer: PreTrainedTokenizerBase) -> ReadyTokenizer:
    """A tokenizer in memory (a copy) with its padding and stop tokens; no model's files are looked for."""
    tokenizer = copy.deepcopy(tokenizer)
    stop_ids = find_stop_ids(tokenizer)
    pad, findings = choose_pad(tokenizer, stop_ids)
    tokenizer.pad_token = pad
    return ReadyTokenizer(tokenizer, tokenizer.get_vocab()[pad], stop_ids, tuple(findings))


class Look:
    """One pass: rows in batches through `RowPass` and, where a tokenizer is known, `TokenPass`."""

    def __init__(
        self, file: str, data: Data, model: Model | None, ready: ReadyTokenizer | None, *, label: str | None = None
    ) -> None:
        """`ready`: the tokenizer, where it isn't to be loaded from `model`."""
        self.file, self.data, self.model, self.collector = file, data, model, Collector()
        ready = ready or self._load_tokenizer()
        marks = Marks(ready.tokenizer if ready else None, keep=data.special_text == "keep")
        self.rowpass = RowPass(file, data, self.collector, marks, label=label)
        self.tokenpass: TokenPass | None = None
        self.num_seen = 0
        if ready:
            self.collector.add(ready.findings)
            self.rowpass.lengths = None
            limit = self._limit(ready.tokenizer)
            self.tokenpass = TokenPass(file, ready.tokenizer, data, self.collector, limit=limit)

    def _load_tokenizer(self) -> ReadyTokenizer | None:
        if self.model is None:
            return None
        try:
            return ready_tokenizer(self.model)
        except ModelError as error:
            where = Place(field="model")
            self.collector.add([FAULTS["model-unread"].found(error.problem, where=where, fix=error.fix)])
            return None

    def _limit(self, tokenizer: PreTrainedTokenizerBase) -> int:
        return longest_row(config_of(self.model.name) if self.model else {}, tokenizer)

    def over(self, items: Iterable[Row | Finding], progress: Progress) -> None:
        """Look at every row."""
        with stage(progress, "lint"):
            for batch in self._batches(items):
                self.rowpass.add(batch)
                if self.tokenpass:
                    self.tokenpass.add(batch)
                progress.advance(len(batch))

    def _batches(self, items: Iterable[Row | Finding]) -> Iterator[list[Row]]:
        batch: list[Row] = []
        for item in items:
            if type(item) is Row:
                batch.append(item)
                self.num_seen = max(self.num_seen, item.number)
                if len(batch) == BATCH:
                    yield batch
                    batch = []
            elif isinstance(item, Finding):
                self.collector.add([item])
                self.num_seen = max(self.num_seen, *item.rows, 0)
        if batch:
            yield batch

    def finish(self) -> None:
        """What only all rows together show, and what is wrong with the model itself."""
        self.rowpass.finish()
        if self.tokenpass is None:
            return
        self.tokenpass.finish()
        tokenizer, used = self.tokenpass.tokenizer, self.tokenpass.used
        if self.tokenpass.has_conversations:
            stops = generation_stops(self.model.name) if self.model else []
            self.collector.add(check_stop_token(tokenizer, ChatTemplate(tokenizer).end, stops))
        if self.model:
            self.collector.add(check_template_source(self.model))
            self.collector.add(check_base(tokenizer, self.model, sorted(used.ids), used.highest))

    @property
    def max_tokens(self) -> int:
        return self.tokenpass.max_tokens if self.tokenpass else self.data.max_tokens or NO_LIMIT

    def tokens_of(self, rows: Rows) -> Any:
        """Tokens of each of these rows, as they are trained on; None without a tokenizer."""
        if self.tokenpass is None:
            return None
        lengths = self.tokenpass.lengths
        by_number = dict(zip(lengths.numbers, lengths.lengths, strict=True))
        return np.array([by_number.get(row.number, 0) for row in rows.rows], dtype=np.int64)

    def report(
        self,
        allow: tuple[str, ...],
        findings: tuple[Finding, ...] | None = None,
        left_out: Iterable[int] = (),
    ) -> LintReport:
        """The findings as they stand."""
        found = self.collector.findings() if findings is None else findings
        return LintReport(found, self.file, self.num_seen, tuple(dict.fromkeys(allow)), frozenset(left_out))
