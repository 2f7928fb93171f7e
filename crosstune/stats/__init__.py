"""What scores of folds allow one to say: intervals, comparisons, curves. docs/statistics.md has every formula's source.

Knows nothing of models, lanes or files: plain arrays in, small frozen values out.
"""

from crosstune.stats.bootstrap import ratio_interval, statistic_interval
from crosstune.stats.comparison import Comparison, adjust_holm, compare_folds, rank_probabilities
from crosstune.stats.curve import EpochChoice, LearningCurve, choose_epoch, fit_learning_curve
from crosstune.stats.intervals import Interval, fold_interval, held_out_share, overlap_factor

__all__ = [
    "Comparison",
    "EpochChoice",
    "Interval",
    "LearningCurve",
    "adjust_holm",
    "choose_epoch",
    "compare_folds",
    "fit_learning_curve",
    "fold_interval",
    "held_out_share",
    "overlap_factor",
    "rank_probabilities",
    "ratio_interval",
    "statistic_interval",
]
