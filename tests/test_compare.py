"""What is claimed of trials, and how often it is claimed falsely."""

import math

import numpy as np
import pytest

from crosstune.errors import DataError
from crosstune.report.ranking_table import show_ranking
from crosstune.results.compare import Entry, rank_trials
from crosstune.stats import fold_interval
from crosstune.sweep.pruning import Halving, Race
from crosstune.sweep.sweep import Sweep


def entry(name, scores, **more):
    return Entry(name, dict(enumerate(scores)), **more)


def test_a_clear_winner_is_claimed_and_said():
    base = np.array([1.0, 1.2, 0.9, 1.1, 1.05])
    wobble = np.array([0.001, -0.002, 0.0, 0.002, -0.001])
    ranking = rank_trials([entry("rank 8", base + 0.3 + wobble), entry("rank 16", base)], test_share=0.2)
    assert [place.name for place in ranking.places] == ["rank 16", "rank 8"]
    assert ranking.places[1].verdict == "worse" and ranking.places[1].last > 0.95
    assert ranking.sentence.startswith("rank 16 (loss 1.05") and "better than rank 8" in ranking.sentence


def test_equal_trials_are_called_equivalent_and_noisy_ones_unclear():
    base = np.array([1.0, 1.2, 0.9, 1.1, 1.05])
    tiny = rank_trials([entry("a", base), entry("b", base + np.array([1, -1, 0, 2, 1]) * 1e-4)], test_share=0.2)
    assert tiny.places[1].verdict == "equivalent" and "as good as b" in tiny.sentence
    noisy = rank_trials([entry("a", base), entry("b", base + np.array([4, -4, 2, -1, 2]) * 0.05)], test_share=0.2)
    assert noisy.places[1].verdict == "unclear" and noisy.sentence.startswith("No setting is shown to be better")


def test_higher_is_better_turns_the_ranking_round():
    scores = [entry("a", [0.5, 0.52, 0.51]), entry("b", [0.8, 0.81, 0.82])]
    assert rank_trials(scores, metric="accuracy", test_share=1 / 3, higher_is_better=True).places[0].name == "b"
    assert rank_trials(scores, metric="loss", test_share=1 / 3).places[0].name == "a"


def test_a_trial_given_up_early_is_compared_on_its_folds_and_never_first():
    # Fold 0 is easy: on it alone b looks best by its mean, but a is better there too.
    ranking = rank_trials([entry("a", [0.1, 1.0, 1.1]), entry("b", [0.2])], test_share=1 / 3)
    assert [place.name for place in ranking.places] == ["a", "b"]
    assert "fewer folds" in ranking.warnings[0]
    assert ranking.to_rows()[1]["behind_best"] == pytest.approx(0.1)


def test_failed_trials_and_other_rows_are_listed_and_not_compared():
    ranking = rank_trials(
        [entry("a", [1, 2, 3], folds_key="x"), entry("b", [2, 3, 4.1], folds_key="x"), entry("c", [0, 0, 0], folds_key="y"),
         entry("d", [math.nan, math.nan])], test_share=1 / 3,
    )  # fmt: skip
    assert [(p.name, p.verdict) for p in ranking.places][2:] == [("c", "other rows"), ("d", "failed")]
    assert any("other held-out rows" in warning for warning in ranking.warnings)
    with pytest.raises(DataError):
        rank_trials([entry("d", [math.nan])], test_share=0.2)


def test_every_trials_interval_ends_where_the_metric_does():
    scores = [0.9, 1.0, 1.0]
    entries = [
        entry("a", scores, folds_key="x"),
        entry("b", [0.1, 0.0, 0.0], folds_key="x"),
        entry("c", scores, folds_key="y"),
    ]
    wide = fold_interval(scores, test_share=1 / 3)
    assert wide.high > 1
    for metric, ends in (("accuracy", (0.0, 1.0)), ("mine.py:score", (1 - wide.high, wide.high))):
        ranking = rank_trials(entries, metric=metric, test_share=1 / 3, higher_is_better=True)
        a, b, c = (place.interval for place in ranking.places)
        assert (a.high, c.high) == (ends[1], ends[1]) and b.low == pytest.approx(ends[0])
        assert a.low == c.low == wide.low and b.high == pytest.approx(1 - wide.low)


def test_every_trials_interval_has_the_confidence_that_was_asked_for():
    scores = [1.0, 1.2, 0.9]
    ranking = rank_trials(
        [entry("a", scores), entry("b", [2 * one for one in scores])], test_share=1 / 3, confidence=0.8
    )
    a, b = (place.interval for place in ranking.places)
    assert a == fold_interval(scores, test_share=1 / 3, confidence=0.8)
    assert (b.low, b.high) == pytest.approx((2 * a.low, 2 * a.high))


def test_one_trial_and_one_fold_claim_nothing():
    assert "never seen" in rank_trials([entry("a", [1, 2, 3])], test_share=1 / 3).sentence
    assert "luck" in rank_trials([entry("a", [1.0]), entry("b", [2.0])], test_share=1 / 3).sentence


def test_brackets_in_a_trials_name_are_printed(capsys):
    names = ["targets=[q_proj,v_proj]", "targets=[all]"]
    ranking = rank_trials([entry(name, [1.0, 1.1, 1.2]) for name in names], test_share=0.2)
    show_ranking(ranking.to_json(), ranking.metric, ranking.sentence, ranking.warnings)
    words = "".join(capsys.readouterr().out.split())
    assert all(name in words for name in names)


def noise_trial(rows, targets, folds, seed):
    """A learner whose result depends on its seed (random features), taught pure noise: all seeds are equally good."""
    features = np.tanh(rows @ np.random.default_rng(seed).normal(size=(rows.shape[1], 12)))
    scores = []
    for held_out in folds:
        train = np.delete(np.arange(len(rows)), held_out)
        inner = features[train].T @ features[train] + np.eye(12)
        weights = np.linalg.solve(inner, features[train].T @ targets[train])
        scores.append(float(np.mean((targets[held_out] - features[held_out] @ weights) ** 2)))
    return scores


@pytest.mark.parametrize("trials", [2, 8])
def test_false_alarms_on_noise_are_at_most_5_percent_of_200_sweeps(trials):
    alarms = 0
    for sweep in range(200):
        rng = np.random.default_rng(sweep)
        rows, targets = rng.normal(size=(100, 6)), rng.normal(size=100)
        folds = np.array_split(rng.permutation(100), 5)
        entries = [entry(f"seed {s}", noise_trial(rows, targets, folds, 1000 * sweep + s)) for s in range(trials)]
        ranking = rank_trials(entries, test_share=0.2, equivalent=0.0)
        alarms += any(place.verdict == "worse" for place in ranking.places)
    assert alarms <= 10


@pytest.mark.parametrize("folds, rows, trials", [(2, 10, 2), (2, 10, 8), (3, 10, 8), (5, 4, 2)])
def test_false_alarms_of_a_metric_that_counts_few_rows_are_at_most_5_percent(folds, rows, trials):
    """Shares of 10 right rows are often equally far apart on both folds: no spread, which is no certainty."""
    alarms = 0
    for sweep in range(200):
        rng = np.random.default_rng(sweep)
        chance = rng.uniform(0.3, 1, size=(folds, rows))
        entries = [entry(f"{t}", (rng.uniform(size=(folds, rows)) < chance).mean(axis=1)) for t in range(trials)]
        ranking = rank_trials(entries, metric="exact_match", test_share=1 / folds, higher_is_better=True)
        alarms += any(place.verdict in ("worse", "equivalent") for place in ranking.places)
    assert alarms <= 10


def test_a_difference_without_spread_is_said_and_nothing_is_claimed():
    ranking = rank_trials(
        [entry("a", [0.9, 0.8, 0.7]), entry("b", [0.8, 0.7, 0.6])], test_share=1 / 3, higher_is_better=True
    )
    assert ranking.places[1].verdict == "unclear" and "no test can judge" in ranking.warnings[0]
    assert ranking.sentence.startswith("No setting is shown to be better: a has the highest loss 0.8")


def test_losses_over_other_tokens_are_listed_and_not_compared():
    """A tokenizer that cuts rows finer has a lower loss a token for the same text: no ranking across the two."""
    ranking = rank_trials(
        [entry("a", [1.0, 1.2, 1.1], folds_key="x", tokens_key="llama"), entry("b", [0.5, 0.6, 0.55], folds_key="x", tokens_key="bytes"),
         entry("c", [0.1, 0.1, 0.1], folds_key="y", tokens_key="llama")], test_share=1 / 3,
    )  # fmt: skip
    assert [(p.name, p.verdict) for p in ranking.places] == [("a", "best"), ("b", "other tokens"), ("c", "other rows")]
    assert "b" not in ranking.sentence and any("tokenizer" in warning for warning in ranking.warnings)


def test_chances_of_being_first_are_those_of_the_trials_that_went_all_the_way():
    """A trial given up after one fold takes no trial's chances away."""
    whole = [entry("a", [1.0, 1.2, 0.9, 1.1]), entry("b", [1.1, 1.15, 0.95, 1.3])]
    alone = rank_trials(whole, test_share=0.25)
    beside = rank_trials([*whole, entry("c", [2.0], note="given up")], test_share=0.25)
    assert [p.first for p in beside.places[:2]] == [p.first for p in alone.places] and alone.places[0].first > 0.5
    assert math.isnan(beside.places[2].first)


def test_who_lacks_a_hard_fold_is_not_the_best_for_it():
    """Every trial has lost a lane; b is worse on each fold that both have, and has the lower mean."""
    a = Entry("a", {0: 3.0, 1: 1.0, 2: 1.1, 3: 1.2})
    b = Entry("b", {1: 1.1, 2: 1.21, 3: 1.32, 4: 0.9})
    ranking = rank_trials([b, a], test_share=0.2)
    assert ranking.places[0].name == "a" and ranking.places[1].versus.difference.mean == pytest.approx(-0.11)


@pytest.mark.parametrize("kind, name", [(Halving, "halving"), (Race, "race")])
def test_false_alarms_of_trials_that_were_given_up_are_at_most_5_percent(kind, name):
    """They are judged on the very folds for which they went; trials are alike, folds correlated as the test assumes."""
    alarms = gone = 0
    for sweep in range(200):
        rng = np.random.default_rng(sweep)
        own = math.sqrt(0.2) * rng.normal(size=(8, 1)) + math.sqrt(0.8) * rng.normal(size=(8, 5))
        losses = 2 + rng.normal(0, 0.3, 5) + 0.1 * own
        rule, scores = kind(Sweep(prune=name, equivalent=0.0), 8, 5), [{} for _ in range(8)]
        for fold in range(5):
            for trial in set(range(8)) - set(rule.given_up()):
                scores[trial][fold] = losses[trial, fold]
            for trial in [trial for trial in range(8) if fold in scores[trial]]:
                rule.report(trial, fold, 1, losses[trial, fold], final=True)
        gone += len(rule.given_up())
        ranking = rank_trials([Entry(f"{t}", scores[t]) for t in range(8)], test_share=0.2, equivalent=0.0)
        alarms += any(place.verdict == "worse" for place in ranking.places)
    assert alarms <= 10 < gone
