"""Lanes that are over are saved side by side; the journal has a lane's line once all of the lane is on the disk."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from crosstune import record as record_module
from crosstune.crossval import cross_validate
from crosstune.errors import LaneFailed, RunError
from crosstune.export import folder as folder_module
from crosstune.export.folder import CHECKSUMS, Draft, wrong_checksums
from crosstune.fitting import record as fit_record_module
from crosstune.fitting.fit import fit
from crosstune.interrupt import Interrupts
from crosstune.model.attach import Slots
from crosstune.progress import Quiet
from crosstune.store.run import Run
from crosstune.train import wave as wave_module
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.events import LaneEvaluated, LaneFinished
from crosstune.train.fault import WaveFault
from crosstune.train.lane import Status
from crosstune.train.recover import PlanChanged
from crosstune.train.run_wave import run_wave
from tests.kill_run import digests
from tests.lanes import Outcome, PlanOf, Shrinking, fold_job, fp32_base, random_tokens
from tests.test_faults import asked

real_save, real_finish = fit_record_module.save_adapter, record_module.finish_adapter


@pytest.mark.parametrize("do", [cross_validate, partial(fit, seeds=[1, 2, 3])], ids=["run", "fit"])
def test_a_tokenizers_files_are_made_once_and_each_adapter_has_them(
    do: Any, tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = PreTrainedTokenizerBase.save_pretrained, []

    def save_pretrained(self: Any, folder: Any, *args: Any, **how: Any) -> Any:
        made.append(self)
        return real(self, folder, *args, **how)

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save_pretrained)
    do(asked(tiny, cases, tmp_path / "run"), progress=Quiet())
    assert len(made) == 1
    real(made[0], tmp_path / "own")
    adapters = list((tmp_path / "run").glob("lanes/*/*/adapter"))
    assert len(adapters) == 3
    for adapter in adapters:
        assert not wrong_checksums(adapter)
        assert digests(tmp_path / "own").items() <= digests(adapter).items()


def all_at_once(
    parties: int, patch: pytest.MonkeyPatch, module: Any = record_module, name: str = "finish_adapter"
) -> None:
    """No adapter is finished unless so many are being finished."""
    met, real = threading.Barrier(parties, timeout=60), getattr(module, name)

    def together(*args: Any, **how: Any) -> None:
        met.wait()
        real(*args, **how)

    patch.setattr(module, name, together)


def test_adapters_of_a_fit_are_saved_side_by_side(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_at_once(3, monkeypatch, fit_record_module, "save_adapter")
    fits = fit(asked(tiny, cases, tmp_path / "fit"), seeds=[1, 2, 3], progress=Quiet()).fits
    assert len(fits) == 3 and not [one for one in fits if wrong_checksums(one.adapter)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crosstune-writer")]


def test_an_adapter_of_a_fit_that_cannot_be_saved_fails_alone(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_adapter(folder: Path, *args: Any, **how: Any) -> None:
        if "trial-0" in str(folder):
            raise IndexError("no such tensor")
        real_save(folder, *args, **how)

    with monkeypatch.context() as patch, pytest.raises(LaneFailed, match="IndexError: no such tensor"):
        patch.setattr(fit_record_module, "save_adapter", save_adapter)
        fit(asked(tiny, cases, tmp_path / "fit"), seeds=[1, 2], progress=Quiet())
    run = Run.read(tmp_path / "fit")
    assert list(run.failed_lanes()) == [(0, None)] and list(run.finished_lanes()) == [(1, None)]


@pytest.mark.parametrize("train", [{}, {"keep": "best", "stop": {"share": 0.2, "patience": 9}}], ids=["last", "best"])
def test_lines_come_in_the_order_of_the_lanes_each_after_its_folder_though_all_are_saved_at_once(
    train: dict[str, Any], tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met, real_record, lines = threading.Barrier(3, timeout=60), Run.record, []

    def finish_adapter(draft: Draft, *args: Any, **how: Any) -> None:
        if draft.final.name == "adapter":
            met.wait()  # for the other two lanes
            time.sleep(0.5 * ("fold-0" in str(draft.final)))
        real_finish(draft, *args, **how)

    def record(self: Run, event: str, *args: Any, **fields: Any) -> None:
        if event == "lane_finished":
            folder = self.lane_folder(fields["trial"], fields["fold"])
            assert (folder / "adapter" / CHECKSUMS).is_file() and not wrong_checksums(folder / "adapter")
            assert len(self.read_lane_rows(fields["trial"], fields["fold"])["row"]) == fields["rows"]
        lines.append((event, fields.get("fold")))
        real_record(self, event, *args, **fields)

    monkeypatch.setattr(record_module, "finish_adapter", finish_adapter)
    monkeypatch.setattr(Run, "record", record)
    assert not cross_validate(asked(tiny, cases, tmp_path / "run", train=train), progress=Quiet()).failed
    finished = [("lane_finished", fold) for fold in (0, 1, 2)]
    assert [line for line in lines if line[0] in ("lane_finished", "wave_finished")][-4:] == [
        *finished, ("wave_finished", None),
    ]  # fmt: skip
    assert not list((tmp_path / "run").glob("lanes/*/*/.*"))


def test_a_power_cut_after_a_lanes_line_takes_no_folder_of_it(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders made or renamed last only once the folder that names them is flushed."""
    fleeting: dict[Path, int] = {}  # folder → inode of the one that names it
    mkdir, replace, fsync, record = os.mkdir, os.replace, os.fsync, Run.record
    checked: list[int] = []

    def note(path: Any) -> None:
        if Path(path).is_dir():
            fleeting[Path(path)] = Path(path).parent.stat().st_ino

    def make(path: Any, *args: Any, **how: Any) -> None:
        mkdir(path, *args, **how)
        note(path)

    def rename(source: Any, place: Any, **how: Any) -> None:
        replace(source, place, **how)
        note(place)

    def flush(handle: int) -> None:
        fsync(handle)
        flushed = os.fstat(handle).st_ino
        for path in [path for path, inode in list(fleeting.items()) if inode == flushed]:
            fleeting.pop(path, None)

    def in_time(run: Run, event: str, *args: Any, **fields: Any) -> None:
        if event == "lane_finished":
            place = run.lane_folder(fields["trial"], fields["fold"]) / "adapter"
            assert not [path for path in (place, *place.parents) if path in fleeting]
            checked.append(fields["fold"])
        record(run, event, *args, **fields)

    for name, watched in (("mkdir", make), ("replace", rename), ("fsync", flush)):
        monkeypatch.setattr(os, name, watched)
    monkeypatch.setattr(Run, "record", in_time)
    cross_validate(asked(tiny, cases, tmp_path / "runs" / "new" / "run"), progress=Quiet())
    assert checked == [0, 1, 2]


def test_all_of_an_adapters_folder_but_its_card_is_on_the_disk_before_the_lane_is_scored_and_each_file_is_flushed_once(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[tuple[str, str]] = []  # the file, and when
    sync, score = folder_module.sync, wave_module.score_lanes
    draft, finish = record_module.draft_adapter, record_module.finish_adapter
    drafted, finished = threading.Semaphore(0), threading.Event()

    def flush(place: Path) -> None:
        sync(place)
        if "fold-1" in place.parts:
            flushed.append((place.name, "finish" if finished.is_set() else "draft"))

    def draft_adapter(*args: Any, **how: Any) -> Draft:
        made = draft(*args, **how)
        drafted.release()
        return made

    def finish_adapter(draft: Draft, *args: Any, **how: Any) -> None:
        if "fold-1" in draft.final.parts:
            finished.set()
        finish(draft, *args, **how)

    def score_lanes(*args: Any, **how: Any) -> Any:
        for _ in range(3):
            assert drafted.acquire(timeout=60)
        return score(*args, **how)

    for module, name, watched in (
        (folder_module, "sync", flush),
        (record_module, "draft_adapter", draft_adapter),
        (record_module, "finish_adapter", finish_adapter),
        (wave_module, "score_lanes", score_lanes),
    ):
        monkeypatch.setattr(module, name, watched)
    assert not cross_validate(asked(tiny, cases, tmp_path / "run"), progress=Quiet()).failed
    folder = tmp_path / "run" / "lanes" / "trial-0" / "fold-1" / "adapter"
    files = {file.name for file in folder.rglob("*") if file.is_file()}
    late = {"README.md", "crosstune.json", CHECKSUMS}
    assert sorted(flushed) == sorted((name, "finish" if name in late else "draft") for name in files)
    assert not wrong_checksums(folder)


def test_a_score_that_is_told_twice_in_one_sitting_is_one_line(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a worker of a Ray cluster that goes on from a checkpoint of the one that was lost."""
    real = record_module.Recorder.__call__

    def twice(self: record_module.Recorder, event: Any) -> None:
        real(self, event)
        if isinstance(event, LaneEvaluated):
            real(self, event)

    monkeypatch.setattr(record_module.Recorder, "__call__", twice)
    cross_validate(asked(tiny, cases, tmp_path / "run"), progress=Quiet())
    assert [event["fold"] for event in Run.read(tmp_path / "run").events("lane_evaluated")] == [0, 1, 2]


def test_a_disk_that_refuses_one_lane_ends_the_run_when_all_threads_are_done_and_lanes_before_it_are_kept(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_adapter(draft: Draft, *args: Any, **how: Any) -> None:
        if "fold-1" in str(draft.final):
            raise RunError("no", "room")
        time.sleep(0.5 * ("fold-2" in str(draft.final)))
        real_finish(draft, *args, **how)

    recipe = asked(tiny, cases, tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(RunError, match="no"):
        patch.setattr(record_module, "finish_adapter", finish_adapter)
        cross_validate(recipe, progress=Quiet())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("crosstune-writer")]
    stopped = Run.read(tmp_path / "run")
    assert list(stopped.finished_lanes()) == [(0, 0)] and not stopped.failed_lanes()
    assert (stopped.lane_folder(0, 2) / "adapter").is_dir()  # saved in vain: nothing says so, and it is done again
    cross_validate(recipe, progress=Quiet())
    cross_validate(asked(tiny, cases, tmp_path / "alone"), progress=Quiet())
    for fold in range(3):
        name = f"lanes/trial-0/fold-{fold}"
        assert digests(tmp_path / "run" / name) == digests(tmp_path / "alone" / name)


def test_memory_that_runs_out_while_an_adapter_is_written_early_costs_nothing(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, raised = record_module.draft_adapter, []

    def draft_adapter(folder: Path, *args: Any, **how: Any) -> Draft:
        if "fold-1" in str(folder) and not raised:
            raised.append(folder)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(folder, *args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(record_module, "draft_adapter", draft_adapter)
        assert not cross_validate(asked(tiny, cases, tmp_path / "run"), progress=Quiet()).failed
    cross_validate(asked(tiny, cases, tmp_path / "alone"), progress=Quiet())
    assert len(raised) == 1
    for fold in range(3):
        name = f"lanes/trial-0/fold-{fold}"
        assert digests(tmp_path / "run" / name) == digests(tmp_path / "alone" / name)


def test_lanes_before_one_whose_adapter_cannot_be_fetched_are_told_of(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, real, outcome = fp32_base(tiny), wave_module.Wave._adapter, Outcome()

    def adapter(self: wave_module.Wave, k: int) -> Any:
        if k == 1:
            raise WaveFault("ZeroDivisionError: by zero", 3)
        return real(self, k)

    monkeypatch.setattr(wave_module.Wave, "_adapter", adapter)
    jobs = [fold_job(base, fold, epochs=1) for fold in range(3)]
    with pytest.raises(WaveFault):
        run_wave(base, jobs, random_tokens(), PlanOf(), report=outcome.events.append, progress=Quiet())
    finished = [event for event in outcome.events if isinstance(event, LaneFinished)]
    assert [(event.job.fold, event.status) for event in finished] == [(0, Status.DONE)]


def test_memory_that_runs_out_while_an_adapter_is_kept_leaves_no_checkpoint_of_lanes_half_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, outcome, real, raised = fp32_base(tiny), Outcome(), Slots.adapter, []
    jobs = [fold_job(base, fold, epochs=1, stop={"share": 0.2, "patience": 9}, keep="best") for fold in range(3)]

    def adapter(self: Slots, k: int) -> Any:
        if k == 1 and not raised:
            raised.append(k)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, k)

    monkeypatch.setattr(Slots, "adapter", adapter)
    kept = Checkpoints(tmp_path / "wave", "never", Interrupts(), print)
    report = outcome.events.append
    run_wave(base, jobs, random_tokens(), Shrinking(), report=report, progress=Quiet(), checkpoints=kept)
    kept.close()
    assert any(isinstance(event, PlanChanged) for event in outcome.events)
    assert [event.job.fold for event in outcome.events if isinstance(event, LaneFinished)] == [0, 1, 2]
    assert not list(tmp_path.rglob("*.safetensors"))
