"""Values that other readers change: words for "missing", digits, and large integers. Here they are kept as written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.text import Parts
from crosstune.data.load import Row
from crosstune.errors import Finding

# What pandas.read_csv (and so datasets' CSV reader) takes for a missing value, the empty cell aside.
MISSING_WORDS = frozenset(
    ["#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA", "NULL",
     "NaN", "None", "n/a", "nan", "null"]
)  # fmt: skip
EXACT_IN_FLOAT64 = 2**53  # larger whole numbers are rounded where a column is read as floating point
# Digits that change when they are read as a number: leading zeros, exponents, more than a float64 holds.
CHANGED_DIGITS = re.compile(r"[+-]?(?:0\d+|\d+[eE][+-]?\d+|\d{16,})")


def check_words_kept(row: Row, parts: Parts) -> Iterator[Finding]:
    """null, NA, 007: kept as they are written."""
    for field, _, text in parts:
        if text in MISSING_WORDS:
            message = f"{field} is the word {text!r}, kept as text"
            yield FAULTS["words-kept"].found(message, [row.number], replace(row.where, field=field))
        elif text[:1].isdigit() and CHANGED_DIGITS.fullmatch(text):
            message = f"{field} is {text!r}, kept as text"
            yield FAULTS["digits-kept"].found(message, [row.number], replace(row.where, field=field))


def check_big_integers(row: Row) -> Iterator[Finding]:
    """Identifiers that don't fit a float64."""
    for name, value in row.columns.items():
        if type(value) is int and abs(value) > EXACT_IN_FLOAT64:
            message = f"{name} is {value}, kept exact"
            yield FAULTS["big-integer"].found(message, [row.number], replace(row.where, field=name))
