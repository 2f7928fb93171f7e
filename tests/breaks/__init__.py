"""Ways to break a clean data set, each with the finding that must come of it: `(code, rows)`.

A `Bed` is a clean file in the making: rows of one shape as mappings, then lines, then bytes. A break changes it at a place
that its random generator chooses. Nothing here looks at how lint works.
"""

from tests.breaks import among_rows, rows, settings, syntax, text, tokens  # noqa: F401  (each registers its own)
from tests.breaks.bed import BREAKS, SHAPES, Bed

__all__ = ["BREAKS", "SHAPES", "Bed"]
