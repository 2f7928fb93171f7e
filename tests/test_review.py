"""What a finished run says: suspects, learning curve, epochs, comparison of runs. Run folders are made by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from crosstune.cli import main
from crosstune.crossval import _write_groups
from crosstune.data.load import load_rows
from crosstune.errors import RunError
from crosstune.fitting.fitted import expected_of
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data, Folds
from crosstune.report.report import hardest_rows, report_page
from crosstune.report.score_table import show_scores
from crosstune.results.result import Result, write_out_of_fold
from crosstune.results.review import compare_runs, epoch_choice, learning_curve, review_rows, say_learning_curve
from crosstune.results.scores import group_of, pool_losses, record_pooled
from crosstune.results.suspects import read_row_numbers
from crosstune.store.run import Run
from crosstune.sweep.sweep import Trial

ROWS, FOLDS = 60, 5


def made_rows(tmp_path):
    """60 questions; 3 and 4 ask the same and answer otherwise."""
    rows = [{"prompt": f"What is {n} times {n}?", "completion": f"It is {n * n}."} for n in range(1, ROWS + 1)]
    rows[3] = {"prompt": "what is 3  times 3 ?", "completion": "I would rather not say"}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(file, Data(path=str(file)))


def make_run(
    folder, rows, losses, *, settings=None, curves=None, train_rows=48, finish=True, failed=(), optimistic=(), **more
):
    """A run whose lane (trial, fold) has these held-out losses: losses[trial, fold]."""
    recipe = Recipe.build({"model": "m", "data": rows.name, "output": str(folder), **more})
    numbers = [row.number for row in rows.rows]
    rng = np.random.default_rng(0)
    with Run.open(folder, recipe=recipe, data_hashes=rows.hashes, rows=numbers) as run:
        fold_of = np.arange(ROWS) % FOLDS
        run.write_folds({"row": numbers, "fold": fold_of})
        listed = settings or [{"lora.rank": 8 * (t + 1)} for t in range(len(losses))]
        run.record("trials", trials=[{"trial": t, "settings": s} for t, s in enumerate(listed)])
        for trial in range(len(losses)):
            for fold in range(FOLDS):
                held = [n for n, f in zip(numbers, fold_of, strict=True) if f == fold]
                tokens = np.full(len(held), 10)
                nll = 10 * losses[trial][fold] + rng.normal(0, 0.5, len(held))
                nll[[n == 4 for n in held]] += 60
                run.write_lane_rows(trial, fold, {
                    "row": np.array(held), "tokens": tokens, "nll": nll, "hits": tokens // 2, "base_nll": nll + 5, "base_hits": tokens // 4,
                })  # fmt: skip
                for epoch, loss in enumerate(curves[trial][fold] if curves is not None else [], start=1):
                    run.record("lane_evaluated", trial=trial, fold=fold, step=epoch, epoch=float(epoch), loss=loss)
                if (trial, fold) in failed:
                    run.record("lane_failed", trial=trial, fold=fold, reason="loss nan", step=1)
                    continue
                size = train_rows[trial] if isinstance(train_rows, list) else train_rows
                run.record(
                    "lane_finished", trial=trial, fold=fold, loss=float(losses[trial][fold]), perplexity=math.exp(losses[trial][fold]),
                    token_accuracy=0.5, nll=float(nll.sum()), rows=len(held), tokens=int(tokens.sum()), base_loss=3.0,
                    train_rows=size, optimistic=trial in optimistic, steps=10, step=10, losses=[],
                )  # fmt: skip
        if finish:
            record_pooled(run)
            review_rows(run, rows, say=lambda text: None)
            run.record("run_finished", failed=len(failed))
    return folder


def test_a_run_ranks_pools_and_lists_its_suspects(tmp_path):
    rows = made_rows(tmp_path)
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0], [1.5, 1.7, 1.4, 1.6, 1.51]])
    result = Result.read(make_run(tmp_path / "run", rows, losses))
    assert (
        result.report["best"] == 0
        and "rank=8" in result.report["conclusion"]
        and "better than rank=16" in result.report["conclusion"]
    )
    summary = result.trials[0]["metrics"]["loss"]
    low, high = summary["pooled_interval95"]
    assert low < summary["pooled"] < high
    suspects = result.suspects()
    assert suspects[0].row == 4 and set(suspects[0].kinds) == {"loss", "conflict"}
    assert {s.row for s in suspects} >= {3, 4}
    assert read_row_numbers(result.run / "suspects.csv") == {s.row for s in suspects}


def test_runs_on_the_same_rows_are_compared_and_others_are_not(tmp_path):
    rows = made_rows(tmp_path)
    one = make_run(tmp_path / "one", rows, np.array([[1.0, 1.2, 0.9, 1.1, 1.0]]), settings=[{}])
    two = make_run(tmp_path / "two", rows, np.array([[1.5, 1.7, 1.4, 1.61, 1.5]]), settings=[{}])
    ranking = compare_runs([one, two])
    assert [(p.name, p.verdict) for p in ranking.places] == [("one", "best"), ("two", "worse")]
    changed = tmp_path / "changed"
    changed.mkdir()
    other = made_rows(changed)
    other = other.without([7])
    # The folds now hold other rows out.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.test_review.ROWS", 59)
        three = make_run(tmp_path / "three", other, np.array([[0.1] * 5]), settings=[{}])
    assert [p.verdict for p in compare_runs([one, two, three]).places] == ["best", "worse", "other rows"]


def test_the_compare_command(tmp_path, capsys):
    rows = made_rows(tmp_path)
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0], [1.5, 1.7, 1.4, 1.6, 1.51]])
    folder = make_run(tmp_path / "run", rows, losses)
    assert main(["compare", str(folder)]) == 0
    assert "better than rank=16" in capsys.readouterr().out
    assert main(["compare", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"][1]["verdict"] == "worse"
    assert main(["compare", str(tmp_path)]) == 2


def test_a_learning_curve_says_whether_more_data_would_help(tmp_path):
    rows = made_rows(tmp_path)
    sizes, rng = [12, 24, 48], np.random.default_rng(0)
    fold = rng.normal(0, 0.2, FOLDS)
    losses = np.array([[2 + 5 * n**-0.5 + f + rng.normal(0, 0.005) for f in fold] for n in sizes])
    settings = [{"train.share": share} for share in (0.25, 0.5, 1.0)]
    folder = make_run(tmp_path / "run", rows, losses, settings=settings, train_rows=sizes)
    curve = learning_curve(Run.read(folder))
    truth = 5 * (96**-0.5 - 48**-0.5)
    assert curve.low < truth < curve.high and curve.helps > 0.95
    assert say_learning_curve(curve).startswith("More data would help: twice the rows (96)")
    with pytest.raises(RunError, match="no learning curve"):
        learning_curve(Run.read(make_run(tmp_path / "other", rows, losses)))


def test_shares_in_any_order_give_the_same_curve(tmp_path):
    rows, sizes, shares = made_rows(tmp_path), [12, 24, 48], [0.25, 0.5, 1.0]
    losses = np.array([[2 + 5 * n**-0.5 + f for f in (0.1, 0.0, 0.3, 0.2, 0.15)] for n in sizes])
    said = []
    for name, order in (("up", [0, 1, 2]), ("down", [2, 1, 0]), ("mixed", [1, 2, 0])):
        folder = make_run(
            tmp_path / name, rows, losses[order], settings=[{"train.share": shares[i]} for i in order], train_rows=[sizes[i] for i in order]
        )  # fmt: skip
        said.append(say_learning_curve(learning_curve(Run.read(folder))))
    assert said[0] == said[1] == said[2] and "twice the rows (96)" in said[0]


def test_intervals_of_a_run_allow_for_the_overlap_of_its_folds_whatever_share_a_trial_trains_on(tmp_path):
    """By hand: n_test/n_train = 12/48 = 1/4 for both trials, in the table and in the list of metrics."""
    one = np.array([1.0, 1.2, 0.9, 1.1, 1.0])
    settings = [{"train.share": 0.25}, {"train.share": 1.0}]
    folder = make_run(
        tmp_path / "run", made_rows(tmp_path), np.stack([one + 1, one]), settings=settings, train_rows=[12, 48]
    )
    half = 2.7764451 * one.std(ddof=1) * math.sqrt(1 / 5 + 1 / 4)
    for trial, mean in zip(Result.read(folder).trials, (2.04, 1.04), strict=True):
        assert trial["interval95"] == pytest.approx([mean - half, mean + half])
        assert trial["metrics"]["loss"]["interval95"] == trial["interval95"]


def test_a_lane_that_failed_early_does_not_shorten_the_choice_of_an_epoch(tmp_path):
    curves = [[[2.0, 1.5 + f / 10, 1.0 + f / 10] for f in range(FOLDS)]]
    folder = make_run(tmp_path / "run", made_rows(tmp_path), np.array([[1.0] * FOLDS]), settings=[{}], curves=curves)
    whole = epoch_choice(Run.read(folder))
    curves[0][2] = [2.0]
    cut = make_run(
        tmp_path / "cut", made_rows(tmp_path), np.array([[1.0] * FOLDS]), settings=[{}], curves=curves, failed=[(0, 2)]
    )
    assert whole.best == epoch_choice(Run.read(cut)).best == 3
    assert "last one trained" in str(whole)
    with pytest.raises(RunError, match="not epoch by epoch"):
        epoch_choice(Run.read(folder), metric="accuracy")


def test_the_best_epoch_and_its_plateau(tmp_path):
    rows = made_rows(tmp_path)
    rng = np.random.default_rng(0)
    shape = np.array([2.0, 1.2, 1.0, 1.001, 1.5])
    curves = [[list(shape + f + rng.normal(0, 0.01, 5)) for f in rng.normal(0, 0.3, FOLDS)]]
    folder = make_run(tmp_path / "run", rows, np.array([[1.5] * FOLDS]), settings=[{}], curves=curves)
    choice = epoch_choice(Run.read(folder))
    assert choice.best in (3, 4) and (choice.first, choice.last) == (3, 4)
    with pytest.raises(RunError, match="epoch by epoch"):
        epoch_choice(Run.read(make_run(tmp_path / "other", rows, np.array([[1.5] * FOLDS]))))


def test_the_page_shows_conclusion_metrics_and_suspects(tmp_path):
    rows = made_rows(tmp_path)
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0], [1.5, 1.7, 1.4, 1.6, 1.51]])
    page = report_page(Run.read(make_run(tmp_path / "run", rows, losses)))
    assert "better than rank=16" in page and ">worse</td>" in page
    part = page[page.index("Rows that look wrong") :]
    assert part.index("<td>4</td>") < part.index("answers otherwise")


def test_a_row_that_two_folds_held_out_counts_once_in_the_pooled_interval(tmp_path):
    """Repeated folds score each row twice: no more rows than before, so the interval may not shrink by the root of 2."""
    rng = np.random.default_rng(0)
    run = Run.read(make_run(tmp_path / "run", made_rows(tmp_path), np.array([[1.0] * FOLDS])))
    once = {
        "row": np.arange(1, 61),
        "nll": rng.exponential(10, 60),
        "tokens": np.full(60, 10),
        "hits": rng.integers(0, 10, 60),
    }
    twice = {name: np.concatenate([column, column]) for name, column in once.items()}
    assert pool_losses(twice, group_of(run, twice["row"])) == pool_losses(once, group_of(run, once["row"]))


def test_rows_that_stay_together_are_drawn_together(tmp_path):
    rows = load_rows([{"text": text} for text in ("a", "b", "A", "c")], Data(path="x"))
    recipe = Recipe.build({"model": "m", "data": "x", "output": str(tmp_path / "run")})
    with Run.open(tmp_path / "run", recipe=recipe, data_hashes=rows.hashes, rows=[1, 2, 3, 4]) as run:
        _write_groups(run, rows, Folds())
        assert group_of(run, np.array([1, 2, 3, 4])).tolist() == [0, 1, 0, 2]


def test_a_result_of_one_finished_fold_has_a_mean_and_no_interval(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tests.test_review.FOLDS", 1)
    result = Result.read(make_run(tmp_path / "run", made_rows(tmp_path), np.array([[1.5]]), settings=[{}]))
    assert result.mean == 1.5 and all(math.isnan(end) for end in result.interval95)
    show_scores(result.report)
    assert capsys.readouterr().out.split("95%")[1].split()[0] == "–"


def test_rows_of_one_group_have_pooled_scores_without_an_interval():
    rows = {"nll": np.arange(1.0, 9.0), "tokens": np.full(8, 10), "hits": np.arange(8)}
    pooled = pool_losses(rows, np.zeros(8))
    assert pooled["perplexity"] == {"pooled": pytest.approx(math.exp(36 / 80)), "pooled_interval95": None}
    assert pooled["loss"]["pooled_interval95"] is None


def test_runs_of_other_tokenizers_are_compared_by_text_and_not_by_loss(tmp_path):
    rows = made_rows(tmp_path)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, tokens in zip(folders, (10, 10, 14), strict=True):
        make_run(folder, rows, np.array([[1.0, 1.2, 0.9, 1.1, 1.0]]) + tokens / 100, settings=[{}])
        recipe = Recipe.build({"model": "m", "data": rows.name, "output": str(folder)})
        with Run.open(folder, recipe=recipe, data_hashes=rows.hashes, rows=[row.number for row in rows.rows]) as run:
            run.write_table("base.parquet", {"row": np.arange(60), "tokens": np.full(60, tokens)})
            for fold in range(FOLDS):
                scores = {"exact_match": 0.5 + fold / 10 + tokens / 1000}
                run.record("lane_examined", trial=0, fold=fold, scores=scores)
    assert [p.verdict for p in compare_runs(folders).places][2] == "other tokens"
    assert "other tokens" not in [p.verdict for p in compare_runs(folders, "exact_match").places]


def test_runs_are_compared_with_the_region_of_equivalence_that_the_first_asks_for(tmp_path):
    rows = made_rows(tmp_path)
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0]])
    for name, more in (("narrow", {}), ("wide", {"sweep": {"lora.rank": [8], "equivalent": 0.2}})):
        make_run(tmp_path / name, rows, losses + (0.05 if more else 0) + np.eye(5)[:1] * 0.001, settings=[{}], **more)
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    assert compare_runs([wide, narrow]).rope == pytest.approx(0.2 * 1.0402)
    assert compare_runs([narrow, wide]).rope == pytest.approx(0.01 * 1.0402)


def test_the_page_speaks_of_the_trial_that_comes_first_and_not_of_one_given_up_after_an_easy_fold(tmp_path):
    """Trial 1 has the lowest mean loss: of fold 0 alone, on which trial 0 is better."""
    losses = np.array([[0.5, 1.2, 0.9, 1.1, 1.0], [0.6, 9.0, 9.0, 9.0, 9.0]])
    folder = make_run(tmp_path / "run", made_rows(tmp_path), losses, failed=[(1, fold) for fold in range(1, FOLDS)])
    page = report_page(Run.read(folder))
    assert "trial 0 has a mean loss of 0.9400" in page and "fewer folds than the best" in page


def test_the_table_says_what_is_to_be_minded(tmp_path, capsys):
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0], [1.5, 1.7, 1.4, 1.6, 1.51], [1.4, 1.6, 1.3, 1.7, 1.41]])
    report = Result.read(make_run(tmp_path / "run", made_rows(tmp_path), losses)).report
    report["trials"][1]["optimistic"] = True
    show_scores(report)
    said = " ".join(capsys.readouterr().out.split())
    assert "note: the best of 3 trials was picked by these scores" in said
    assert "optimistic, trial 1: held-out rows decided" in said


def test_the_hardest_rows_are_the_best_trials(tmp_path):
    losses = np.array([[9.0, 9.2, 9.1, 9.3, 9.4], [1.0, 1.2, 0.9, 1.1, 1.0]])
    folder = make_run(tmp_path / "run", made_rows(tmp_path), losses, finish=False)
    recipe = Recipe.load(folder / "recipe.yaml", ())
    rows = made_rows(tmp_path)
    with Run.open(folder, recipe=recipe, data_hashes=rows.hashes, rows=[row.number for row in rows.rows]) as run:
        write_out_of_fold(run)
        hardest = hardest_rows(run, Result.read(folder).report["best"])
    assert len(hardest) == 20 and {row["trial"] for row in hardest} == {1}
    assert hardest[0]["row"] == 4, "its loss was raised"


def test_a_ranking_notes_which_scores_are_optimistic(tmp_path):
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0], [1.5, 1.7, 1.4, 1.6, 1.51]])
    folder = make_run(tmp_path / "run", made_rows(tmp_path), losses, optimistic=[0])
    assert [place.note for place in compare_runs([folder]).places] == ["optimistic: held-out rows chose its steps", ""]


def test_a_run_none_of_whose_lanes_has_the_sweeps_metric_is_read_all_the_same(tmp_path):
    """As it is while answers are still to be written, or where a function of one's own gives nan."""
    sweep = {"sweep": {"lora.rank": [8, 16], "metric": "accuracy"}, "evaluate": {"metrics": ["accuracy"]}}
    folder = make_run(tmp_path / "run", made_rows(tmp_path), np.array([[1.0] * FOLDS, [2.0] * FOLDS]), **sweep)
    result = Result.read(folder)
    assert result.report["best"] is None and result.report["conclusion"] == "no fold has a score to rank by"
    assert result.suspects()[0].row == 4 and "No fold has finished" not in report_page(Run.read(folder))


def test_a_learning_curve_leaves_out_folds_that_a_share_lacks(tmp_path):
    sizes, shares = [12, 24, 48], [{"train.share": share} for share in (0.25, 0.5, 1.0)]
    losses = np.array([[2 + 5 * n**-0.5 + f for f in (0.1, 0.0, 0.3, 0.2, 0.15)] for n in sizes])
    some = make_run(tmp_path / "some", made_rows(tmp_path), losses, settings=shares, train_rows=sizes, failed=[(0, 1)])
    assert learning_curve(Run.read(some)).means == pytest.approx(losses[:, [0, 2, 3, 4]].mean(axis=1))
    none = make_run(
        tmp_path / "none", made_rows(tmp_path), losses, settings=shares, train_rows=sizes,
        failed=[(0, 0), (0, 1), (1, 2), (1, 3), (2, 4)],
    )  # fmt: skip
    with pytest.raises(RunError, match="for every share"):
        learning_curve(Run.read(none))


@pytest.mark.parametrize(
    "losses, among, said",
    [
        ([2.0, 1.5, 1.0], 1, "no"),
        ([2.0, 1.5, 1.0], 4, "yes: these same scores chose the best of 4 trials"),
        ([2.0, 1.0, 1.5], 1, "yes: these same scores chose the epoch"),
        ([2.0, 1.0, 1.5], 4, "yes: these same scores chose the best of 4 trials and the epoch"),
    ],
)
def test_what_is_expected_of_a_fit_says_what_those_scores_chose(tmp_path, losses, among, said):
    curves = [[[loss + fold / 100 for loss in losses] for fold in range(FOLDS)]]
    ends = np.array([[curve[-1] for curve in curves[0]]])
    folder = make_run(tmp_path / "run", made_rows(tmp_path), ends, settings=[{}], curves=curves, train={"epochs": 3})
    expected = expected_of(Run.read(folder), Trial(0, {}, Recipe.load(folder / "recipe.yaml", ())), among=among)
    assert expected.loss == pytest.approx(min(losses) + 0.02) and expected.facts()["optimistic"] == said
    assert expected.optimistic == (said != "no") == ("these scores chose" in expected.words())


@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_tables_are_whole_however_narrow_the_terminal(tmp_path, capsys, monkeypatch, columns):
    """At 80 columns names of trials and folds were squeezed to nothing."""
    monkeypatch.setenv("COLUMNS", columns)
    losses = np.array([[1.0, 1.2, 0.9, 1.1, 1.0], [1.5, 1.7, 1.4, 1.6, 1.51]])
    folder = make_run(tmp_path / "run", made_rows(tmp_path), losses)
    assert main(["compare", str(folder)]) == 0
    table = capsys.readouterr().out.split("is better than")[0]
    assert "behind best" in table and "rank=16" in table and "…" not in table
    show_scores(Result.read(folder).report)
    assert "token acc." in (said := capsys.readouterr().out) and "…" not in said
