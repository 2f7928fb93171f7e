"""The report: one page from a run folder, everything escaped, nothing loaded from elsewhere."""

import math
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from crosstune.errors import RunError
from crosstune.recipe.recipe import Recipe
from crosstune.report.chart import MOST_POINTS, Axis, interval_bars, loss_chart, thinned
from crosstune.report.report import hardest_rows, report_page, sentence, write_report
from crosstune.results.result import Result, make_report
from crosstune.store.run import Run

LOSSES = {0: [3.0, 2.0, 1.5], 1: [3.1, 2.2, 1.7]}


def opened(folder):
    recipe = Recipe.build({"model": "<script>alert(1)</script>", "data": "rows.jsonl", "output": str(folder)})
    return Run.open(recipe.output, recipe=recipe, data_hashes=[b"0" * 16] * 4, rows=[1, 2, 3, 4])


@pytest.fixture
def run_folder(tmp_path):
    """A finished run of two folds, written event by event; the model's name is hostile."""
    with opened(tmp_path / "run") as run:
        run.record("trials", trials=[{"trial": 0, "settings": {"lora.rank": "<b>8"}}])
        for fold, losses in LOSSES.items():
            for step in (2, 3):
                run.record("lane_evaluated", trial=0, fold=fold, step=step, epoch=1.0, loss=losses[step - 1] + 0.1)
            run.record(
                "lane_finished", trial=0, fold=fold, loss=losses[-1], perplexity=4.5, token_accuracy=0.5, base_loss=2.5,
                nll=losses[-1] * 20, rows=2, tokens=20, train_rows=2, optimistic=False, losses=losses,
            )  # fmt: skip
        table = {"row": np.arange(1, 5), "fold": np.array([0, 1, 0, 1]), "trial": np.zeros(4, np.int64),
                 "tokens": np.full(4, 10), "loss": np.array([1.0, 9.0, 2.0, 3.0]), "base_loss": np.full(4, 2.5)}  # fmt: skip
        run.write_out_of_fold(table)
        run.record("run_finished", failed=0)
    return tmp_path / "run"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open, self.seen, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "polyline", "circle", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_escaped_and_needs_nothing_else(run_folder):
    page = write_report(run_folder)
    assert page == run_folder / "report.html"
    text, tags = page.read_text(encoding="utf-8"), Tags()
    tags.feed(text)
    assert tags.open == [] and tags.links == []
    assert "script" not in tags.seen and "b" not in tags.seen
    assert "&lt;script&gt;" in text and "&lt;b&gt;8" in text


def test_the_hardest_row_comes_first(run_folder):
    text = report_page(Run.read(run_folder))
    rows = text[text.index("Rows with the highest loss") :]
    assert rows.index("<td>2</td>") < rows.index("<td>4</td>") < rows.index("<td>3</td>")


def test_the_sentence_counts_folds_below_the_base(run_folder):
    said = sentence(make_report(Run.read(run_folder)))
    assert "mean loss of 1.6000" in said and "in 2 of 2 folds" in said


def test_a_folder_of_runs_is_no_run_and_those_in_it_are_named(run_folder):
    with pytest.raises(RunError, match="holds no run") as refused:
        Result.read(run_folder.parent)
    assert refused.value.fix == f"Give the folder of a run: {run_folder}."
    with pytest.raises(RunError) as refused:
        Result.read(run_folder / "lanes")
    assert refused.value.fix == "Give the folder of a run."


def test_no_run_no_page(tmp_path):
    with pytest.raises(RunError):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_run_without_scores_says_so_and_one_without_a_finished_fold_has_nan_as_in_scikit_learn(tmp_path):
    with opened(tmp_path / "run") as run:
        run.record("trials", trials=[{"trial": 0, "settings": {}}])
        with pytest.raises(RunError, match="no lane is over"):
            Result.read(tmp_path / "run").mean  # noqa: B018  # what a notebook cell does
        run.record("lane_failed", trial=0, fold=0, reason="loss nan", step=1)
    result = Result.read(tmp_path / "run")
    assert math.isnan(result.mean) and all(map(math.isnan, result.interval95))


def numbers_of(text, pattern):
    return [tuple(float(number.replace(",", "")) for number in found) for found in re.findall(pattern, text)]


def read_chart(text):
    """(step, loss) of each line of a page's chart, by its tick labels alone, as a reader with a ruler would."""
    ups = numbers_of(text, r'y1="([\d.]+)" y2="[\d.]+"/><text class="loss".*?>([\d.,-]+)<')
    acrosses = numbers_of(text, r'<line class="axis" x1="([\d.]+)".*?<text class="step".*?>([\d.,]+)<')
    up, across = (np.polyfit(*zip(*ticks, strict=True), 1) for ticks in (ups, acrosses))
    lines = re.findall(r'<title>(.*?)</title><polyline class="\w+" points="(.*?)"', text)
    return {
        name: [(np.polyval(across, x), np.polyval(up, y)) for x, y in numbers_of(places, r"([\d.]+),([\d.]+)")]
        for name, places in lines
    } | {"base": [np.polyval(up, float(y)) for y in re.findall(r'class="base".*?y1="([\d.]+)"', text)]}


def test_the_charts_axes_say_what_its_lines_are(run_folder):
    found = read_chart(report_page(Run.read(run_folder)))
    for fold, losses in LOSSES.items():
        steps, read = zip(*found[f"fold {fold}, training"], strict=True)
        assert steps == pytest.approx((1, 2, 3), abs=0.01) and read == pytest.approx(losses, abs=0.01)
        steps, read = zip(*found[f"fold {fold}, held out"], strict=True)
        assert steps == pytest.approx((2, 3), abs=0.01)
        assert read == pytest.approx([loss + 0.1 for loss in losses[1:]], abs=0.01)
    assert found["base"] == pytest.approx([2.5], abs=0.01)


@pytest.mark.parametrize("losses", [[1.0, None, 3.0], [math.nan, 2.0, math.inf, 4.0], [5.0] * 3])
def test_a_chart_leaves_out_what_is_no_number(losses):
    chart = loss_chart({0: losses}, {}, None)
    drawn = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    assert len(chart["lines"][0]["places"]) == len(drawn) and chart["base"] is None
    assert loss_chart({0: [None, math.nan]}, {}, 2.0) is None


def test_a_long_line_is_drawn_as_means_of_neighbours():
    losses = np.random.default_rng(0).uniform(1, 2, 3 * MOST_POINTS)
    steps, means = zip(*thinned(losses.tolist()), strict=True)
    np.testing.assert_allclose(means, losses.reshape(-1, 3).mean(axis=1))
    np.testing.assert_allclose(steps, np.arange(1, len(losses) + 1).reshape(-1, 3).mean(axis=1))


@pytest.mark.parametrize(("low", "high"), [(0, 7), (0.001, 0.0042), (-3, 12_000), (5.36, 5.95), (1, 1 + 1e-6)])
def test_ticks_are_round_few_and_where_they_say(low, high):
    axis = Axis(low, high, 100, 700)
    ticks = axis.ticks(6)
    assert 2 <= len(ticks) <= 8 and len({tick["label"] for tick in ticks}) == len(ticks)
    for tick in ticks:
        value = float(tick["label"].replace(",", ""))
        assert low <= value <= high and axis.at(value) == pytest.approx(tick["at"], abs=0.2)


def test_the_interval_bars_share_one_axis():
    rows = [{"loss": 1.0, "low": 0.5, "high": 1.5}, {"loss": 2.0, "low": None, "high": None}, {"loss": None, "low": None, "high": None}]  # fmt: skip
    first, second, none = interval_bars(rows, "loss", width=300)
    assert none is None and second["low"] == second["mean"] == second["high"]
    pixels = (second["mean"] - first["mean"]) / (2.0 - 1.0)
    assert first["high"] - first["low"] == pytest.approx(pixels * (1.5 - 0.5), abs=0.3)


def test_a_trial_that_was_given_up_is_not_called_best_and_hardest_rows_are_of_the_best(run_folder):
    with opened(run_folder) as run:
        run.record("trial_given_up", trial=1, reason="worse after fold 0")
        event = run.finished_lanes()[0, 0]
        lucky = {name: value for name, value in event.items() if name not in ("event", "at")}
        run.record("lane_finished", **{**lucky, "trial": 1, "loss": 0.5, "nll": 10.0, "perplexity": 1.6})
        table = dict(run.read_table("out_of_fold.parquet"))
        others = {name: values.copy() for name, values in table.items()} | {"trial": np.ones(4, np.int64)}
        run.write_out_of_fold({name: np.concatenate([table[name], others[name]]) for name in table})
    run = Run.read(run_folder)
    assert "trial 0 has a mean loss of 1.6000" in sentence(make_report(run))
    assert [row["row"] for row in hardest_rows(run, 0)] == [2, 4, 3, 1]
    text = report_page(run)
    assert "Given up: worse after fold 0" in text and "Of trial 0, the best." in text


def test_a_notebook_shows_what_scores_holds_escaped_and_without_pandas(run_folder, monkeypatch):
    result = Result.read(run_folder)
    expected = result.scores
    monkeypatch.setitem(sys.modules, "pandas", None)
    shown, tags = result._repr_html_(), Tags()
    tags.feed(shown)
    assert tags.open == [] and "b" not in tags.seen and "&lt;b&gt;8" in shown
    assert re.findall(r"<th>(.*?)</th>", shown) == list(expected.columns)
    losses = [
        row[list(expected.columns).index("loss")] for row in np.reshape(re.findall(r"<td>(.*?)</td>", shown), (2, -1))
    ]
    assert losses == [f"{loss:.4f}" for loss in expected["loss"]]
    assert "on rows never seen" in shown and "  trial 0 lora.rank=<b>8: loss" in repr(result)
