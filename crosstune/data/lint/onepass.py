"""`lint`: all findings about a data set or a recipe, in one pass over the rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.marks import Marks
from crosstune.data.lint.report import Collector, LintReport
from crosstune.data.lint.rowpass import RowPass
from crosstune.data.load import Row, read_rows
from crosstune.errors import DataError, Finding, Place
from crosstune.progress import Progress, Quiet, stage
from crosstune.recipe import Data

BATCH = 2000  # rows a batch: some hundred KB of text, small enough to stay in the processor's cache


def lint(
    source: Any, *, data: Data | None = None, allow: Iterable[str] = (), progress: Progress | None = None
) -> LintReport:
    """Look at every row of a recipe, file, hub id, data frame or data set once, and list what is wrong with it."""
    data = data or Data(path=str(source) if isinstance(source, str | os.PathLike) else "rows")
    file = str(source) if isinstance(source, str | os.PathLike) else "rows"
    collector = Collector()
    rowpass = RowPass(file, data, collector, Marks())
    progress = progress or Quiet()
    with stage(progress, "lint"):
        try:
            for batch in batches(read_rows(source, data), collector):
                rowpass.add(batch)
                progress.advance(len(batch))
        except DataError as error:
            collector.add([FAULTS["unreadable"].found(error.problem, where=Place(file), fix=error.fix)])
        rowpass.finish()
    return LintReport(collector.findings(), file, rowpass.num_rows, tuple(allow), frozenset(collector.bad_rows))


def batches(items: Iterator[Row | Finding], collector: Collector) -> Iterator[list[Row]]:
    """The rows, some thousand at a time; findings between them go to the collector."""
    batch: list[Row] = []
    for item in items:
        if type(item) is Row:
            batch.append(item)
            if len(batch) == BATCH:
                yield batch
                batch = []
        else:
            collector.add([item])  # type: ignore[list-item]
    if batch:
        yield batch
