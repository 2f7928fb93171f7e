"""Runs of many lanes: memory, file count and journal stay bounded, and a resumed sweep does what is left."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from crosstune.crossval import cross_validate
from crosstune.progress import Quiet
from crosstune.store.run import Run

CASES = Path(__file__).parent / "cases"


class Stopping(Quiet):
    """Raises `Stop` after so many steps of training; remembers the process's memory after each."""

    def __init__(self, steps: float = float("inf")) -> None:
        self.left, self.memory = steps, list[int]()

    def advance(self, n: int = 1, **facts: Any) -> None:
        if "losses" in facts:
            self.left -= 1
            self.memory.append(psutil.Process().memory_info().rss)
            if self.left < 0:
                raise Stop


class Stop(Exception):
    pass


def sweep(tiny: Path, output: Path) -> dict[str, Any]:
    """8 trials × 5 folds, 4 lanes a wave: 10 waves of 2 steps."""
    return {
        "model": str(tiny),
        "data": {"path": str(CASES / "chat24.jsonl"), "max_tokens": 64},
        "folds": {"k": 5, "seed": 1},
        "lora": {"alpha": 8, "targets": ["q_proj"]},
        "train": {"max_steps": 2, "batch_size": 4, "checkpoint_every": 1},
        "sweep": {"lora.rank": [1, 2], "train.learning_rate": [1e-4, 1e-3, 1e-2, 1e-1]},
        "device": {"kind": "cpu", "lanes": 4, "precision": "fp32"},
        "output": str(output),
    }


def test_a_resumed_sweep_of_40_lanes_continues_with_exactly_the_lanes_not_done(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        cross_validate(sweep(tiny, tmp_path / "run"), progress=Stopping(9))  # in the second step of the fifth wave
    before = Run.read(tmp_path / "run")
    done = set(before.finished_lanes())
    assert len(done) == 16
    when = {path: path.stat().st_mtime_ns for lane in done for path in before.lane_folder(*lane).rglob("*")}
    cross_validate(sweep(tiny, tmp_path / "run"), progress=Quiet())
    after = Run.read(tmp_path / "run")
    events = [(event["trial"], event["fold"]) for event in after.events("lane_finished")]
    assert len(events) == len(set(events)) == 40
    assert set(events[16:]) == {(trial, fold) for trial in range(8) for fold in range(5)} - done
    assert {path: path.stat().st_mtime_ns for path in when} == when
    waves = after.events("wave_finished")
    assert [len(wave["lanes"]) for wave in waves] == [4] * 10


@pytest.mark.slow
def test_memory_files_and_journal_stay_bounded_over_500_waves(tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"What is {n}?", "completion": f"It is {n}."}) + "\n" for n in range(500))
    )
    recipe = {
        **sweep(tiny, tmp_path / "run"),
        "data": {"path": str(rows), "max_tokens": 64},
        "folds": {"kind": "leave-one-out"},
        "device": {"kind": "cpu", "lanes": 1, "precision": "fp32"},
        "train": {"max_steps": 1, "batch_size": 2},
        "sweep": {},
        "lora": {"rank": 2, "alpha": 8, "targets": ["q_proj"]},
    }
    progress = Stopping()
    cross_validate(recipe, progress=progress)
    gc.collect()
    run = Run.read(tmp_path / "run")
    waves = run.events("wave_finished")
    assert len(waves) == len(progress.memory) == 500
    assert progress.memory[-1] - progress.memory[50] < 30e6  # 450 waves later
    a_lane = (tmp_path / "run" / "journal.jsonl").stat().st_size / 500
    assert a_lane < 3000
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) < 500 * 13 + 20
    assert not (tmp_path / "run" / "checkpoints").exists()
