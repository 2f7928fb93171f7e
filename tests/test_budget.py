"""A sweep's budget counts what earlier sittings spent, and changes no trial that was begun."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crosstune.crossval import cross_validate
from crosstune.progress import Quiet
from crosstune.store import journal as journal_module
from crosstune.store.run import Run
from crosstune.store.state import earlier_seconds
from tests.kill_run import digests
from tests.test_faults import asked
from tests.test_resume_cases import Stopped, Telling

RATES = {"train.learning_rate": [1e-3, 2e-3, 3e-3, 4e-3]}


def steps_of(run: Path, waves: int) -> int:
    """Steps of the first waves."""
    return sum(event["steps"] for event in Run.read(run).events("wave_finished")[:waves])


def test_a_trial_that_was_begun_before_the_tokens_were_spent_is_finished_after_an_interruption(
    tiny: Path, cases: Path, tmp_path: Path
) -> None:
    def recipe(output: Path, **budget: Any) -> dict[str, Any]:
        return asked(tiny, cases, output, lanes=4, sweep={**RATES, **budget})

    cross_validate(recipe(tmp_path / "all"), progress=Quiet())
    first = Run.read(tmp_path / "all").events("wave_finished")[0]["tokens"]
    alone = cross_validate(recipe(tmp_path / "alone", tokens=first + 1), progress=Quiet())
    # Four lanes a wave, three a trial: the third trial begins in the second wave and ends in a third.
    assert [trial["finished"] for trial in alone.trials] == [3, 3, 3]
    with pytest.raises(Stopped):
        cross_validate(
            recipe(tmp_path / "run", tokens=first + 1), progress=Telling(steps_of(tmp_path / "alone", waves=2) + 1)
        )
    cross_validate(recipe(tmp_path / "run", tokens=first + 1), progress=Quiet())
    found, want = digests(tmp_path / "run"), digests(tmp_path / "alone")
    assert found.pop("recipe.yaml") != want.pop("recipe.yaml")
    assert found == want


def test_hours_of_a_sitting_that_was_killed_count_and_what_it_began_is_finished(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = asked(tiny, cases, tmp_path / "run", lanes=3, sweep={**RATES, "hours": 1.0})
    clock, record = [1e9], Run.record

    def an_hour_a_look() -> float:
        clock[0] += 3600
        return clock[0]

    def killed_before_its_end(run: Run, event: str, *args: Any, **fields: Any) -> None:
        if event != "closed":
            record(run, event, *args, **fields)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(journal_module, "time", SimpleNamespace(time=an_hour_a_look))
        patch.setattr(Run, "record", killed_before_its_end)
        cross_validate(recipe, progress=Telling(1))
    result = cross_validate(recipe, progress=Quiet())
    assert [(trial["trial"], trial["finished"]) for trial in result.trials] == [(0, 3)]


def test_seconds_of_earlier_sittings_are_their_own_word_or_else_the_clocks() -> None:
    def sitting(*events: tuple[str, float], **more: float) -> list[dict[str, Any]]:
        return [{"event": event, "at": at, **more} for event, at in events]

    said = sitting(("opened", 0.0), ("plan", 5.0)) + sitting(("closed", 1e6), seconds=7.0)
    killed = sitting(("opened", 100.0), ("plan", 101.0), ("lane_finished", 130.0))
    clock_put_back = sitting(("opened", 500.0), ("plan", 20.0))
    now = sitting(("opened", 600.0), ("plan", 900.0))
    assert earlier_seconds([*sitting(("created", 0.0)), *said, *killed, *clock_put_back, *now]) == 7.0 + 30.0
