"""Rows that are well by themselves, and not beside the others: copies, other lengths, rare classes."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable

from tests.breaks.bed import ASKED, JSON, REAL, SHAPES, Bed, Expected, Row, breaks


def _copy(record: Row) -> Row:
    return json.loads(json.dumps(record))


def repeat(bed: Bed, change: Callable[[str], str], row: int | None = None) -> Expected:
    """A row, or this one, a second time, changed so that it says the same."""
    row = bed.pick() if row is None else row
    other = _copy(bed.rows[row - 1])
    at = bed.add(other)
    row += at <= row
    for question in (False, True):
        bed.answer(at, change(bed.answer(at, question=question)), question=question)
    return "duplicate-rows", tuple(sorted((row, at)))


@breaks(*SHAPES)
def same_row_again(bed: Bed) -> Expected:
    return repeat(bed, lambda text: text)


@breaks(*SHAPES)
def same_row_in_another_form(bed: Bed) -> Expected:
    change = bed.rng.choice(
        [str.upper, str.swapcase, lambda text: f"  {text} ".replace(" ", "  "), lambda text: text + "\n"]
    )
    return repeat(bed, change)


@breaks(*SHAPES)
def same_row_decomposed(bed: Bed) -> Expected:
    row = bed.pick()
    bed.insert(row, "Zürich café")
    return repeat(bed, lambda text: unicodedata.normalize("NFD", text), row)


@breaks(*SHAPES)
def nearly_the_same_row(bed: Bed) -> Expected:
    text = " ".join(answer for _, answer in bed.rng.sample(REAL, 24))
    words = text.split()
    row = bed.pick()
    bed.answer(row, text)
    at = bed.add(_copy(bed.rows[row - 1]))
    row += at <= row
    words[bed.rng.randrange(len(words))] = "otherwise"
    bed.answer(at, " ".join(words))
    return "near-duplicates", tuple(sorted((row, at)))


@breaks(*ASKED)
def two_labels_for_one_question(bed: Bed) -> Expected:
    for row in range(1, len(bed.rows) + 1):
        bed.answer(row, bed.rng.choice(["good", "bad"]))
    row = bed.pick()
    other = _copy(bed.rows[row - 1])
    at = bed.add(other)
    row += at <= row
    bed.answer(at, "good" if bed.answer(at) == "bad" else "bad")
    return "conflicting-answers", tuple(sorted((row, at)))


@breaks(*SHAPES)
def far_longer_row(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(
        row, " ".join(f"shelf {i} holds jar {i * bed.rng.randrange(2, 9)}" for i in range(bed.rng.randrange(600, 2000)))
    )
    return "length-outlier", (row,)


@breaks(*JSON)
def rare_class(bed: Bed) -> Expected:
    row = bed.pick()
    name = bed.rng.choice(["label", "class", "category", "intent"])
    for number, record in enumerate(bed.rows, 1):
        record[name] = "scrap" if number == row else "fits"
    return "label-imbalance", (row,)
