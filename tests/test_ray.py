"""Waves over Ray workers: the same bytes as one process, whoever trains what and whoever is lost on the way."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import torch

from crosstune.crossval import cross_validate
from crosstune.errors import DeviceError, RecipeError
from crosstune.interrupt import Interrupted, Interrupts
from crosstune.progress import Quiet
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.yaml_text import dump_yaml
from crosstune.store.run import Run
from crosstune.train.checkpoint import no_checkpoints
from tests import poison
from tests.kill_run import digests, unreadable
from tests.test_record import all_at_once

ray = pytest.importorskip("ray")
from crosstune.workers import cluster as cluster_module  # noqa: E402
from crosstune.workers import ray as workers_ray  # noqa: E402

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A one-machine cluster with two GPUs that aren't there."""
    ray.cloudpickle.register_pickle_by_value(poison)
    ray.init(num_cpus=4, num_gpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


class Watching(Quiet):
    """Progress that remembers what was said, and calls `then` once a step was told."""

    def __init__(self, then: Any = None) -> None:
        self.said: list[str] = []
        self.then = then

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, n: int = 1, **facts: Any) -> None:
        if "losses" in facts and self.then is not None:
            then, self.then = self.then, None
            then()


def asked(
    tiny: Path, output: Path, *, rows: Any = None, ray: str | None = "auto", workers: int = 2, **more: Any
) -> dict[str, Any]:
    device = {"kind": "cpu", "lanes": 1, "precision": "fp32"} | more.pop("device", {})
    if ray is not None:
        device |= {"ray": ray, "workers": workers}
    return {
        "model": str(tiny),
        "data": {"path": str(rows or ROOT / "tests" / "cases" / "chat24.jsonl"), "max_tokens": 128},
        "folds": {"k": 3, "seed": 1},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
        "train": {"epochs": 2, "batch_size": 4, "learning_rate": 5e-3, "checkpoint_every": 1, **more.pop("train", {})},
        "device": device,
        "output": str(output),
        **more,
    }


def same(one: Path, other: Path) -> bool:
    found, want = digests(one), digests(other)
    del found["recipe.yaml"], want["recipe.yaml"]  # the output
    assert found == want, [name for name in found.keys() | want.keys() if found.get(name) != want.get(name)]
    return True


@pytest.fixture(scope="module")
def local(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process."""
    folder = tmp_path_factory.mktemp("local") / "run"
    cross_validate(asked(tiny, folder, ray=None), progress=Quiet())
    return folder


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_number_of_workers_changes_no_byte(
    workers: int, cluster: None, local: Path, tiny: Path, tmp_path: Path
) -> None:
    progress = Watching()
    cross_validate(asked(tiny, tmp_path / "run", workers=workers), progress=progress)
    assert same(tmp_path / "run", local)
    assert f"ray: {workers} workers on 1 machine(s)" in progress.said
    assert not torch.cuda.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("more_of_sweep", [{}, {"prune": "halving"}])
def test_answers_and_sweeps_are_the_same_too(
    more_of_sweep: dict[str, str], cluster: None, tiny: Path, tmp_path: Path
) -> None:
    more = {
        "sweep": {"lora.rank": [2, 4], "train.learning_rate": [1e-3, 1e-2], **more_of_sweep},
        "evaluate": {"metrics": ["loss", "exact_match"], "max_new_tokens": 4},
        "device": {"lanes": 2},
    }
    cross_validate(asked(tiny, tmp_path / "alone", ray=None, **more), progress=Quiet())
    cross_validate(asked(tiny, tmp_path / "run", **more), progress=Quiet())
    assert same(tmp_path / "run", tmp_path / "alone")


def test_lanes_that_end_together_are_saved_side_by_side(
    cluster: None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"lanes": 3}
    cross_validate(asked(tiny, tmp_path / "alone", ray=None, device=device), progress=Quiet())
    all_at_once(3, monkeypatch)
    cross_validate(asked(tiny, tmp_path / "run", workers=1, device=device), progress=Quiet())
    assert same(tmp_path / "run", tmp_path / "alone")


def test_an_interrupt_does_not_wait_for_a_worker_that_the_cluster_may_have_no_place_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = workers_ray.RayWorkers.__new__(workers_ray.RayWorkers)
    workers.progress, workers.interrupts, workers._actors, workers._busy = Quiet(), Interrupts(), [None], []

    def lost_and_asked_to_end(self: Any, one: Any, task: Any) -> None:
        one.started, self.interrupts.asked = object(), signal.SIGTERM

    def waits(self: Any) -> Any:
        raise AssertionError("it waits for the worker")

    monkeypatch.setattr(workers_ray.ray, "put", lambda tokens: tokens)
    monkeypatch.setattr(workers_ray.RayWorkers, "_hand_out", lost_and_asked_to_end)
    monkeypatch.setattr(workers_ray.RayWorkers, "_with_news", waits)
    with pytest.raises(Interrupted):
        workers.run_waves([[]], None, None, report=print, checkpoints=lambda jobs: no_checkpoints())
    assert not workers._busy


def kill_some_worker(chance: random.Random, wait: float) -> None:
    """After a while, SIGKILL a process of ours that trains."""
    time.sleep(wait)
    workers = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ray::Worker" in " ".join(child.cmdline()):
                workers.append(child)
    if workers:
        with contextlib.suppress(psutil.Error):
            chance.choice(workers).send_signal(signal.SIGKILL)


def train_while_workers_are_killed(kills: int, tiny: Path, local: Path, place: Path, seed: int) -> None:
    chance, losses = random.Random(seed), 0
    for attempt in range(10 * kills):
        progress = Watching()

        def strike() -> None:
            threading.Thread(target=kill_some_worker, args=(chance, chance.uniform(0, 0.5)), daemon=True).start()

        progress.then = strike
        run = place / f"run-{attempt}"
        cross_validate(asked(tiny, run, train={"epochs": 2}, device={"retries": 9}), progress=progress)
        assert same(run, local)
        assert not unreadable(run)
        losses += sum("worker was lost" in text for text in progress.said)
        if losses >= kills:
            return
    raise AssertionError(f"only {losses} workers were lost")


def test_a_lost_worker_changes_no_byte(cluster: None, tiny: Path, local: Path, tmp_path: Path) -> None:
    train_while_workers_are_killed(1, tiny, local, tmp_path, time.time_ns() % 1000)


@pytest.mark.slow
def test_20_lost_workers_change_no_byte(cluster: None, tiny: Path, local: Path, tmp_path: Path) -> None:
    train_while_workers_are_killed(20, tiny, local, tmp_path, 0)


def test_a_model_that_a_machine_lacks_is_sent_to_it_once(
    cluster: None, tiny: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_ray, "Worker", poison.BlindWorker)
    progress = Watching()
    cross_validate(asked(tiny, tmp_path / "run"), progress=progress)
    assert sum("to a machine that lacks it" in text for text in progress.said) <= 1  # an earlier test run's will do
    assert same(tmp_path / "run", local)
    places = [fact["host"] for fact in Run.read(tmp_path / "run").events("workers")[0]["workers"]]
    assert len(places) == 2


@pytest.mark.slow
def test_a_lane_that_raises_in_a_worker_fails_alone_and_at_once(
    cluster: None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_ray, "Worker", poison.LosingWorker)
    progress = Watching()
    result = cross_validate(asked(tiny, tmp_path / "run", device={"lanes": 3}, workers=1), progress=progress)
    assert [(lane["fold"], lane["step"]) for lane in result.failed] == [(1, 1)]
    assert result.failed[0]["reason"].startswith("IndexError: no such row (poison.py line ")
    assert not [text for text in progress.said if "last checkpoint" in text]  # the wave went on without it


@pytest.mark.parametrize(
    ("worker", "reason"),
    [("DyingWorker", "its worker was lost"), ("RaisingWorker", "poisoned")],
)
@pytest.mark.slow
def test_a_poisoned_wave_is_tried_again_so_many_times_then_fails_alone(
    worker: str, reason: str, cluster: None, tiny: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_ray, "Worker", getattr(poison, worker))
    progress = Watching()
    result = cross_validate(asked(tiny, tmp_path / "run", device={"retries": 1}), progress=progress)
    assert [(lane["trial"], lane["fold"]) for lane in result.failed] == [(0, 1)]
    assert reason in result.failed[0]["reason"]
    assert "2 times" in result.failed[0]["reason"]
    assert sum("goes on from its last checkpoint" in text for text in progress.said) == 1
    run, alone = Run.read(tmp_path / "run"), Run.read(local)
    for fold in (0, 2):
        assert digests(run.lane_folder(0, fold)) == digests(alone.lane_folder(0, fold))
    monkeypatch.undo()
    mended = cross_validate(asked(tiny, tmp_path / "run"), progress=Quiet(), retry_failed=True)
    assert not mended.failed
    assert digests(run.lane_folder(0, 1)) == digests(alone.lane_folder(0, 1))


@pytest.mark.slow
def test_an_interrupt_keeps_every_workers_step(cluster: None, tiny: Path, tmp_path: Path) -> None:
    train = {"epochs": 40, "checkpoint_every": 50}
    cross_validate(asked(tiny, tmp_path / "alone", ray=None, train=train), progress=Quiet())
    progress = Watching(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted) as ended:
        cross_validate(asked(tiny, tmp_path / "run", train=train), progress=progress)
    assert ended.value.exit_code == 143
    assert list((tmp_path / "run").glob("checkpoints/*/step-*.safetensors"))
    cross_validate(asked(tiny, tmp_path / "run", train=train), progress=Quiet())
    assert same(tmp_path / "run", tmp_path / "alone")


def test_x01_gpus_are_chosen_before_torch_is_imported_one_a_worker(cluster: None, tiny: Path, tmp_path: Path) -> None:
    recipe = Recipe.build(asked(tiny, tmp_path / "run", device={"kind": "auto"}))
    with workers_ray.RayWorkers(recipe, None, Quiet(), Interrupts(), threads=1) as workers:
        assert sorted(fact["cuda_visible_devices"] for fact in workers.facts) == ["0", "1"]
        assert [fact["torch_was_imported"] for fact in workers.facts] == [False, False]
        if not torch.cuda.is_available():  # the GPUs aren't there: never a silent run on the CPU
            with pytest.raises(DeviceError, match=r"device-unavailable: a worker on .* was given GPU"):
                workers.place()
    assert not torch.cuda.is_initialized()


def test_x01_a_gpu_that_is_not_there_is_refused(cluster: None, tiny: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(DeviceError, match="device-unavailable") as refused:
        cross_validate(asked(tiny, tmp_path / "run", device={"kind": "cuda"}), progress=Quiet())
    assert refused.value.exit_code == 2
    with pytest.raises(DeviceError, match=r"device.workers is 5, and the Ray cluster has 2 GPUs"):
        cross_validate(asked(tiny, tmp_path / "run", workers=5, device={"kind": "cuda"}), progress=Quiet())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_x02_every_row_is_scored_once_whatever_the_number_of_workers(
    cluster: None, tiny: Path, cases: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join((cases / "chat24.jsonl").read_text().splitlines(keepends=True)[:22]))
    one = cross_validate(asked(tiny, tmp_path / "one", rows=rows, workers=1), progress=Quiet())
    three = cross_validate(asked(tiny, tmp_path / "three", rows=rows, workers=3), progress=Quiet())
    table = pyarrow.parquet.read_table(tmp_path / "three" / "out_of_fold.parquet")
    assert table.num_rows == 22
    assert sorted(table.column("row").to_pylist()) == list(range(1, 23))
    for a, b in zip(one.trials[0]["folds"], three.trials[0]["folds"], strict=True):
        assert a == b
    assert sum(fold["rows"] for fold in three.trials[0]["folds"]) == 22


def start_head(port: int, place: Path) -> subprocess.Popen[bytes]:
    """A cluster of its own on this machine."""
    words = f"start --head --port={port} --num-cpus=3 --block --include-dashboard=false --disable-usage-stats"
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words.split(), f"--temp-dir={place}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.wait()


@pytest.mark.slow
def test_after_a_lost_head_the_same_command_goes_on(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    train = {"epochs": 60, "checkpoint_every": 5}
    cross_validate(asked(tiny, tmp_path / "alone", ray=None, train=train), progress=Quiet())
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_yaml(asked(tiny, tmp_path / "run", ray=f"127.0.0.1:{port}", train=train)))
    command = [sys.executable, "-m", "crosstune", "run", str(file)]

    short = Path(tempfile.mkdtemp(prefix="ray"))  # a socket's path may have 107 bytes
    head = start_head(port, short)
    try:
        time.sleep(8)
        run = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        while not list((tmp_path / "run").glob("checkpoints/*/*.safetensors")):
            assert run.poll() is None, run.communicate()[1]
            time.sleep(0.1)
        kill_with_children(head)
        said = run.communicate(timeout=120)[1]
        assert run.returncode == 2, said
        assert "ray-lost: the head node" in said
        head = start_head(port, short)
        time.sleep(8)
        assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
        assert same(tmp_path / "run", tmp_path / "alone")
    finally:
        kill_with_children(head)
        shutil.rmtree(short, ignore_errors=True)


def test_a_model_in_memory_and_an_absent_cluster_are_refused(tiny: Path, tmp_path: Path) -> None:
    recipe = asked(tiny, tmp_path / "run", ray="127.0.0.1:1")
    script = (
        "import sys; from crosstune.crossval import cross_validate; from crosstune.errors import DeviceError\n"
        "import json\n"
        "try: cross_validate(json.loads(sys.argv[1]))\n"
        "except DeviceError as error: print(error.problem); sys.exit(error.exit_code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(recipe)], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "ray-unreachable: no Ray cluster answers at '127.0.0.1:1'" in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with pytest.raises(DeviceError, match="isn't of the form HOST:PORT"):
        cluster_module.refuse_silent("ray://host:10001")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    del recipe["model"]
    with pytest.raises(RecipeError, match="a model in memory was passed"):
        cross_validate(recipe, model=model, tokenizer=tokenizer, progress=Quiet())
