"""Tables of a run folder: columns of equal length ↔ Parquet."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.errors import RunError
from crosstune.store.files import guard


def to_parquet(columns: Mapping[str, Any]) -> bytes:
    """Columns of equal length as the bytes of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    sink = io.BytesIO()
    table = pyarrow.table({name: pyarrow.array(values) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def from_parquet(place: Path) -> dict[str, np.ndarray]:
    """The columns of a Parquet file."""
    import pyarrow
    import pyarrow.parquet

    with guard("reading", place):
        data = place.read_bytes()
    try:
        table = pyarrow.parquet.read_table(io.BytesIO(data))
    except pyarrow.ArrowException as error:
        raise RunError(f"{place} is damaged: {error}", "Delete it and give the same command again.") from None
    return {name: table.column(name).to_numpy() for name in table.column_names}
