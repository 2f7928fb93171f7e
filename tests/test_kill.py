"""SIGKILL at random moments changes no byte of the result (tests/kill_run.py tells how), and signals end a run well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crosstune.recipe.recipe import Recipe
from crosstune.recipe.yaml_text import dump_yaml
from crosstune.store.run import Run
from tests.kill_run import digests, recipe_for
from tests.signals import end_by

ROOT = Path(__file__).parent.parent


def kill(kills: int, *more: str, timeout: int) -> str:
    """The last line that the script says."""
    done = subprocess.run(
        [sys.executable, "tests/kill_run.py", "--kills", str(kills), *more],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_killed_8_times_the_run_ends_in_the_same_bytes() -> None:
    assert kill(8, "--seed", str(time.time_ns() % 10**6), timeout=600).startswith("8 kills")


@pytest.mark.slow
def test_killed_200_times_the_run_ends_in_the_same_bytes() -> None:
    assert kill(200, timeout=3600).startswith("200 kills")


@pytest.mark.slow
def test_a_sweep_with_pruning_and_answers_killed_60_times_ends_in_the_same_bytes() -> None:
    assert kill(60, "--sweep", timeout=3600).startswith("60 kills")


def test_a_disk_that_is_full_from_some_write_on_is_said_and_nothing_is_lost() -> None:
    assert "all byte-equal afterwards" in kill(0, "--full", "70", timeout=600)


@pytest.mark.slow
def test_a_disk_that_is_full_from_any_write_on_is_said_and_nothing_is_lost() -> None:
    assert "all byte-equal afterwards" in kill(0, "--full", "1", timeout=7200)


@pytest.mark.gpu
def test_killed_10_times_on_the_gpu_the_run_ends_in_the_same_bytes() -> None:
    assert kill(10, "--device", "cuda", "--longer", "100", timeout=1800).startswith("10 kills")


def command(recipe: Path, *more: str) -> subprocess.Popen[str]:
    """`crosstune run` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "crosstune", "run", str(recipe), *more],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def steps_taken(run: Path) -> bool:
    return any(run.glob("checkpoints/*/step-*.safetensors"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_step_and_the_same_command_goes_on(
    number: signal.Signals, code: int, tiny: Path, tmp_path: Path
) -> None:
    long = {**recipe_for(tmp_path / "run", tiny, {})}
    long["train"] = {"epochs": 60, "batch_size": 2, "checkpoint_every": 20, "learning_rate": 1e-3}
    long["evaluate"] = {"every": 100}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(long))
    child = command(recipe)
    while not steps_taken(tmp_path / "run"):
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)
    _, said, seconds = end_by(number, child)
    assert child.returncode == code, said
    assert 0 < seconds < 10
    assert "Traceback" not in said
    assert "interrupted" in said
    run = Run.read(tmp_path / "run")
    assert run.events("interrupted")[-1]["signal"] == number
    assert not run.is_finished
    assert not run.torn

    if number == signal.SIGINT:
        return
    done = command(recipe)
    said = done.communicate(timeout=300)[1]
    assert done.returncode == 0, said
    alone = tmp_path / "alone.yaml"
    alone.write_text(dump_yaml({**long, "output": str(tmp_path / "alone")}))
    assert command(alone).wait(300) == 0
    found, want = digests(tmp_path / "run"), digests(tmp_path / "alone")
    assert found.pop("recipe.yaml") != want.pop("recipe.yaml")  # the output
    assert found == want
    assert Recipe.load(tmp_path / "run" / "recipe.yaml").output == str(tmp_path / "run")
