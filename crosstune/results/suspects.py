"""Rows that look wrong, ranked with reasons, from scores of lanes that never saw them. Nothing is removed by itself.

Three signs: a label that out-of-fold probabilities contradict (cleanlab), a loss far above that of rows of like length,
and a question asked twice with answers that differ.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from crosstune.errors import DataError, MissingExtra
from crosstune.recipe.recipe import write_text

Floats = NDArray[np.float64]
# A robust z above 3.5 is an outlier (Iglewicz & Hoaglin, How to Detect and Handle Outliers, 1993, p. 13).
OUTLIER_Z = 3.5
# Two questions are near duplicates from this cosine of their character 4-grams on; answers differ below the second.
SAME_QUESTION, SAME_ANSWER = 0.9, 0.6


@dataclass(frozen=True, slots=True)
class Suspect:
    """One row that looks wrong. `row` is its number (from 1); `score` lies between 0 and 1, worst first."""

    row: int
    score: float
    reasons: tuple[str, ...]
    kinds: tuple[str, ...]
    suggestion: str = ""


def label_suspects(rows: ArrayLike, labels: ArrayLike, chances: ArrayLike, names: Sequence[str]) -> list[Suspect]:
    """Rows whose label the out-of-fold probabilities contradict: confident learning (Northcutt et al., JAIR 70, 2021).

    rows (n,) numbers; labels (n,) positions into `names`; chances (n, labels), from lanes that never saw the row.
    """
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores
    except ModuleNotFoundError:
        raise MissingExtra("cleanlab", "suspects") from None
    number, given = np.asarray(rows, dtype=np.int64), np.asarray(labels, dtype=np.int64)
    found = np.asarray(chances, dtype=np.float64)
    # cleanlab counts classes from 0 without gaps: labels that no row has are taken out, and put back in the words.
    present = np.unique(given)
    if len(present) < 2 or len(given) < 10:
        return []
    narrow = found[:, present] / np.maximum(found[:, present].sum(axis=1, keepdims=True), 1e-12)
    dense = np.searchsorted(present, given)
    flagged = find_label_issues(dense, narrow, n_jobs=1)
    quality = get_label_quality_scores(dense, narrow, method="self_confidence")
    suspects = []
    for i in np.flatnonzero(flagged):
        best = int(found[i].argmax())
        reason = (
            f"labelled {names[given[i]]!r} (probability {found[i, given[i]]:.2f}); lanes that never saw the row "
            f"say {names[best]!r} ({found[i, best]:.2f})"
        )
        suspects.append(Suspect(int(number[i]), float(1 - quality[i]), (reason,), ("label",), names[best]))
    return sorted(suspects, key=_worst_first)


def loss_suspects(rows: ArrayLike, nll: ArrayLike, targets: ArrayLike) -> list[Suspect]:
    """Rows whose loss per target token is far above that of rows with about as many targets.

    rows (n,) numbers; nll (n,) summed out-of-fold losses; targets (n,) target tokens. The mean of few tokens scatters
    more, so a row is measured by the median and the median deviation of its neighbours in length.
    """
    number, count = np.asarray(rows, dtype=np.int64), np.asarray(targets, dtype=np.float64)
    loss = np.asarray(nll, dtype=np.float64) / np.maximum(count, 1)
    scores = robust_z(loss, count)
    return sorted(
        (
            Suspect(
                int(number[i]), _from_z(scores[i]),
                (f"loss {loss[i]:.2f} a token, robust z {scores[i]:.1f} among rows of about {int(count[i])} targets",),
                ("loss",),
            )
            for i in np.flatnonzero(scores > OUTLIER_Z)
        ),
        key=_worst_first,
    )  # fmt: skip


def robust_z(values: ArrayLike, lengths: ArrayLike) -> Floats:
    """(value − median) / (1.4826 · median deviation), over neighbours in length: a tenth of the rows, 51 or more.

    The deviation is that above the median: losses are skewed, and that below is too small a measure of high ones.
    Rows of one length are neighbours all together or not at all: who is one depends neither on values nor on order.
    """
    value, length = np.asarray(values, dtype=np.float64), np.asarray(lengths)
    ascending, by_length = np.sort(length), value[np.argsort(length, kind="stable")]
    half, last = max(25, len(value) // 20), len(value) - 1
    z = np.zeros(len(value))
    for one in np.unique(length):
        here = length == one
        begins = int(np.searchsorted(ascending, one))
        start = max(0, min(begins - half, last - 2 * half))
        end = min(last, max(begins + int(here.sum()) - 1 + half, start + 2 * half))
        low, high = np.searchsorted(ascending, ascending[start]), np.searchsorted(ascending, ascending[end], "right")
        z[here] = _z_among(by_length[low:high], value[here])
    return z


def _z_among(near: Floats, values: Floats) -> Floats:
    """Robust z of `values` among `near`."""
    middle = float(np.median(near))
    spread = 1.4826 * float(np.median(near[near >= middle] - middle))
    # More than half of the neighbours alike: the mean deviation takes over (Iglewicz & Hoaglin, same page).
    spread = spread or 1.2533 * float(np.abs(near - middle).mean())
    return (values - middle) / spread if spread else np.zeros(len(values))


def conflict_suspects(
    rows: ArrayLike, prompts: Sequence[str], answers: Sequence[str], loss: ArrayLike | None = None
) -> list[Suspect]:
    """Near-equal prompts with answers that differ. The answer with the higher out-of-fold loss is the more suspect."""
    number = np.asarray(rows, dtype=np.int64)
    high = np.zeros(len(number)) if loss is None else np.asarray(loss, dtype=np.float64)
    rank = np.argsort(np.argsort(high)) / max(1, len(high) - 1)
    partners: dict[int, set[int]] = {}
    for i, j in _near_pairs(prompts):
        if _differ(answers[i], answers[j]):
            partners.setdefault(i, set()).add(j)
            partners.setdefault(j, set()).add(i)
    suspects = []
    for i, others in partners.items():
        listed = ", ".join(str(number[j]) for j in sorted(others)[:5]) + (" …" if len(others) > 5 else "")
        asks = f"rows {listed} ask" if len(others) > 1 else f"row {listed} asks"
        worse = loss is None or high[i] > max(high[j] for j in others)
        score = (0.5 if worse else 0.25) + 0.25 * float(rank[i])
        suspects.append(Suspect(int(number[i]), score, (f"asks what {asks}, and answers otherwise",), ("conflict",)))
    return sorted(suspects, key=_worst_first)


def join_suspects(*lists: Iterable[Suspect]) -> tuple[Suspect, ...]:
    """One entry a row, its reasons together, worst first. Several signs stand above the worst of them alone."""
    joined: dict[int, Suspect] = {}
    for suspect in (one for found in lists for one in found):
        old = joined.get(suspect.row)
        if old is not None:
            suspect = Suspect(
                suspect.row,
                1 - (1 - old.score) * (1 - suspect.score),
                old.reasons + suspect.reasons,
                old.kinds + suspect.kinds,
                old.suggestion or suspect.suggestion,
            )
        joined[suspect.row] = suspect
    return tuple(sorted(joined.values(), key=_worst_first))


COLUMNS = ("rank", "row", "score", "kinds", "suggestion", "reasons")


def write_suspects(path: Path, suspects: Sequence[Suspect]) -> None:
    """suspects.csv: one line a row, worst first. `data.exclude` takes the file; delete the lines of rows to keep."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for rank, one in enumerate(suspects, start=1):
        table.writerow([rank, one.row, f"{one.score:.4f}", " ".join(one.kinds), one.suggestion, "; ".join(one.reasons)])
    write_text(path, out.getvalue())


def read_suspects(path: Path) -> tuple[Suspect, ...]:
    """What `write_suspects` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(
            Suspect(
                int(line["row"]), float(line["score"]), tuple(line["reasons"].split("; ")),
                tuple(line["kinds"].split()), line["suggestion"],
            )
            for line in csv.DictReader(file)
        )  # fmt: skip


def read_row_numbers(path: str | os.PathLike[str]) -> frozenset[int]:
    """The row numbers of a CSV file with a column `row`, as `suspects.csv` is one."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if "row" not in (table.fieldnames or ()):
                raise DataError(f"{path} has no column 'row'", "Give a file like suspects.csv in data.exclude.")
            numbers = {}
            for entry in table:
                word = entry["row"] or ""
                if not word.strip().isdigit() or int(word) < 1:
                    raise DataError(f"{path} line {table.line_num}: {word!r} is no row number", "Rows count from 1.")
                numbers[int(word)] = table.line_num
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read: {error}", "Give a file like suspects.csv in data.exclude.") from None
    return frozenset(numbers)


def _worst_first(suspect: Suspect) -> tuple[float, int]:
    return (-suspect.score, suspect.row)


def _from_z(z: float) -> float:
    """0.5 at the outlier's border, towards 1 beyond."""
    return float(z * z / (z * z + OUTLIER_Z * OUTLIER_Z))


def _plain(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text).strip().lower()


def _grams(texts: Sequence[str]) -> Any:
    """Counts of character 4-grams, hashed: texts × 2²⁰, sparse."""
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(analyzer="char_wb", ngram_range=(4, 4), norm=None, alternate_sign=False).transform(texts)


def _near_pairs(prompts: Sequence[str]) -> Iterable[tuple[int, int]]:
    """Pairs of near-equal prompts, each once. Sparse products a block at a time: 20,000 prompts take seconds.

    What all prompts have in common (an instruction, a template) tells nothing, so 4-grams weigh by their rarity; and
    prompts whose numbers differ ("what is 2 + 3", "what is 2 + 5") are different questions, however alike.
    """
    from sklearn.preprocessing import normalize

    plain = [_plain(text) for text in prompts]
    counts = _grams(plain)
    rarity = np.log((1 + len(plain)) / np.maximum(np.bincount(counts.indices, minlength=counts.shape[1]), 1))
    grams = normalize(counts.multiply(rarity).tocsr())
    turned = grams.T.tocsr()
    numbers = [re.findall(r"\d+", text) for text in plain]
    for start in range(0, len(plain), 1000):
        near = (grams[start : start + 1000] @ turned).tocoo()
        for i, j, cosine in zip((near.row + start).tolist(), near.col.tolist(), near.data.tolist(), strict=True):
            if i < j and cosine >= SAME_QUESTION and numbers[i] == numbers[j]:
                yield i, j


def _differ(one: str, two: str) -> bool:
    from sklearn.preprocessing import normalize

    plain = [_plain(one), _plain(two)]
    if plain[0] == plain[1]:
        return False
    pair = normalize(_grams(plain))
    return float((pair[0] @ pair[1].T).sum()) < SAME_ANSWER
