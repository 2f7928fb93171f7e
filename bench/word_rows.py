"""Rows of the guide and of the planted experiment: words that people rated, from the package vaderSentiment.

Its lexicon (Hutto & Gilbert, ICWSM 2014) holds the mean of ten people's ratings of a word, from −4 to 4. Words rated
clearly (a mean of 2 or more on either side, a spread below 1) make a choice: positive or negative.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np

LABELS = ("negative", "positive")


def rated_words(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """`count` rows, half of each label, in random order."""
    spec = find_spec("vaderSentiment")
    assert spec is not None and spec.submodule_search_locations, "pip install vaderSentiment"
    lexicon = Path(spec.submodule_search_locations[0], "vader_lexicon.txt").read_text(encoding="utf-8")
    rated = [line.split("\t") for line in lexicon.splitlines()]
    clear = [
        (word, float(mean))
        for word, mean, spread, *_ in rated
        if word.isalpha() and abs(float(mean)) >= 2 and float(spread) < 1
    ]
    rng = np.random.default_rng(seed)
    rows = []
    for label, sign in zip(LABELS, (-1, 1), strict=True):
        words = [word for word, mean in clear if mean * sign > 0]
        chosen = rng.choice(words, count // 2, replace=False)
        rows += [{"prompt": f"The word “{word}” is", "completion": f" {label}", "label": label} for word in chosen]
    return [rows[i] for i in rng.permutation(len(rows))]


def flip_labels(rows: list[dict[str, str]], share: float, *, seed: int = 0) -> list[int]:
    """Give `share` of the rows the other label, in place; returns their row numbers (from 1)."""
    rng = np.random.default_rng(seed)
    flipped = sorted(rng.choice(len(rows), round(share * len(rows)), replace=False).tolist())
    for place in flipped:
        other = LABELS[1 - LABELS.index(rows[place]["label"])]
        rows[place] |= {"completion": f" {other}", "label": other}
    return [place + 1 for place in flipped]


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write the rows as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
