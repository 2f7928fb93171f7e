"""Asking, telling and giving up."""

import math

import numpy as np
import pytest

from crosstune.recipe.recipe import Recipe
from crosstune.stats import compare_folds
from crosstune.sweep.pruning import Halving, Race
from crosstune.sweep.search import Budget, open_search
from crosstune.sweep.sweep import Sweep

RATES = {"train.learning_rate": {"log": [1e-5, 1e-1]}}


def recipe(**sweep):
    return Recipe.build({"model": "m", "data": "d.jsonl", "sweep": sweep})


def loss(trial):
    """A bowl with its bottom at a learning rate of 1e-3."""
    return (math.log10(trial.recipe.train.learning_rate) + 3) ** 2


def run_search(search, folds=1):
    tried = []
    while trial := search.ask():
        tried.append(trial)
        for fold in range(folds):
            search.report(trial.index, fold, 1, loss(trial), final=True)
        search.tell(trial.index, loss(trial))
    return tried


def test_tpe_repeats_with_its_seed_and_beats_random_draws():
    pytest.importorskip("optuna")
    found = [run_search(open_search(recipe(**RATES, kind="tpe", trials=40, seed=seed), folds=1)) for seed in (0, 0, 1)]
    assert [t.settings for t in found[0]] == [t.settings for t in found[1]] != [t.settings for t in found[2]]
    drawn = run_search(open_search(recipe(**RATES, kind="random", trials=40), folds=1))
    # After the random start TPE stays near the bottom.
    assert np.mean([loss(t) for t in found[0][20:]]) < np.mean([loss(t) for t in drawn[20:]]) / 4


def test_tpe_takes_lists_of_lists_and_whole_numbers():
    pytest.importorskip("optuna")
    sweep = {
        "lora.targets": ["all-linear", ["q_proj", "v_proj"]],
        "lora.rank": {"log": [4, 64]},
        "kind": "tpe",
        "trials": 12,
    }
    tried = run_search(open_search(recipe(**sweep), folds=1))
    assert {t.recipe.lora.targets for t in tried} == {"all-linear", ("q_proj", "v_proj")}
    assert all(isinstance(t.recipe.lora.rank, int) and 4 <= t.recipe.lora.rank <= 64 for t in tried)


def test_trials_asked_before_any_is_told_are_different():
    pytest.importorskip("optuna")
    search = open_search(recipe(**RATES, kind="tpe", trials=8), folds=1)
    assert len({search.ask().recipe.train.learning_rate for _ in range(8)}) == 8


def test_no_trial_starts_once_the_budget_is_spent():
    search = open_search(recipe(**RATES, trials=10, tokens=1000), folds=1)
    assert search.ask().index == 0
    search.budget.spent_tokens = 1000
    assert search.ask() is None and "tokens" in search.budget.why_spent()
    assert "hours" in Budget(hours=1.0, spent_seconds=3600).why_spent()


def feed(rule, table):
    """Fold by fold, as lanes finish; returns how many lanes ran."""
    lanes = 0
    for fold in range(table.shape[1]):
        living = [t for t in range(len(table)) if t not in rule.given_up()]
        for trial in living:
            rule.report(trial, fold, 1, table[trial, fold], final=True)
            lanes += 1
    return lanes


def test_halving_keeps_the_better_half_and_takes_less_than_half_the_lanes():
    table = np.arange(12)[:, None] + np.random.default_rng(0).normal(0, 0.01, (12, 5))
    rule = Halving(Sweep(prune="halving"), 12, 5)
    assert feed(rule, table) == 12 + 6 + 3 + 3 + 2
    assert set(rule.given_up()) == set(range(2, 12))
    assert rule.given_up()[11] == "in the worse half of 12 trials after 1 fold"
    best_high = Halving(Sweep(prune="halving"), 12, 5, higher_is_better=True)
    feed(best_high, table)
    assert set(best_high.given_up()) == set(range(10))


def test_halving_gives_up_none_that_equals_one_it_keeps():
    """Shares of right rows: 0.9, 0.8 and three times 0.7, of which one differs in the last bit."""
    rule = Halving(Sweep(prune="halving"), 6, 5, higher_is_better=True)
    for trial, score in enumerate([0.7, 0.1, 0.9, 7 * 0.1, 0.7, 0.8]):
        rule.report(trial, 0, 1, score, final=True)
    assert set(rule.given_up()) == {1}
    failing = Halving(Sweep(prune="halving"), 4, 5)
    for trial in range(4):
        failing.report(trial, 0, 1, math.nan if trial else 0.5, final=True)
    assert failing.given_up() == dict.fromkeys([1, 2, 3], "a lane failed")


def test_halving_waits_for_all_trials_and_for_prune_after():
    rule = Halving(Sweep(prune="halving", prune_after=2), 4, 5)
    for trial in range(3):
        for fold in range(2):
            rule.report(trial, fold, 1, float(trial), final=True)
    rule.report(3, 0, 1, 9.0, final=True)
    assert not rule.given_up()
    rule.report(3, 1, 1, 9.0, final=True)
    assert set(rule.given_up()) == {2, 3}


def test_scores_under_way_decide_nothing_between_folds():
    rule = Halving(Sweep(prune="halving"), 2, 5)
    rule.report(0, 0, 1, 1.0, final=False)
    rule.report(1, 0, 1, 2.0, final=False)
    assert not rule.given_up()


def test_race_gives_up_what_is_surely_worse_and_keeps_equals():
    rng = np.random.default_rng(0)
    fold = rng.normal(0, 0.3, 5)
    table = np.array([1.0, 1.0, 1.5, 3.0])[:, None] + fold + rng.normal(0, 0.01, (4, 5))
    rule = Race(Sweep(prune="race"), 4, 5)
    assert feed(rule, table) < 20
    assert set(rule.given_up()) == {2, 3} and "with probability" in rule.given_up()[3]


def test_race_allows_for_the_overlap_of_repeated_folds():
    """Ten folds that are two repeats of five: n_test/n_train is 1/4, not 1/9, by the test that compares two trials."""
    first = np.array([1.0, 1.2, 0.9, 1.1, 1.0])
    table = np.stack([first, first + 0.0178 + np.array([0.01, -0.01, 0.01, -0.01, 0.0])])
    worse = [compare_folds(table[1, :4], table[0, :4], test_share=share).worse for share in (1 / 5, 1 / 10)]
    assert worse[0] < 0.95 < worse[1], "a case in which it matters"
    sweep = {"train.seed": [0, 1], "prune": "race", "prune_after": 4, "equivalent": 0.0}
    given_up = []
    for share in (1 / 5, None):
        search = open_search(recipe(**sweep), folds=10, test_share=share)
        feed(search.rule, table[:, :4])
        given_up.append(set(search.given_up()))
    assert given_up == [set(), {1}]


def test_a_failed_lane_gives_its_trial_up():
    rule = Race(Sweep(prune="race"), 2, 5)
    rule.report(0, 0, 1, 1.0, final=True)
    rule.report(1, 0, 3, math.nan, final=True)
    assert rule.given_up() == {1: "a lane failed"}


def curves(search, quality, folds=5, evaluations=4):
    """Trials one after another, their folds side by side; returns trial → evaluations taken."""
    taken = {}
    while trial := search.ask():
        for evaluation in range(1, evaluations + 1):
            taken[trial.index] = evaluation
            for fold in range(folds):
                score = quality(trial.index) + 0.05 * fold + 1 / evaluation
                search.report(trial.index, fold, evaluation, score, final=evaluation == evaluations)
            if trial.index in search.given_up():
                break
        search.tell(trial.index, None if trial.index in search.given_up() else quality(trial.index))
    return taken


@pytest.mark.parametrize("prune", ["median", "percentile", "wilcoxon", "hyperband"])
def test_optunas_rules_stop_bad_trials_early_and_never_the_best(prune):
    pytest.importorskip("optuna")
    sweep = {"train.seed": list(range(12)), "prune": prune}
    # The first six are good and alike, the rest clearly bad.
    taken = curves(open_search(recipe(**sweep), folds=5), lambda trial: 1 + 0.01 * trial if trial < 6 else 3.0)
    assert taken[0] == 4
    if prune == "hyperband":
        assert sum(taken.values()) < 48
    else:
        assert all(taken[trial] == 1 for trial in range(6, 12))


@pytest.mark.parametrize("prune", ["median", "percentile", "wilcoxon", "hyperband"])
def test_the_same_scores_give_up_the_same_trials_each_time(prune):
    """A continued run walks through its journal to the same waves."""
    pytest.importorskip("optuna")
    asked = recipe(**{"train.seed": list(range(20)), "prune": prune})
    draw = np.random.default_rng(1).permutation(20)
    first, again = (curves(open_search(asked, folds=5), lambda trial: float(draw[trial])) for _ in range(2))
    assert first == again


def test_wilcoxon_compares_fold_by_fold():
    """Against scipy: five folds all worse than the best trial's at the same evaluation, p = 1/32 < 0.1."""
    pytest.importorskip("optuna")
    from scipy.stats import wilcoxon

    search = open_search(recipe(**{"train.seed": [0, 1, 2], "prune": "wilcoxon"}), folds=5)
    rng = np.random.default_rng(0)
    folds = rng.normal(0, 5, 5)
    for trial, gap in ((0, 0.0), (1, 0.2), (2, 0.2)):
        search.ask()
        noise = rng.normal(0, 0.05, 5) if trial == 1 else np.array([0.3, -0.6, 0.5, -0.4, 0.1]) * (trial == 2)
        scores = folds + gap + noise
        for fold in range(5):
            search.report(trial, fold, 1, scores[fold], final=False)
        p = wilcoxon(scores - folds, alternative="greater", zero_method="zsplit").pvalue
        assert (trial in search.given_up()) == (trial > 0 and p < 0.1)
        if trial == 0:
            search.tell(0, float(scores.mean()))
    assert set(search.given_up()) == {1}
