"""Which trials a sweep makes, and what it refuses."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from crosstune.data.questions import pick_examples
from crosstune.errors import RecipeError
from crosstune.recipe.options import list_options
from crosstune.recipe.recipe import Recipe
from crosstune.sweep.search import open_search
from crosstune.sweep.sweep import Sweep, Trial, expand, read_sweep, share_of_rows


def recipe(**sweep):
    return Recipe.build({"model": "m", "data": "d.jsonl", "sweep": sweep})


def test_no_sweep_is_one_trial_with_the_recipe_as_it_is():
    plain = recipe()
    assert expand(plain) == [Trial(0, {}, plain)]


def test_grid_is_every_combination_and_each_trial_a_whole_recipe():
    ranks, rates = [8, 16, 64], [1e-4, 2e-4]
    trials = expand(recipe(**{"lora.rank": ranks, "train.learning_rate": rates}))
    assert [(t.recipe.lora.rank, t.recipe.train.learning_rate) for t in trials] == list(itertools.product(ranks, rates))
    assert [t.index for t in trials] == list(range(6))
    assert trials[1].settings == {"lora.rank": 8, "train.learning_rate": 2e-4}
    assert all(not t.recipe.sweep and t.recipe.train.epochs == 3 for t in trials)


def test_settings_hold_only_what_differs():
    trials = expand(recipe(**{"lora.rank": [8, 16], "lora.alpha": [64]}))
    assert [t.settings for t in trials] == [{"lora.rank": 8}, {"lora.rank": 16}]
    assert all(t.recipe.lora.alpha == 64 for t in trials)
    assert trials[0].name == "lora.rank=8"


def test_nested_mapping_and_lists_of_layer_names():
    trials = expand(recipe(lora={"targets": ["all-linear", ["q_proj", "v_proj"]]}))
    assert [t.recipe.lora.targets for t in trials] == ["all-linear", ("q_proj", "v_proj")]


def test_random_draws_repeat_with_the_seed_and_stay_in_range():
    sweep = {
        "lora.rank": {"log": [4, 128]},
        "train.learning_rate": {"log": [1e-5, 1e-3]},
        "lora.dropout": {"uniform": [0, 0.2]},
    }
    first, again = expand(recipe(**sweep, trials=300)), expand(recipe(**sweep, trials=300))
    assert [t.settings for t in first] == [t.settings for t in again]
    assert [t.settings for t in expand(recipe(**sweep, trials=10))] == [t.settings for t in first[:10]]
    ranks = [t.recipe.lora.rank for t in first]
    rates = [t.recipe.train.learning_rate for t in first]
    assert all(isinstance(r, int) and 4 <= r <= 128 for r in ranks) and len(set(ranks)) > 20
    # A log-uniform draw has its median at the geometric mean of the ends.
    assert abs(math.log10(np.median(rates)) - -4) < 0.15
    assert min(rates) >= 1e-5 and max(rates) <= 1e-3


def test_whole_uniform_draws_reach_both_ends_as_often_as_the_middle():
    trials = expand(
        recipe(**{"train.seed": {"uniform": [1, 4]}, "train.learning_rate": {"uniform": [0, 1]}}, trials=4000)
    )
    counts = np.bincount([t.recipe.train.seed for t in trials])[1:]
    assert len(counts) == 4 and counts.min() > 900


def test_whole_log_draws_follow_the_law_at_both_ends_as_in_between():
    """P(k) is the share of [k − ½, k + ½) in the logarithm of [½, 8½), which is what Optuna draws from."""
    trials = expand(recipe(**{"lora.rank": {"log": [1, 8]}, "train.learning_rate": {"uniform": [0, 1]}}, trials=4000))
    counts = np.bincount([t.recipe.lora.rank for t in trials], minlength=9)[1:]
    law = np.diff(np.log(np.arange(0.5, 9))) / math.log(17)
    assert chisquare(counts, 4000 * law).pvalue > 0.01


@pytest.mark.parametrize("kind", ["random", "tpe"])
@pytest.mark.parametrize("seed", [-1, 2**40])
def test_any_whole_number_is_a_seed(kind, seed):
    pytest.importorskip("optuna")
    search = open_search(recipe(**{"lora.alpha": {"uniform": [1, 9]}}, kind=kind, seed=seed, trials=2), folds=2)
    assert 1 <= search.ask().recipe.lora.alpha <= 9
    assert len(pick_examples(range(5), 2, seed=seed, number=1)) == 2


def test_random_draws_from_lists_never_repeat():
    trials = expand(recipe(**{"lora.rank": [4, 8], "lora.alpha": [8, 16]}, kind="random", trials=50))
    assert len(trials) == 4


def test_train_share_is_a_learning_curve():
    trials = expand(recipe(train_share=[0.25, 0.5, 1.0]))
    assert [t.recipe.train.share for t in trials] == [0.25, 0.5, 1.0]
    rows = list(range(100, 180))
    quarter, half = share_of_rows(rows, 0.25, seed=1), share_of_rows(rows, 0.5, seed=1)
    assert len(quarter) == 20 and len(half) == 40 and set(quarter) < set(half) < set(rows)
    assert share_of_rows(rows, 1.0, seed=1) == tuple(rows)
    assert share_of_rows(rows, 0.5, seed=2) != half


@pytest.mark.parametrize(
    "sweep, words",
    [
        ({"lora.rnk": [8]}, "sweep.lora.rnk: unknown key; did you mean lora.rank"),
        ({"lr": [1e-4]}, "did you mean train.learning_rate"),
        ({"rank": [8]}, "did you mean lora.rank"),
        ({"trails": 3}, "did you mean trials"),
        ({"folds.k": [3, 5]}, "can't be swept"),
        ({"model.name": ["a", "b"]}, "can't be swept"),
        ({"lora.rank": [8, "many"]}, "lora.rank"),
        ({"lora.rank": [0]}, "sweep.lora.rank"),
        ({"lora.rank": 8}, "a list of values"),
        ({"lora.rank": []}, "a list of values"),
        ({"lora.alpha": {"log": [0, 1]}}, "starts above 0"),
        ({"lora.alpha": {"unifrom": [0, 1]}}, "did you mean uniform"),
        ({"lora.dropout": {"uniform": [0, 1]}}, "sweep.lora.dropout"),
        ({"lora.rank": {"uniform": [1.5, 8]}}, "both ends must be whole"),
        ({"lora.alpha": {"log": [8, 64]}, "kind": "tpe", "prune": "halving"}, "use kind: random, or prune: median"),
        (
            {"lora.alpha": [8, 16], "prune": "median", "metric": "accuracy"},
            "accuracy is measured when they are over; use prune: halving",
        ),
        (
            {"lora.alpha": [8, 16], "prune": "race", "hours": 2},
            "sweep.hours: with prune: race every trial starts at once",
        ),
        ({"lora.alpha": {"log": [8, 64]}, "kind": "grid"}, "use a list, or kind: random"),
        ({"kind": "bayes", "lora.rank": [8]}, "sweep.kind"),
    ],
)
def test_mistakes_are_named_with_their_fix(sweep, words):
    with pytest.raises(RecipeError) as caught:
        expand(recipe(**sweep))
    assert words in str(caught.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(RecipeError, match="3 mistakes"):
        read_sweep(recipe(**{"lora.rnk": [8], "lora.alpha": [-1], "trials": 0}))


def test_cases_are_the_trials_themselves():
    trials = expand(recipe(cases=[{}, {"lora.rank": 4}, {"lora": {"rank": 64}, "train.learning_rate": 1e-3}]))
    assert [t.settings for t in trials] == [{}, {"lora.rank": 4}, {"lora.rank": 64, "train.learning_rate": 1e-3}]
    assert [t.recipe.lora.rank for t in trials] == [16, 4, 64]
    for bad, words in [
        ({"cases": [{"lora.rnk": 4}]}, "did you mean lora.rank"),
        ({"cases": [{"lora.rank": 0}]}, "case 1: lora.rank"),
        ({"cases": [{"lora.rank": 4}], "lora.alpha": [8]}, "stand alone"),
    ]:
        with pytest.raises(RecipeError, match=words):
            expand(recipe(**bad))


def test_the_page_of_sweeps_lists_every_key_as_it_is():
    page = (Path(__file__).parent.parent / "docs" / "sweeps.md").read_text(encoding="utf-8")
    for option in list_options(Sweep):
        assert f"| `{option.name}` |" in page and option.description in page, option.name
