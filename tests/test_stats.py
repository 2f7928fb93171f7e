"""Statistics against published figures, baycomp, scipy and simulations with a known truth."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from scipy import stats as scipy_stats
from scipy.integrate import quad
from sklearn.datasets import make_moons
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score
from sklearn.svm import SVC

from crosstune.stats import (
    adjust_holm,
    choose_epoch,
    compare_folds,
    fit_learning_curve,
    fold_interval,
    rank_probabilities,
    ratio_interval,
    statistic_interval,
)
from crosstune.stats.bootstrap import _bca


def test_fold_interval_by_hand():
    # Five folds: mean 2, s = 1.5811, factor 1/5 + 1/4 = 0.45, t(4, 97.5%) = 2.77645.
    interval = fold_interval([0, 1, 2, 3, 4], test_share=1 / 5)
    half = 2.7764451 * math.sqrt(2.5 * 0.45)
    assert (interval.mean, interval.n) == (2, 5)
    assert interval.std == pytest.approx(math.sqrt(2.5))
    assert (interval.low, interval.high) == pytest.approx((2 - half, 2 + half), rel=1e-6)


def test_an_interval_ends_where_scores_do_and_is_else_the_same():
    scores = [0.9, 1.0, 1.0, 0.95, 0.95]
    wide, cut = (fold_interval(scores, test_share=0.2, limits=limits) for limits in ((-math.inf, math.inf), (0.0, 1.0)))
    assert wide.high > 1
    assert cut == replace(wide, high=1.0)
    mirrored = fold_interval([1 - score for score in scores], test_share=0.2, limits=(0.0, 1.0))
    assert (mirrored.low, mirrored.high) == (0.0, pytest.approx(1 - cut.low))


def test_one_score_has_no_interval():
    interval = fold_interval([0.7], test_share=0.2)
    assert interval.mean == 0.7 and math.isnan(interval.low) and "no interval" in str(interval)


def test_published_example_of_the_corrected_t_and_the_bayesian_test():
    """scikit-learn, "Statistical comparison of models using grid search": t 0.750, p 0.227 (one side), and
    posterior 0.500 / 0.432 / 0.068 for better / equivalent / worse with a region of ±0.01."""
    rows, classes = make_moons(noise=0.352, random_state=1, n_samples=100)
    folds = RepeatedStratifiedKFold(n_splits=10, n_repeats=10, random_state=0)
    rbf, linear = (
        cross_val_score(SVC(kernel=kernel, random_state=0), rows, classes, cv=folds, scoring="roc_auc")
        for kernel in ("rbf", "linear")
    )
    found = compare_folds(rbf, linear, test_share=0.1, rope=0.01, higher_is_better=True)
    assert found.t == pytest.approx(0.750, abs=5e-4)
    assert found.p / 2 == pytest.approx(0.227, abs=5e-4)
    assert [found.better, found.equivalent, found.worse] == pytest.approx([0.500, 0.432, 0.068], abs=6e-4)


@settings(max_examples=60, deadline=None)
@given(
    seed=some.integers(0, 2**31),
    k=some.integers(3, 10),
    runs=some.integers(1, 4),
    rope=some.sampled_from([0, 0.01, 0.3]),
)
def test_bayesian_correlated_t_equals_baycomp(seed, k, runs, rope):
    baycomp = pytest.importorskip("baycomp")
    rng = np.random.default_rng(seed)
    one, two = rng.normal(0.1, 1, k * runs), rng.normal(0, 1, k * runs)
    found = compare_folds(one, two, test_share=1 / k, rope=rope, higher_is_better=True)
    theirs = baycomp.CorrelatedTTest.probs(one, two, rope=rope, runs=runs)  # left: the first is better
    ours = (found.better, found.equivalent, found.worse) if rope else (found.better, found.worse)
    assert ours == pytest.approx(theirs, abs=1e-12)


def test_posterior_equals_slow_integration():
    d = np.array([0.02, 0.05, -0.01, 0.04, 0.03])
    found = compare_folds(d, np.zeros(5), test_share=0.2, rope=0.02, higher_is_better=True)
    scale = d.std(ddof=1) * math.sqrt(1 / 5 + 1 / 4)
    # Student's density with 4 degrees of freedom, up to a constant
    density = lambda x: (1 + ((x - d.mean()) / scale) ** 2 / 4) ** (-5 / 2)  # noqa: E731
    area = lambda low, high: quad(density, low, high, points=[d.mean()], limit=500)[0]  # noqa: E731
    assert found.better == pytest.approx(area(0.02, 5) / area(-5, 5), abs=1e-6)
    assert found.worse == pytest.approx(area(-5, -0.02) / area(-5, 5), abs=1e-6)


def test_lower_is_better_swaps_the_sides():
    up = compare_folds([3, 4, 5.5], [1, 2, 3], test_share=1 / 3, higher_is_better=True)
    down = compare_folds([3, 4, 5.5], [1, 2, 3], test_share=1 / 3)
    assert (up.better, up.worse) == (down.worse, down.better) and up.better > 0.9


@pytest.mark.parametrize("shift", [0.0, 0.1, -0.3])
def test_the_same_difference_on_every_fold_is_no_certainty(shift):
    """No spread, no test: of 0/1 scores on few rows it is by chance. 0.9 − 0.8 and 0.8 − 0.7 differ in the last bit."""
    first = np.array([0.9, 0.8, 0.7])
    found = compare_folds(first, first - shift, test_share=1 / 3, rope=0.01)
    assert found.difference.mean == pytest.approx(shift)
    assert all(math.isnan(value) for value in (found.t, found.p, found.better, found.equivalent, found.worse))
    chances = rank_probabilities(np.stack([first, first - shift, [0.1, 0.5, 0.2]], axis=1), test_share=1 / 3)[0]
    assert all(math.isnan(chance) for chance in chances) == (shift != 0)
    assert shift or chances[0] == chances[1]


def test_equal_scores_have_no_interval_over_folds_nor_over_rows():
    folds = fold_interval([1.0, 1.0, 1.0], test_share=1 / 3)
    assert folds.mean == 1 and math.isnan(folds.low) and str(folds) == "1 (no interval from 3 equal scores)"
    for rows in (ratio_interval(np.ones(12)), statistic_interval(lambda rows: 1.0, 12, resamples=50)):
        assert rows.mean == 1 and math.isnan(rows.low) and math.isnan(rows.high)


def test_holm_by_hand_and_against_a_slow_loop():
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    p = np.random.default_rng(0).uniform(size=20) ** 3
    order = sorted(range(20), key=lambda i: p[i])
    slow = {i: max(min(1, (20 - r) * p[j]) for r, j in enumerate(order[: rank + 1])) for rank, i in enumerate(order)}
    assert adjust_holm(list(p)) == pytest.approx([slow[i] for i in range(20)])
    with_nan = adjust_holm([0.02, math.nan, 0.03])
    assert with_nan[0] == pytest.approx(0.04) and math.isnan(with_nan[1])


def test_rank_probabilities_of_two_trials_are_the_bayesian_test():
    rng = np.random.default_rng(3)
    table = rng.normal([0, 0.4], 1, size=(6, 2))
    pair = compare_folds(table[:, 0], table[:, 1], test_share=1 / 6)
    first, last = rank_probabilities(table, test_share=1 / 6, draws=200_000)
    assert first[0] == pytest.approx(pair.better, abs=0.005)
    assert last[0] == pytest.approx(pair.worse, abs=0.005)
    assert sum(first) == pytest.approx(1) and sum(last) == pytest.approx(1)


def test_equal_trials_share_their_rank():
    first, last = rank_probabilities([[1, 1, 1], [2, 2, 2], [4, 4, 4]], test_share=1 / 3)
    assert first == pytest.approx([1 / 3] * 3) and last == pytest.approx([1 / 3] * 3)


# Bootstrap


def test_bca_limits_equal_scipys_at_the_widened_level():
    values = np.random.default_rng(1).exponential(size=60)
    z = scipy_stats.t.ppf(0.975, 59) * math.sqrt(60 / 59)
    level = 1 - 2 * scipy_stats.norm.sf(z)
    theirs = scipy_stats.bootstrap(
        (values,), np.mean, n_resamples=40_000, confidence_level=level, method="BCa", rng=np.random.default_rng(0)
    ).confidence_interval
    ours = ratio_interval(values, resamples=40_000)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=0.01)
    slow = statistic_interval(lambda rows: float(values[rows].mean()), 60, resamples=10_000)
    assert (slow.low, slow.high) == pytest.approx((theirs.low, theirs.high), rel=0.02)


def test_a_jackknife_of_some_rows_gives_the_limits_of_one_of_all():
    """The acceleration falls as the root of the number of rows, also where 200 of them are left out to estimate it."""
    rng = np.random.default_rng(6)
    values = rng.exponential(size=5000)
    drawn = rng.normal(values.mean(), values.std() / math.sqrt(5000), 50_000)
    left_out = (values.sum() - values) / 4999
    low, high = _bca(values.mean(), drawn, left_out, 5000, 0.95)
    some = _bca(values.mean(), drawn, left_out[:200], 5000, 0.95)
    assert some == pytest.approx((low, high), abs=0.005 * (high - low))


def test_token_mean_is_a_ratio_of_sums_and_groups_move_together():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50, 200)
    sums = tokens * (1 + rng.normal(0, 0.3, 200))
    assert ratio_interval(sums, tokens).mean == pytest.approx(sums.sum() / tokens.sum())
    # Each row ten times over: by group the interval stays as it was, by row it would shrink by √10.
    grouped = ratio_interval(np.repeat(sums, 10), np.repeat(tokens, 10), groups=np.repeat(np.arange(200), 10))
    plain = ratio_interval(sums, tokens)
    assert (grouped.low, grouped.high) == pytest.approx((plain.low, plain.high), rel=1e-9)
    assert grouped.n == 200


def test_undefined_resamples_are_left_out():
    labels = np.array([0] * 30 + [1])
    one_class_only = statistic_interval(lambda rows: float(labels[rows].mean() or math.nan), 31, resamples=500)
    assert math.isfinite(one_class_only.low)


def least_squares_cv(rng, n=250, p=5, k=5):
    """Out-of-fold squared errors of a least-squares fit. Their expectation is known: σ² (1 + p / (n_train − p − 1))."""
    x = rng.normal(size=(n, p))
    y = x.sum(axis=1) + rng.normal(size=n)
    errors, folds = np.empty(n), np.array_split(rng.permutation(n), k)
    for held_out in folds:
        train = np.delete(np.arange(n), held_out)
        weights = np.linalg.lstsq(x[train], y[train], rcond=None)[0]
        errors[held_out] = (y[held_out] - x[held_out] @ weights) ** 2
    return errors, folds, 1 + p / (n * (k - 1) // k - p - 1)


def test_bootstrap_covers_the_truth_in_95_percent_of_cross_validations():
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(2000):
        errors, _, truth = least_squares_cv(rng)
        interval = ratio_interval(errors, resamples=1000, seed=seed)
        hits += interval.low <= truth <= interval.high
    assert 0.93 <= hits / 2000 <= 0.97


def test_group_bootstrap_covers_where_rows_of_a_group_are_alike():
    rng = np.random.default_rng(0)
    by_group = by_row = 0
    group = np.repeat(np.arange(60), 5)
    for seed in range(2000):
        losses = np.repeat(rng.normal(1, 0.5, 60), 5) + rng.normal(0, 0.3, 300)
        one = ratio_interval(losses, groups=group, resamples=1000, seed=seed)
        by_group += one.low <= 1 <= one.high
        if seed < 500:
            other = ratio_interval(losses, resamples=1000, seed=seed)
            by_row += other.low <= 1 <= other.high
    assert 0.93 <= by_group / 2000 <= 0.97
    assert by_row / 500 < 0.75


@pytest.mark.parametrize("k", [5, 10])
def test_fold_interval_covers_95_percent_where_folds_are_correlated_as_assumed(k):
    """Nadeau and Bengio assume a correlation n_test / n between fold scores; then the interval is exact."""
    rng = np.random.default_rng(0)
    rho = 1 / k
    hits = 0
    for _ in range(2000):
        scores = 3 + math.sqrt(rho) * rng.normal() + math.sqrt(1 - rho) * rng.normal(size=k)
        interval = fold_interval(scores, test_share=rho)
        hits += interval.low <= 3 <= interval.high
    assert 0.93 <= hits / 2000 <= 0.97


def test_fold_interval_is_on_the_safe_side_for_a_stable_learner():
    """Fold scores of a stable learner are hardly correlated: the corrected interval is wider than need be, never narrower."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        errors, folds, truth = least_squares_cv(rng)
        interval = fold_interval([errors[fold].mean() for fold in folds], test_share=1 / 5)
        hits += interval.low <= truth <= interval.high
    assert hits / 1000 >= 0.95


# Curves


def power_law(rng, rows, folds=5, level=1.0, slope=3.0, exponent=0.5, noise=0.01):
    rows = np.asarray(rows, dtype=float)
    return level + slope * rows**-exponent + rng.normal(0, 0.2, (folds, 1)) + rng.normal(0, noise, (folds, len(rows)))


def test_learning_curve_finds_a_known_power_law():
    rows = [100, 200, 400, 800, 1600, 3200]
    curve = fit_learning_curve(rows, power_law(np.random.default_rng(0), rows, noise=1e-4), test_share=0.2)
    truth = 3 * (6400**-0.5 - 3200**-0.5)
    assert curve.gain == pytest.approx(truth, rel=0.02)
    assert curve.exponent == pytest.approx(0.5, abs=0.03)
    assert curve.at(3200) == pytest.approx(curve.means[-1], abs=1e-3)
    assert curve.helps > 0.999


def test_learning_curve_interval_covers_and_a_flat_curve_promises_nothing():
    rng = np.random.default_rng(1)
    rows, truth = [200, 400, 800], 3 * (1600**-0.5 - 800**-0.5)
    curves = [fit_learning_curve(rows, power_law(rng, rows), test_share=0.2) for _ in range(200)]
    # Three sizes can't tell a bend from noise, and the correction for overlap widens: conservative, not exact.
    assert np.mean([c.low <= truth <= c.high for c in curves]) >= 0.93
    flat = [fit_learning_curve(rows, power_law(rng, rows, slope=0), test_share=0.2, rope=0.01) for _ in range(200)]
    assert np.mean([c.helps > 0.95 for c in flat]) <= 0.05


def test_epoch_choice_and_its_plateau():
    fold = np.array([[0.0], [0.5], [1.0], [0.2], [0.7]])
    wobble = np.random.default_rng(0).normal(0, 0.01, (5, 6))
    choice = choose_epoch(fold + np.array([3, 2, 1.5, 1.499, 1.501, 1.9]) + wobble, test_share=0.2)
    assert choice.best in (3, 4, 5) and (choice.first, choice.last) == (3, 5)
    assert "can't be told" in str(choice)
    clear = choose_epoch(fold + np.array([3.0, 1.0, 2.0]), test_share=0.2)
    assert (clear.best, clear.first, clear.last) == (2, 2, 2)
    accuracy = choose_epoch(-(fold + np.array([3.0, 1.0, 2.0])), test_share=0.2, higher_is_better=True)
    assert accuracy.best == 2
