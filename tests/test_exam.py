"""Cross-validation with metrics beyond the loss, sweeps and pruning, on the tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crosstune.crossval import cross_validate
from crosstune.errors import CrosstuneError
from crosstune.metrics.text import exact_match
from crosstune.nested import Nested, OuterFold, nested_cross_validate
from crosstune.progress import Quiet
from crosstune.report.score_table import show_scores
from crosstune.results.result import Result
from crosstune.results.scores import fold_scores, held_out_share_of, metric_summaries, right_and_chances
from crosstune.stats import fold_interval
from crosstune.store.run import Run

WORDS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """30 rows whose answer is one of three words, told by the prompt."""
    file = tmp_path_factory.mktemp("rows") / "colours.jsonl"
    things = ("sky", "leaf", "rose", "sea", "grass", "brick")
    rows = [
        {"prompt": f"{things[i % 6]} {i}: ", "completion": WORDS[(1, 2, 0)[i % 3]], "colour": WORDS[(1, 2, 0)[i % 3]]}
        for i in range(30)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def recipe(tiny, rows, out, **more):
    tree = {
        "model": str(tiny), "data": str(rows), "output": str(out), "folds": {"k": 3}, "lora": {"rank": 4},
        "train": {"epochs": 2, "learning_rate": 0.01, "batch_size": 4}, "device": {"kind": "cpu", "precision": "fp32", "lanes": 3},
    }  # fmt: skip
    for name, value in more.items():
        tree[name] = {**tree.get(name, {}), **value}
    return tree


def run(tree):
    return cross_validate(tree, progress=Quiet())


@pytest.fixture(scope="module")
def examined(tiny, colours, tmp_path_factory):
    metrics = ["loss", "exact_match", "chrf", "accuracy", "log_loss", "roc_auc"]
    evaluate = {"metrics": metrics, "labels": "colour", "shots": 2, "max_new_tokens": 8}
    out = tmp_path_factory.mktemp("run") / "r"
    return run(recipe(tiny, colours, out, evaluate=evaluate, train={"epochs": 4, "learning_rate": 3e-3}))


def test_every_metric_is_there_for_every_fold_pooled_and_for_both_baselines(examined):
    trial = examined.trials[0]
    for name in ("loss", "exact_match", "chrf", "accuracy", "log_loss", "roc_auc"):
        summary = trial["metrics"][name]
        assert summary["folds"] == 3 and summary["mean"] == pytest.approx(np.mean([f[name] for f in trial["folds"]]))
        low, high = summary["pooled_interval95"]
        assert low <= summary["pooled"] <= high or name == "chrf"
        assert math.isfinite(examined.report["baselines"]["base"][name])
        assert math.isfinite(examined.report["baselines"]["few-shot"][name])
    assert examined.report["labels"] == sorted(WORDS)
    assert np.sum(trial["confusion"]) == 30 and sum(b["rows"] for b in trial["calibration"]) == 30
    assert trial["metrics"]["loss"]["pooled"] < examined.report["baselines"]["base"]["loss"]
    assert "never seen" in examined.report["conclusion"]


def test_scores_are_those_of_the_kept_answers(examined):
    place = Run.read(examined.run)
    for fold in range(3):
        marks = place.read_lane_rows(0, fold, "answers.parquet")
        scores = fold_scores(place)[0]
        assert scores["exact_match"][fold] == np.mean(
            [exact_match(a, w) for a, w in zip(marks["answer"], marks["wanted"], strict=True)]
        )
        right, chances = right_and_chances(marks)
        assert chances.sum(1) == pytest.approx(np.ones(len(right)))
        assert scores["accuracy"][fold] == pytest.approx((chances.argmax(1) == right).mean())
        assert set(marks["wanted"]) <= set(WORDS)


def test_reading_gives_the_same_result(examined):
    again = Result.read(examined.run)
    assert again.report["trials"] == examined.report["trials"]
    assert json.loads(json.dumps(again.to_json(), allow_nan=False))["best"] == 0


def test_a_sweep_ranks_a_learning_rate_of_zero_last(tiny, colours, tmp_path):
    sweep = {"train.learning_rate": [0.01, 0.0, 0.003]}
    result = run(recipe(tiny, colours, tmp_path / "r", sweep=sweep, folds={"k": 5}, device={"lanes": 8}))
    ranking = result.report["ranking"]
    assert ranking[-1]["name"] == "learning_rate=0" and ranking[-1]["p_last"] > 0.95
    assert ranking[-1]["verdict"] == "worse"
    assert (
        result.best["settings"]["train.learning_rate"]
        == result.trials[result.report["best"]]["settings"]["train.learning_rate"]
    )
    assert "better than" in result.report["conclusion"]


def first_letter(predicted, wanted):
    """Share of answers that begin with the right letter."""
    return [float(p[:1] == w[:1]) for p, w in zip(predicted, wanted, strict=True)]


def test_a_function_can_be_a_metric_and_rank_a_sweep(tiny, colours, tmp_path):
    evaluate = {"metrics": ["loss", first_letter], "max_new_tokens": 4}
    name = "tests.test_exam:first_letter"
    sweep = {"train.learning_rate": [0.0, 3e-3], "metric": name}
    result = run(
        recipe(tiny, colours, tmp_path / "r", evaluate=evaluate, sweep=sweep, train={"epochs": 6}, device={"lanes": 6})
    )
    marks = Run.read(result.run).read_lane_rows(1, 0, "answers.parquet")
    score = np.mean(first_letter(marks["answer"], marks["wanted"]))
    assert result.trials[1]["folds"][0][name] == pytest.approx(score)
    assert result.report["ranking"][0][name] == max(trial["metrics"][name]["mean"] for trial in result.trials)
    with pytest.raises(CrosstuneError, match="can't be found again"):
        run(recipe(tiny, colours, tmp_path / "s", evaluate={"metrics": [lambda p, w: 0.0]}))


def lane_steps(folder):
    place = Run.read(folder)
    finished = sum(event["steps"] for event in place.finished_lanes().values())
    return finished + sum(event["step"] for event in place.events("lane_given_up"))


def test_halving_takes_fewer_lanes_and_finds_the_same_winner(tiny, colours, tmp_path):
    sweep = {"train.learning_rate": [0.02, 1e-5, 1e-4, 1e-3, 3e-5, 3e-4]}
    full = run(recipe(tiny, colours, tmp_path / "full", sweep=sweep, folds={"k": 5}, device={"lanes": 6}))
    pruned = run(
        recipe(
            tiny, colours, tmp_path / "pruned", sweep={**sweep, "prune": "halving"}, folds={"k": 5}, device={"lanes": 6}
        )
    )
    assert pruned.report["best"] == full.report["best"]
    assert lane_steps(tmp_path / "pruned") <= lane_steps(tmp_path / "full") / 2
    gone = [trial for trial in pruned.trials if trial["given_up"]]
    assert len(gone) >= 4 and all("worse half" in trial["given_up"] for trial in gone)


def test_optunas_rule_ends_lanes_under_way(tiny, colours, tmp_path):
    pytest.importorskip("optuna")
    sweep = {"train.learning_rate": [0.02, 0.02, 0.02, 1e-6, 1e-6], "prune": "wilcoxon"}
    result = run(recipe(tiny, colours, tmp_path / "r", sweep=sweep, folds={"k": 5}, device={"lanes": 5}))
    place = Run.read(result.run)
    ended = {(event["trial"], event["fold"]) for event in place.events("lane_given_up")}
    assert {trial for trial, _ in ended} == {3, 4} and len(ended) == 10
    assert all(event["step"] < 12 for event in place.events("lane_given_up"))
    assert place.is_finished and result.report["best"] in (0, 1, 2)


@pytest.mark.parametrize("prune", ["median", "hyperband", "wilcoxon"])
def test_a_continued_run_gives_up_the_same_trials_under_way(tiny, colours, tmp_path, prune):
    pytest.importorskip("optuna")
    rates = [0.02, 0.01, 1e-6, 1e-5, 0.005, 1e-6, 1e-4, 1e-6]
    train, sweep = {"epochs": 4}, {"train.learning_rate": rates, "prune": prune}
    asked = recipe(tiny, colours, tmp_path / "r", sweep=sweep, train=train, device={"lanes": 7})
    whole = run(asked)
    place = Run.read(tmp_path / "r")
    ended = {(e["trial"], e["fold"]): e["step"] for e in place.events("lane_given_up")}
    journal = tmp_path / "r" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    waves = [i for i, line in enumerate(lines) if '"wave_finished"' in line]
    for kept in (waves[0], waves[1] - 1, waves[2] - 4):  # after a wave, and inside of two
        journal.write_text("".join(lines[: kept + 1]))
        again = run(asked)
        assert again.trials == whole.trials
        known = Run.read(tmp_path / "r").events("lane_given_up")
        assert {(e["trial"], e["fold"]): e["step"] for e in known} == ended
    assert ended or prune == "hyperband"


def test_waves_hold_whole_trials_where_trials_end_under_way(tiny, colours, tmp_path):
    """A rule judges a trial when all its folds are scored, and a given-up lane's slot is padding until its wave ends."""
    pytest.importorskip("optuna")
    sweep = {"train.learning_rate": [0.02, 0.01, 1e-6]}
    for lanes, prune, want in (
        (5, "wilcoxon", [[0, 0, 0], [1, 1, 1], [2, 2, 2]]),
        (7, "median", [[0, 0, 0, 1, 1, 1], [2, 2, 2]]),
        (2, "median", [[0, 0], [0, 1], [1, 1], [2, 2], [2]]),  # no trial fits
        (5, "none", [[0, 0, 0, 1, 1], [1, 2, 2, 2]]),
    ):
        asked = recipe(
            tiny, colours, tmp_path / f"{prune}-{lanes}", sweep={**sweep, "prune": prune}, device={"lanes": lanes}
        )
        waves = Run.read(run(asked | {"folds": {"k": 3}}).run).events("wave_finished")
        assert [[trial for trial, _ in wave["lanes"]] for wave in waves] == want


def test_tpe_runs_and_a_continued_run_asks_for_the_same_trials(tiny, colours, tmp_path):
    pytest.importorskip("optuna")
    sweep = {"train.learning_rate": {"log": [1e-4, 1e-1]}, "kind": "tpe", "trials": 4, "seed": 3}
    result = run(recipe(tiny, colours, tmp_path / "r", sweep=sweep))
    assert len(result.trials) == 4 and len({t["settings"]["train.learning_rate"] for t in result.trials}) == 4
    # Cut the journal after the second trial's lanes, as a killed run would leave it.
    journal = tmp_path / "r" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    waves = [i for i, line in enumerate(lines) if '"wave_finished"' in line]
    journal.write_text("".join(lines[: waves[1] + 1]))
    again = run(recipe(tiny, colours, tmp_path / "r", sweep=sweep))
    assert [t["settings"] for t in again.trials] == [t["settings"] for t in result.trials]
    assert [t["folds"] for t in again.trials] == [t["folds"] for t in result.trials]


def test_a_smaller_share_trains_on_fewer_rows(tiny, colours, tmp_path):
    result = run(recipe(tiny, colours, tmp_path / "r", sweep={"train_share": [0.25, 0.5, 1.0]}, device={"lanes": 9}))
    events = Run.read(result.run).finished_lanes()
    assert [events[trial, 0]["train_rows"] for trial in range(3)] == [5, 10, 20]


@pytest.mark.parametrize(
    "more, words",
    [
        ({"evaluate": {"metrics": ["exact_matsch"]}}, "exact_match"),
        ({"evaluate": {"metrics": ["accuracy"], "labels": "color"}}, "no column 'color'"),
        ({"evaluate": {"metrics": ["accuracy"], "labels": ["purple", "pink"]}}, "no row's answer"),
        ({"sweep": {"lora.rank": [2, 4], "metric": "accuracy"}}, "add it to evaluate.metrics"),
        ({"sweep": {"lora.rank": [2, 4], "metric": "acuracy"}}, "accuracy"),
        (
            {
                "sweep": {"lora.rank": [2, 4], "metric": "roc_auc"},
                "evaluate": {"metrics": ["roc_auc"]},
                "folds": {"kind": "group", "group": "colour"},
            },
            "roc_auc has no value on fold 0, whose 10 held-out row.s. have (red|blue|green) only",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tiny, colours, tmp_path, more, words):
    with pytest.raises(CrosstuneError, match=words):
        run(recipe(tiny, colours, tmp_path / "r", **more))
    assert not (tmp_path / "r").exists()


def test_nested_cross_validation_scores_the_choice_on_rows_it_never_saw(tiny, colours, tmp_path):
    tree = recipe(tiny, colours, tmp_path / "n", sweep={"train.learning_rate": [0.01, 0.0]}, folds={"k": 2, "outer": 2})
    nested = nested_cross_validate(tree, progress=Quiet())
    assert [fold.rows for fold in nested.folds] == [15, 15]
    assert all(fold.settings == {"train.learning_rate": 0.01} for fold in nested.folds)
    assert nested.interval.mean == pytest.approx(np.mean([fold.scores["loss"] for fold in nested.folds]))
    seen = []
    for fold in range(2):
        inner = Run.read(tmp_path / "n" / f"outer-{fold}").read_folds()["row"].tolist()
        outside = Run.read(tmp_path / "n" / f"outer-{fold}-chosen-0").read_folds()["row"].tolist()
        assert not set(inner) & set(outside) and len(inner) == 15, "no choice has seen the rows it is scored on"
        seen += outside
    assert sorted(seen) == list(range(1, 31))
    again = nested_cross_validate(**tree, progress=Quiet())
    assert again.to_json() == nested.to_json()
    assert "every outer fold chose train.learning_rate=0.01" in nested.sentence
    with pytest.raises(CrosstuneError, match="nested_cross_validate"):
        run(tree)


def test_a_nested_interval_ends_where_its_metric_does(tiny, colours, tmp_path):
    sweep = {"train.learning_rate": [0.01, 0.0], "metric": "token_accuracy"}
    nested = nested_cross_validate(
        recipe(tiny, colours, tmp_path / "n", sweep=sweep, folds={"k": 2, "outer": 2}), progress=Quiet()
    )
    wide = fold_interval([fold.scores["token_accuracy"] for fold in nested.folds], test_share=0.5)
    assert wide.low < 0 and wide.high > 1
    assert nested.interval == replace(wide, low=0.0, high=1.0)


def test_a_metrics_interval_over_folds_ends_where_it_does_and_a_functions_own_nowhere(examined):
    run, own = Run.read(examined.run), "tests.test_exam:first_letter"
    values = {0: 0.1, 1: 1.0, 2: 1.0}
    scores = dict.fromkeys(("accuracy", "token_accuracy", "exact_match", "chrf", own), values)
    found = {name: summary["interval95"] for name, summary in metric_summaries(run, 0, scores).items()}
    wide = fold_interval(list(values.values()), test_share=held_out_share_of(run))
    assert wide.low < 0 and wide.high > 1
    assert found["accuracy"] == found["token_accuracy"] == found["exact_match"] == [0.0, 1.0]
    assert found["chrf"] == [0.0, pytest.approx(wide.high)]
    assert found[own] == pytest.approx([wide.low, wide.high])


def test_rows_that_answer_none_of_the_labels_are_named_and_left_out(tiny, colours, tmp_path):
    said = []
    progress = Quiet()
    progress.say = said.append
    tree = recipe(
        tiny,
        colours,
        tmp_path / "r",
        evaluate={"metrics": ["accuracy"], "labels": ["red", "blue"]},
        train={"epochs": 1},
    )
    result = cross_validate(tree, progress=progress)
    assert "10 of 30 rows answer none of evaluate.labels, such as row 2: metrics of choices leave them out" in said
    assert np.sum(result.trials[0]["confusion"]) == 20


def test_a_metric_without_a_value_on_a_fold_is_left_out_of_its_mean(tiny, colours, tmp_path):
    """Fold 0 holds the red rows only, so that it has no ROC curve; the other two have."""
    lines = [json.loads(line) for line in colours.read_text().splitlines()]
    parts = [0 if line["colour"] == "red" else 1 + i % 2 for i, line in enumerate(lines)]
    file = tmp_path / "parts.jsonl"
    file.write_text("".join(json.dumps(line | {"part": part}) + "\n" for line, part in zip(lines, parts, strict=True)))
    folds, evaluate = {"kind": "column", "by": "part"}, {"metrics": ["loss", "roc_auc"], "labels": "colour"}
    result = run(recipe(tiny, file, tmp_path / "r", folds=folds, evaluate=evaluate, train={"epochs": 1}))
    scores = [fold["roc_auc"] for fold in result.trials[0]["folds"]]
    assert scores[0] is None and result.trials[0]["metrics"]["roc_auc"]["mean"] == pytest.approx(np.mean(scores[1:]))
    assert Result.read(result.run).report == result.report
    show_scores(result.report)


def test_nested_winners_that_looked_worse_within_are_said_to():
    for inner, words in ((0.9, "looked better by 0.1."), (1.2, "looked worse by 0.2.")):
        folds = tuple(OuterFold(f, {"lora.rank": 8}, inner, {"loss": 1.0 + f / 10 - 0.05}, 10) for f in range(2))
        nested = Nested(Path("n"), "loss", folds, fold_interval([0.95, 1.05], test_share=0.5))
        assert words in nested.sentence and "every outer fold chose lora.rank=8" in nested.sentence


def test_a_metric_without_a_value_on_an_outer_fold_is_no_traceback(tiny, colours, tmp_path):
    """Rows of one colour are set aside; the choice itself is by folds that hold both others."""
    tree = recipe(
        tiny, colours, tmp_path / "n", evaluate={"metrics": ["roc_auc"], "labels": "colour"}, train={"epochs": 1},
        sweep={"train.learning_rate": [0.01], "metric": "roc_auc"}, folds={"kind": "column", "by": "part", "outer": 2},
    )  # fmt: skip
    lines = [json.loads(line) for line in colours.read_text().splitlines()]
    for i, line in enumerate(lines):
        line["part"] = 0 if line["colour"] == "red" else 1 + i % 2
    file = tmp_path / "parts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CrosstuneError, match="roc_auc has no value on the 10 rows of outer fold 0"):
        nested_cross_validate({**tree, "data": str(file)}, progress=Quiet())
