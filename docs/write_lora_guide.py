"""Write the tables of docs/lora-guide.md from bench/results/lora-guide.json: python docs/write_lora_guide.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.stats import compare_folds

ROOT = Path(__file__).parent.parent
PAGE, SCORES = ROOT / "docs" / "lora-guide.md", ROOT / "bench" / "results" / "lora-guide.json"


def guide_page() -> str:
    """The page with its tables made anew."""
    kept = json.loads(SCORES.read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    for name, runs, metric, higher in (
        ("qa loss", ["qa-0", "qa-1", "qa-2"], "loss", False),
        ("words loss", ["words-0"], "loss", False),
        ("words accuracy", ["words-0"], "accuracy", True),
    ):
        table = "\n".join(against_default(kept, runs, metric, higher))
        head, _, rest = page.partition(f"<!-- table: {name} -->\n")
        page = f"{head}<!-- table: {name} -->\n{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return page


def against_default(kept: Any, runs: list[str], metric: str, higher: bool) -> Iterator[str]:
    """Each case against the default on the same folds: difference, 95% interval, posterior probabilities."""
    scores = np.array([[value for run in runs for value in kept["runs"][run][metric][case]] for case in range(12)])
    rope = 0.01 * abs(scores[0].mean())
    yield f"| setting | {metric} | difference from the default | 95% | P(better) | P(as good) | P(worse) |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    yield f"| default | {scores[0].mean():.4f} | | | | | |"
    for case, settings in list(enumerate(kept["cases"]))[1:]:
        found = compare_folds(scores[case], scores[0], test_share=0.2, rope=rope, higher_is_better=higher)
        words = ", ".join(f"{key.split('.')[-1]} {_value(value)}" for key, value in settings.items())
        gap = found.difference
        yield (
            f"| {words} | {scores[case].mean():.4f} | {gap.mean:+.4f} | {gap.low:+.4f} to {gap.high:+.4f} | "
            f"{found.better:.2f} | {found.equivalent:.2f} | {found.worse:.2f} |"
        )


def _value(value: Any) -> str:
    names = {2: "q, v", 4: "attention"}
    return names[len(value)] if isinstance(value, list) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(guide_page(), encoding="utf-8")
