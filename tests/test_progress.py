"""Progress: what a line says, when one is written, and that a stage ends whatever happens."""

import io
import itertools
import sys
import types

import pytest

from crosstune import progress
from crosstune.progress import Bars, Lines, NotebookLine, Quiet, Stage, choose_progress, loss_words, stage
from crosstune.units import bytes_words, count_words, seconds_words


@pytest.fixture
def clock(monkeypatch):
    """Time goes on by one second at every look."""
    ticks = itertools.count()
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: float(next(ticks))))


def test_the_line_is_the_one_promised():
    shown = Stage("train", 400, began=0.0, done=119)
    shown.add(1, {"losses": [1.42, 1.39, 1.44, 1.4, 1.41], "tokens": 0, "held_bytes": 19.2 * 2**30})
    assert shown.words() == "step 120/400 · 5 lanes · loss 1.42 1.39 1.44 1.40 1.41 · 19.2 GiB"


def test_a_stage_is_named_once_in_its_line():
    for name, line in (("answer held-out rows: base", "answer held-out rows: base: row 3/4"), ("merge", "merge: 3/4")):
        at = progress.Stage(name, 4)
        at.add(3, {})
        assert at.line() == line


def test_evaluations_inside_training_are_no_lines_of_their_own(clock):
    stream = io.StringIO()
    lines = Lines(stream, every_seconds=1e9)
    with stage(lines, "train", 50):
        for _ in range(50):
            lines.advance(losses=[1.0])
            with stage(lines, "evaluate", 3):
                lines.advance(3)
    assert [line.split(" · ")[0] for line in stream.getvalue().splitlines()] == ["step 1/50", "step 50/50"]


def test_a_lane_that_is_out_shows_a_dash_and_many_lanes_their_range():
    assert loss_words([1.5, None, float("nan")]) == "loss 1.50 – –"
    assert loss_words([1.0, 2.0, 3.0] * 4) == "loss 2.00 (1.00–3.00)"


def test_lines_come_now_and_then_and_at_the_end(clock):
    stream = io.StringIO()
    lines = Lines(stream, every_seconds=20)
    with stage(lines, "train", 100):
        for _ in range(100):
            lines.advance(losses=[1.0], tokens=10)
    written = stream.getvalue().splitlines()
    assert 3 <= len(written) <= 40
    assert written[-1].startswith("step 100/100")


def test_stages_nest_and_the_outer_one_goes_on():
    stream = io.StringIO()
    lines = Lines(stream, every_seconds=0)
    with stage(lines, "train", 2):
        lines.advance()
        with stage(lines, "evaluate", 3):
            lines.advance(3)
        lines.advance()
    assert [line.split(" · ")[0] for line in stream.getvalue().splitlines()] == [
        "step 1/2", "evaluate: row 3/3", "evaluate: row 3/3", "step 2/2", "step 2/2",
    ]  # fmt: skip


@pytest.mark.parametrize("shown", [Quiet(), Lines(io.StringIO()), Bars()], ids=lambda shown: type(shown).__name__)
def test_a_stage_ends_when_its_block_fails(shown):
    with pytest.raises(ZeroDivisionError), stage(shown, "train", 3):
        shown.advance(losses=[1.0])
        raise ZeroDivisionError
    with stage(shown, "train", 1):
        shown.say("still usable: [not markup]")


def test_a_log_gets_lines_without_escape_codes(capsys):
    with stage(choose_progress(), "train", 1) as _:
        pass
    shown = choose_progress()
    assert isinstance(shown, Lines)
    with stage(shown, "train", 1):
        shown.advance(losses=[1.0])
    out, err = capsys.readouterr()
    assert out == "" and "step 1/1" in err and "\x1b" not in err


def test_a_notebook_rewrites_one_line(monkeypatch):
    shown = []

    class Handle:
        def update(self, content, raw):
            shown[-1] = content["text/plain"]

    def display(content, raw, display_id):
        shown.append(content["text/plain"])
        return Handle()

    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    line = choose_progress()
    assert isinstance(line, NotebookLine)
    line.every_seconds = 0
    with stage(line, "train", 3):
        for _ in range(3):
            line.advance(losses=[1.0])
    assert len(shown) == 1 and shown[0].startswith("step 3/3")


def test_units_are_printed_one_way():
    assert [bytes_words(n) for n in (0, 1023, 2**20, 1.5 * 2**30, 19.2 * 2**30)] == [
        "0 B", "1023 B", "1.00 MiB", "1.50 GiB", "19.2 GiB",
    ]  # fmt: skip
    assert [count_words(n) for n in (812, 8143, 1.2e6)] == ["812", "8.1k", "1.2M"]
    assert [seconds_words(s) for s in (3.21, 245, 7260)] == ["3.2 s", "4 min 05 s", "2 h 01 min"]
