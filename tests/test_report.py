"""The report: one page from a run folder, everything escaped, nothing loaded from elsewhere."""

import math
from html.parser import HTMLParser

import numpy as np
import pytest

from crosstune.errors import RunError
from crosstune.recipe import Recipe
from crosstune.report import report_page, sentence, write_report
from crosstune.result import Result, make_report
from crosstune.store.run import Run

LOSSES = {0: [3.0, 2.0, 1.5], 1: [3.1, 2.2, 1.7]}


@pytest.fixture
def run_folder(tmp_path):
    """A finished run of two folds, written event by event; the model's name is hostile."""
    recipe = Recipe.build({"model": "<script>alert(1)</script>", "data": "rows.jsonl", "output": str(tmp_path / "run")})
    with Run.open(recipe.output, recipe=recipe, data_hashes=[b"0" * 16] * 4, rows=[1, 2, 3, 4]) as run:
        run.record("trials", trials=[{"trial": 0, "settings": {"lora.rank": "<b>8"}}])
        for fold, losses in LOSSES.items():
            run.record("lane_evaluated", trial=0, fold=fold, step=3, epoch=1.0, loss=losses[-1])
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
    assert tags.seen.count("polyline") == 2 and tags.seen.count("circle") == 2


def test_the_hardest_row_comes_first(run_folder):
    text = report_page(Run.read(run_folder))
    rows = text[text.index("Rows with the highest loss") :]
    assert rows.index("<td>2</td>") < rows.index("<td>4</td>") < rows.index("<td>3</td>")


def test_the_sentence_counts_folds_below_the_base(run_folder):
    said = sentence(make_report(Run.read(run_folder)))
    assert "mean loss of 1.6000" in said and "in 2 of 2 folds" in said


def test_no_run_no_page(tmp_path):
    with pytest.raises(RunError):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_run_without_scores_says_so_and_one_without_a_finished_fold_has_nan_as_in_scikit_learn(tmp_path):
    recipe = Recipe.build({"model": "m", "data": "rows.jsonl", "output": str(tmp_path / "run")})
    with Run.open(recipe.output, recipe=recipe, data_hashes=[b"0" * 16] * 4, rows=[1, 2, 3, 4]) as run:
        run.record("trials", trials=[{"trial": 0, "settings": {}}])
        with pytest.raises(RunError, match="no lane is over"):
            Result.read(tmp_path / "run").mean  # noqa: B018  # what a notebook cell does
        run.record("lane_failed", trial=0, fold=0, reason="loss nan", step=1)
    result = Result.read(tmp_path / "run")
    assert math.isnan(result.mean) and all(map(math.isnan, result.interval95))
