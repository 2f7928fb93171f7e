"""What scores of folds allow one to say: intervals, comparisons, curves. Every formula has its source in docs/statistics.md.

Knows nothing of models, lanes or files: plain arrays in, small frozen values out.
"""

from crosstune.stats.intervals import Interval, fold_interval

__all__ = ["Interval", "fold_interval"]
