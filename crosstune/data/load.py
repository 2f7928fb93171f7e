"""Rows in: JSONL, JSON, CSV and Parquet files, data frames, Hugging Face data sets, hub ids → `Row` or `Finding`.

Only faults that reading must notice are found here (encoding, syntax, types, roles); what a row says is lint's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crosstune.data.rows import Row, Rows, Shape, Turn
from crosstune.errors import Finding
from crosstune.recipe import Data

__all__ = ["Row", "Rows", "Shape", "Turn", "load_rows", "read_rows"]


def read_rows(source: Any, data: Data) -> Iterator[Row | Finding]:
    """Yield each good row and each fault, in file order, in bounded memory for JSONL, CSV and Parquet."""
    raise NotImplementedError


def load_rows(source: Any, data: Data) -> Rows:
    """All rows of a path, hub id, `pandas.DataFrame`, `datasets.Dataset` or list of mappings."""
    raise NotImplementedError
