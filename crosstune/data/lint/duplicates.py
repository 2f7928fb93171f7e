"""Rows that repeat one another: equal, equal but for form, nearly equal, or equal questions with different answers.

Rows stream by; of each only a few 64-bit keys stay (and, of longer rows, a MinHash signature of 64 numbers), so that a
million rows need some 300 MB. Everything is decided at the end, by sorting the keys.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.load import Row, content_key, normal_key, normal_text
from crosstune.errors import Finding, Place

# Shingles of five words and a Jaccard similarity of 0.8, as in Lee et al. 2022 (arXiv:2107.06499, NearDup).
SHINGLE_WORDS = 5
NEAR = 0.8
# A row of n words has n - 4 shingles, and one changed word kills up to 5 of them. Under 20 words two questions that
# differ in one number ("Box 32: what is inside?") would be judged by a handful of shingles: they are left alone.
FEWEST_WORDS = 20
# 64 hashes estimate a similarity with a standard error of sqrt(0.8 * 0.2 / 64) = 0.05. 16 bands of 4: a pair at 0.8 is
# met with a probability of 1 - (1 - 0.8^4)^16 = 0.9998, one at 0.5 with 0.64; what is met is judged by all 64 hashes.
NUM_HASHES = 64
BANDS = 16
BATCH = 2000


class Duplicates:
    """Takes each row once, says at the end which are equal."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.numbers = array("q")
        self.exact = array("Q")
        self.normal = array("Q")

    def add(self, row: Row) -> None:
        self.numbers.append(row.number)
        self.exact.append(_short(content_key(row)))
        self.normal.append(_short(normal_key(row)))

    def findings(self) -> Iterator[Finding]:
        """One finding a set of equal rows, first row first."""
        numbers, exact = _numpy(self.numbers), _numpy(self.exact)
        for members in equal_sets(_numpy(self.normal)):
            rows = numbers[members].tolist()
            same = len(np.unique(exact[members])) == 1
            how = "are equal" if same else "differ only in Unicode form, case or white space"
            yield FAULTS["duplicate-rows"].found(f"rows {row_words(rows)} {how}", rows, Place(self.file))


class Conflicts:
    """One prompt, different answers."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.numbers, self.prompts, self.answers = array("q"), array("Q"), array("Q")

    def add(self, row: Row) -> None:
        if row.shape == "prompt":
            prompt, answer = row.prompt, row.completion
        elif row.shape == "messages" and row.turns and row.turns[-1].role == "assistant":
            prompt = "\x1e".join(f"{turn.role}\x1f{turn.content}" for turn in row.turns[:-1])
            answer = row.turns[-1].content
        else:
            return
        self.numbers.append(row.number)
        self.prompts.append(_hash(normal_text(prompt)))
        self.answers.append(_hash(normal_text(answer)))

    def findings(self) -> Iterator[Finding]:
        numbers, answers = _numpy(self.numbers), _numpy(self.answers)
        if not len(numbers):
            return
        # A task with one right answer (labels, yes and no) says the same few answers again and again. Where most rows
        # have an answer of their own (talk, stories), several answers to one prompt are usual.
        labels = len(np.unique(answers)) <= 0.2 * len(answers)
        for members in equal_sets(_numpy(self.prompts)):
            if (different := len(np.unique(answers[members]))) > 1:
                rows = numbers[members].tolist()
                message = f"rows {row_words(rows)} have one prompt and {different} different answers"
                severity = None if labels else "note"
                yield FAULTS["conflicting-answers"].found(message, rows, Place(self.file), severity=severity)  # type: ignore[arg-type]


class NearDuplicates:
    """Long rows that share most of their five-word shingles (MinHash by rensa)."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.numbers, self.normal = array("q"), array("Q")
        self._signatures: list[NDArray[np.uint32]] = []
        self._common: set[str] = set()
        self._waiting: list[tuple[int, int, list[str], list[str]]] = []  # number, key, words asked, answered

    def add(self, row: Row, normal: int) -> None:
        """`normal`: the row's key in `Duplicates`, so that equal rows aren't told twice."""
        asked, answered = _words(row)
        if len(asked) + len(answered) >= FEWEST_WORDS:
            self._waiting.append((row.number, normal, asked, answered))
            if len(self._waiting) >= BATCH:
                self._sign()

    def _sign(self) -> None:
        from rensa import RMinHash

        asked = [_shingles(words) for _, _, words, _ in self._waiting]
        self._common |= boilerplate(asked)
        kept = []
        for shingles, (number, normal, _, answered) in zip(asked, self._waiting, strict=True):
            shingles -= self._common
            shingles |= _shingles(answered)
            if len(shingles) > FEWEST_WORDS - SHINGLE_WORDS:  # what boilerplate leaves may be too little to judge
                kept.append(list(shingles))
                self.numbers.append(number)
                self.normal.append(normal)
        if kept:
            matrix = RMinHash.digest_matrix_from_token_sets(kept, NUM_HASHES, 1)
            self._signatures.append(np.array(matrix.to_rows(), dtype=np.uint32))
        self._waiting = []

    def findings(self) -> Iterator[Finding]:
        """One finding a set of near duplicates."""
        if self._waiting:
            self._sign()
        if not self._signatures:
            return
        numbers, normal = _numpy(self.numbers), _numpy(self.normal)
        for members, similarity in near_sets(np.concatenate(self._signatures)):
            if len(np.unique(normal[members])) > 1:
                rows = numbers[members].tolist()
                message = f"rows {row_words(rows)} share {similarity:.0%} of their five-word sequences"
                yield FAULTS["near-duplicates"].found(message, rows, Place(self.file))


def boilerplate(rows: Sequence[set[str]]) -> set[str]:
    """Shingles of prompts that are an instruction repeated over the data, not a sign that two rows are alike.

    Those in more than 1% of the rows (at least ten of them; in small data, in more than half of the rows).
    """
    limit = max(2, min(len(rows) / 2, max(10, len(rows) / 100)))
    counts: Counter[str] = Counter()
    for shingles in rows:
        counts.update(shingles)
    return {shingle for shingle, count in counts.items() if count > limit}


def equal_sets(keys: NDArray[np.uint64]) -> list[NDArray[np.int64]]:
    """Positions that share a key, as sets of two or more, ordered by their first position."""
    if len(keys) < 2:
        return []
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(keys[order]) != 0])
    counts = np.diff(np.r_[starts, len(keys)])
    several = counts > 1
    sets = [np.sort(order[start : start + n]) for start, n in zip(starts[several], counts[several], strict=True)]
    return sorted(sets, key=lambda members: int(members[0]))


def near_sets(signatures: NDArray[np.uint32]) -> list[tuple[NDArray[np.int64], float]]:
    """Positions whose signatures agree in 80% or more, with the least agreement met, ordered by first position."""
    num_rows, width = len(signatures), NUM_HASHES // BANDS
    parent: dict[int, int] = {}
    least: dict[int, float] = {}

    def root(at: int) -> int:
        while parent.setdefault(at, at) != at:
            parent[at] = at = parent[parent[at]]
        return at

    for band in range(BANDS):
        # The band's four hashes as one: sorting numbers is ten times faster than sorting byte strings.
        halves = np.ascontiguousarray(signatures[:, band * width : (band + 1) * width]).view(np.uint64)
        keys = halves[:, 0] * np.uint64(0x9E3779B97F4A7C15) + halves[:, 1]
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        if not same.any():
            continue
        # In each bucket every row is compared with its neighbour and with the bucket's first.
        first = np.maximum.accumulate(np.where(np.r_[True, ~same], np.arange(num_rows), 0))
        right = np.flatnonzero(same) + 1
        members = np.r_[order[right - 1], order[first[right]]], np.r_[order[right], order[right]]
        for start in range(0, len(members[0]), 100_000):
            left, other = (side[start : start + 100_000] for side in members)
            agreement = (signatures[left] == signatures[other]).mean(axis=1)
            for at in np.flatnonzero(agreement >= NEAR).tolist():
                a, b = root(int(left[at])), root(int(other[at]))
                worst = min(least.get(a, 1.0), least.get(b, 1.0), float(agreement[at]))
                parent[b], least[a] = a, worst
    groups: dict[int, list[int]] = {}
    for row in list(parent):
        groups.setdefault(root(row), []).append(row)
    sets = [(np.array(sorted(group)), least[top]) for top, group in groups.items() if len(group) > 1]
    return sorted(sets, key=lambda found: int(found[0][0]))


def row_words(rows: Sequence[int]) -> str:
    """`3, 7 and 11`, or the first eight and how many more."""
    shown = [str(row) for row in rows[:8]]
    if len(rows) > 8:
        return ", ".join(shown) + f" and {len(rows) - 8:,} more"
    return ", ".join(shown[:-1]) + f" and {shown[-1]}"


def _words(row: Row) -> tuple[list[str], list[str]]:
    """Words asked and words answered. System turns repeat and say nothing; all of a text counts as asked."""
    if row.shape == "messages":
        asked = " ".join(turn.content for turn in row.turns if turn.role not in ("assistant", "system", "developer"))
        answers = (turn for turn in row.turns if turn.role == "assistant")
        answered = " ".join(f"{turn.content} {turn.extra.get('tool_calls', '')}" for turn in answers)
        return asked.casefold().split(), answered.casefold().split()
    if row.shape == "prompt":
        return row.prompt.casefold().split(), row.completion.casefold().split()
    return row.text.casefold().split(), []


def _shingles(words: list[str]) -> set[str]:
    return set(map(" ".join, zip(*(words[i:] for i in range(SHINGLE_WORDS)), strict=False)))


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "little")


def _hash(text: str) -> int:
    return hash(text) & 0xFFFFFFFFFFFFFFFF  # 64 bits: two of a million differ by chance with 1 - 3e-8


def _numpy(values: Iterable[int]) -> NDArray[np.uint64]:
    return np.array(values)
