"""Tables for the terminal: whatever its width, a number is printed whole or not at all, and what is missing is named."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from crosstune.report import ranking_table, score_table
from crosstune.report.ranking_table import show_ranking
from crosstune.report.score_table import show_scores

FOLD = {"fold": 0, "rows": 16, "tokens": 318, "base_loss": 5.94221, "loss": 5.89071, "perplexity": 361.643, "token_accuracy": 0.02201}  # fmt: skip
TRIAL = {
    "trial": 0, "settings": {"lora.targets": "[q_proj]"}, "folds": [FOLD, {**FOLD, "fold": 1}], "metrics": {},
    "mean": 5.888, "interval95": (5.88421, 5.89179),
}  # fmt: skip
REPORT = {
    "trials": [TRIAL], "baselines": {}, "failed": [], "peak_bytes": 0, "run": "runs/rows", "seconds": 3.0,
    "conclusion": "",
}  # fmt: skip
PLACE = {
    "name": "lora.rank=8, train.learning_rate=0.0002", "note": "", "loss": 5.88801, "low": 5.88421, "high": 5.89179,
    "folds": 5, "behind_best": 0.0123, "p_adjusted": 0.4567, "p_best": 0.87, "p_last": 0.12, "verdict": "best",
}  # fmt: skip
RANKING = [PLACE, {**PLACE, "name": "lora.rank=16, train.learning_rate=0.0002", "verdict": "unclear"}]


def printed(monkeypatch, show, *args, width, terminal):
    """What `show` prints on a console of that width, without colour."""
    console = Console(width=width, force_terminal=terminal, color_system=None, highlight=False, record=True)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    with console.capture() as captured:
        show(*args)
    return re.sub(r"\x1b\[[0-9;]*m", "", captured.get())


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize(
    ("show", "args", "whole"),
    [
        (show_scores, (REPORT,), ("5.8907", "5.9422", "5.8842–5.8918", "base loss")),
        (show_ranking, (RANKING, "loss", "said."), ("5.8880", "5.8842–5.8918", "verdict", "can't be told")),
    ],
)
def test_no_number_is_cut_however_narrow_the_terminal(monkeypatch, show, args, whole, width):
    said = printed(monkeypatch, show, *args, width=width, terminal=True)
    assert "…" not in said and all(word in said for word in whole)
    columns = [*score_table.MAY_GO] if show is show_scores else [*ranking_table.MAY_GO]
    header = next(line for line in said.splitlines() if "loss" in line)
    missing = [name for name in columns if name not in header]
    assert missing == columns[: len(missing)], "they go in the order of the list"
    named = re.search(r"no room for (.*?): a wider", said)
    assert (named.group(1).split(", ") if named else []) == missing
    if width == 200:
        assert not missing


@pytest.mark.parametrize(("show", "args"), [(show_scores, (REPORT,)), (show_ranking, (RANKING, "loss", "said."))])
def test_what_goes_into_a_pipe_has_every_column_whole(monkeypatch, show, args):
    said = printed(monkeypatch, show, *args, width=20, terminal=False)
    wide = printed(monkeypatch, show, *args, width=200, terminal=False)
    assert "…" not in said and "no room" not in said
    assert re.findall(r"\d+\.\d+", wide) == re.findall(r"\d+\.\d+", said)


def test_one_trial_alone_is_compared_with_nothing(monkeypatch):
    said = printed(monkeypatch, show_ranking, RANKING[:1], "loss", "said.", width=80, terminal=False)
    assert "P(best)" not in said and "behind best" not in said and "best" in said


def test_brackets_in_a_setting_are_text(monkeypatch):
    said = printed(monkeypatch, show_scores, REPORT, width=80, terminal=False)
    assert "lora.targets=[q_proj]" in said
