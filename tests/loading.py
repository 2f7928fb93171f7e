"""What the tests of loading share: rows read, faults told, files written."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from crosstune.data.load import load_rows
from crosstune.recipe.sections import Data

LOOSE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(source: Any, **options: Any):
    return load_rows(source, Data(path="x", **options))


def faults(rows) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.code, f.rows) for f in rows.findings if f.severity == "error"]


def content(rows) -> list[Any]:
    """What was read, without the place it was read from."""
    return [(r.number, r.shape, r.text, r.prompt, r.completion, r.turns, dict(r.columns)) for r in rows.rows]


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def csv_text(table: list[dict[str, str]]) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(table[0]), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()
