"""Rows far longer than the others."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from crosstune.data.lint.catalogue import FAULTS
from crosstune.errors import Finding, Place

# Lengths of real rows are roughly log-normal with a sigma of about 1: the longest of 40 is then some 2.4 times the
# fourth longest, and 10 times with a probability under 0.1%. Under 512 tokens a row decides nobody's memory.
FEWEST_ROWS = 20
FACTOR = 10
FEWEST_TOKENS = 512
LONGEST_SHARE = 0.01  # outliers are few: at most 1% of the rows, or 3
CHARACTERS_A_TOKEN = 4  # English text under a vocabulary of 32,000 to 128,000


class Lengths:
    """Takes the length of each row; in characters where no tokenizer is known."""

    def __init__(self, file: str, *, unit: str = "characters") -> None:
        self.file, self.unit = file, unit
        self.numbers, self.lengths = array("q"), array("q")

    def add(self, number: int, length: int) -> None:
        self.numbers.append(number)
        self.lengths.append(length)

    def findings(self) -> Iterator[Finding]:
        lengths = np.array(self.lengths)
        per_token = 1 if self.unit == "tokens" else CHARACTERS_A_TOKEN
        usual = longest_usual(lengths)
        if usual is None:
            return
        limit = max(FACTOR * usual, FEWEST_TOKENS * per_token)
        for at in np.flatnonzero(lengths > limit):
            row, length = self.numbers[at], self.lengths[at]
            message = f"row {row} has {length} {self.unit}; the longest of the usual rows has {usual}"
            yield FAULTS["length-outlier"].found(message, [row], Place(self.file))


def longest_usual(lengths: NDArray[np.int64]) -> int | None:
    """The longest row once the few longest are set aside; None where there are too few rows to say what is usual."""
    if len(lengths) < FEWEST_ROWS:
        return None
    aside = max(3, int(LONGEST_SHARE * len(lengths)))
    ordered = np.sort(lengths)
    for count in range(aside, 0, -1):  # as few set aside as are outliers: the message names the longest of the others
        if ordered[-count] > FACTOR * ordered[-count - 1]:
            return int(ordered[-count - 1])
    return int(ordered[-1])
