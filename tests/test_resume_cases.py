"""Failures that others reported: damaged checkpoints, best steps mixed up between folds, NaN averaged in, memory kept."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from crosstune.crossval import cross_validate
from crosstune.errors import ModelError, RunError
from crosstune.fitting.fit import fit
from crosstune.model.device import live_tensors
from crosstune.progress import Quiet
from crosstune.store.run import Run
from crosstune.train import wave as wave_module
from tests.kill_run import digests, unreadable


class Stopped(Exception):
    """The process is gone."""


class Telling(Quiet):
    """Progress that remembers what was said, and may stop the run after some step."""

    def __init__(self, stop_after: float = math.inf) -> None:
        super().__init__()
        self.said: list[str] = []
        self.left = stop_after

    def say(self, text: str) -> None:
        self.said.append(text)

    def advance(self, n: int = 1, **facts: Any) -> None:
        if "losses" in facts:
            self.left -= 1
            if self.left == 0:
                raise Stopped


def asked(tiny: Path, rows: Path, output: Path, *, k: int = 3, **sections: Any) -> dict[str, Any]:
    return {
        "model": str(tiny),
        "data": {"path": str(rows), "max_tokens": 128},
        "folds": {"k": k, "seed": 0},
        "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]},
        "train": {"epochs": 1, "batch_size": 2, "learning_rate": 5e-3, **sections.pop("train", {})},
        "device": {"kind": "cpu", "lanes": 1, "precision": "fp32", **sections.pop("device", {})},
        "output": str(output),
        **sections,
    }


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_r02_a_cut_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    tiny: Path, cases: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "chat24.jsonl"
    rows.write_bytes((cases / "chat24.jsonl").read_bytes())
    train = {"checkpoint_every": 1}
    cross_validate(asked(tiny, rows, tmp_path / "alone", train=train), progress=Quiet())

    run = tmp_path / "run"
    steps = 8  # 16 rows, 2 a step
    with pytest.raises(Stopped):
        cross_validate(asked(tiny, rows, run, train=train), progress=Telling(steps + 4))  # 3 kept in the second fold
    first = run / "lanes" / "trial-0" / "fold-0"
    before, when = digests(first), times(first)
    folds = (run / "folds.parquet").read_bytes()
    newest = max(run.glob("checkpoints/*/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])

    progress = Telling()
    result = cross_validate(asked(tiny, rows, run, train=train), progress=progress)
    assert not result.failed
    assert [text for text in progress.said if newest.name in text and "damaged" in text]
    assert (digests(first), times(first)) == (before, when)
    assert (run / "folds.parquet").read_bytes() == folds
    found, want = digests(run), digests(tmp_path / "alone")
    assert found.pop("recipe.yaml") != want.pop("recipe.yaml")
    assert found == want

    with pytest.raises(RunError, match=r"resume-recipe-changed.*folds\.k was 3 and is now 4") as refused:
        cross_validate(asked(tiny, rows, run, k=4, train=train), progress=Quiet())
    assert refused.value.exit_code == 2
    changed = rows.read_text().splitlines(keepends=True)
    row = json.loads(changed[6])
    row["messages"][-1]["content"] += "!"
    changed[6] = json.dumps(row) + "\n"
    rows.write_text("".join(changed))
    with pytest.raises(RunError, match=r"resume-data-changed.*row 7 is the first that isn't the same"):
        cross_validate(asked(tiny, rows, run, train=train), progress=Quiet())


def test_c02_each_fold_keeps_its_own_best_step(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {0: [0.1, 0.2, 0.3, 0.4], 1: [0.9, 0.5, 0.7, 0.8], 2: [0.9, 0.8, 0.7, 0.6]}
    monkeypatch.setattr(wave_module, "stop_loss", lambda lane, scores: losses[lane.job.fold][lane.step - 1])
    touched: dict[int, dict[str, int]] = {}
    real = wave_module.train_step

    def watching(slots: Any, optimizer: Any, lanes: Any, batches: Any, *run: Any) -> Any:
        touched[lanes[0].job.fold] = times(tmp_path / "run" / "lanes") if (tmp_path / "run" / "lanes").exists() else {}
        return real(slots, optimizer, lanes, batches, *run)

    monkeypatch.setattr(wave_module, "train_step", watching)
    train = {"max_steps": 4, "keep": "best", "stop": {"on": "held_out", "patience": 9}}
    del (recipe := asked(tiny, cases / "C02-best.jsonl", tmp_path / "run", train=train))["train"]["epochs"]
    cross_validate({**recipe, "evaluate": {"every": 1}}, progress=Quiet())

    run = Run.read(tmp_path / "run")
    assert {fold: event["kept_step"] for (_, fold), event in run.finished_lanes().items()} == {0: 1, 1: 2, 2: 4}
    assert all(event["optimistic"] for event in run.finished_lanes().values())
    shas = {}
    for fold, step in {0: 1, 1: 2, 2: 4}.items():
        folder = run.lane_folder(0, fold)
        final, kept = (folder / name / "adapter_model.safetensors" for name in ("adapter", f"step-{step:06d}"))
        shas[fold] = hashlib.sha256(final.read_bytes()).hexdigest()
        assert hashlib.sha256(kept.read_bytes()).hexdigest() == shas[fold]
    assert len(set(shas.values())) == 3
    first = {name: when for name, when in times(run.folder / "lanes").items() if "fold-0" in name}
    assert {name: when for name, when in touched[1].items() if "fold-0" in name} == first
    assert {name: when for name, when in touched[2].items() if "fold-0" in name} == first


def test_p02_a_lane_that_turns_infinite_fails_alone_and_is_not_averaged_in(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = asked(
        tiny, cases / "chat8.jsonl", tmp_path / "alone", k=4, train={"epochs": 3, "checkpoint_every": 1}, device={"lanes": 4}
    )  # fmt: skip
    cross_validate(recipe, progress=Quiet())
    real = wave_module.train_step

    def infinite_embeddings_in_fold_1_at_step_2(slots: Any, optimizer: Any, lanes: Any, batches: Any, *run: Any) -> Any:
        def hook(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
            rows = out.shape[0] // len(lanes)
            out = out.clone()
            out[rows : 2 * rows] *= torch.inf
            return out

        if lanes[0].step != 1:
            return real(slots, optimizer, lanes, batches, *run)
        handle = slots.base.model.get_input_embeddings().register_forward_hook(hook)
        try:
            return real(slots, optimizer, lanes, batches, *run)
        finally:
            handle.remove()

    seen: list[Path] = []

    def every_file_is_finite() -> None:
        for path in (tmp_path / "run").rglob("*.safetensors"):
            with suppress(FileNotFoundError):  # those that keep checkpoints are at work beside this: the last two stay
                tensors = load(path.read_bytes())
                seen.append(path)
                assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in tensors.values()), path

    class Looking(Quiet):
        def advance(self, n: int = 1, **facts: Any) -> None:
            if "losses" in facts:
                every_file_is_finite()

    monkeypatch.setattr(wave_module, "train_step", infinite_embeddings_in_fold_1_at_step_2)
    result = cross_validate({**recipe, "output": str(tmp_path / "run")}, progress=Looking())
    every_file_is_finite()
    assert [path for path in seen if "checkpoints" in path.parts]
    assert [(lane["fold"], lane["step"], lane["reason"]) for lane in result.failed] == [(1, 2, "non-finite-loss")]
    run, alone = Run.read(tmp_path / "run"), Run.read(tmp_path / "alone")
    assert not (run.lane_folder(0, 1) / "adapter").exists()
    for fold in (0, 2, 3):
        assert digests(run.lane_folder(0, fold)) == digests(alone.lane_folder(0, fold))
    trial = result.trials[0]
    kept = [alone.finished_lanes()[0, fold]["loss"] for fold in (0, 2, 3)]
    assert trial["mean"] == pytest.approx(np.mean(kept), rel=1e-12)
    assert trial["std"] == pytest.approx(np.std(kept, ddof=1), rel=1e-9)
    assert (trial["finished"], trial["asked"]) == (3, 4)

    monkeypatch.undo()
    again = cross_validate({**recipe, "output": str(tmp_path / "run")}, progress=Quiet())
    assert len(again.failed) == 1  # a failed lane isn't tried again unless asked
    mended = cross_validate({**recipe, "output": str(tmp_path / "run")}, progress=Quiet(), retry_failed=True)
    assert not mended.failed
    assert mended.trials[0]["finished"] == 4
    assert not unreadable(tmp_path / "run")


def test_c03a_a_renamed_key_in_what_was_kept_is_named_when_the_run_goes_on(
    tiny: Path, cases: Path, tmp_path: Path
) -> None:
    recipe = asked(tiny, cases / "chat8.jsonl", tmp_path / "run", k=2, train={"checkpoint_every": 1})
    with pytest.raises(Stopped):
        cross_validate(recipe, progress=Telling(4))  # two steps a fold: the first is over, of the second two are kept
    file = Run.read(tmp_path / "run").lane_folder(0, 0) / "adapter" / "adapter_model.safetensors"
    whole, tensors = file.read_bytes(), load_file(file)
    old = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    new = old.replace("layers.1", "layer.1")
    save_file({new if key == old else key: tensor for key, tensor in tensors.items()}, file)
    with pytest.raises(ModelError, match="adapter-keys") as refused:
        cross_validate(recipe, progress=Quiet())
    assert refused.value.exit_code == 2
    assert f"missing: {old}" in refused.value.problem
    assert f"unexpected: {new}" in refused.value.problem
    file.write_bytes(whole[:100])
    with pytest.raises(ModelError, match="can't be read"):
        cross_validate(recipe, progress=Quiet())
    file.write_bytes(whole)

    # In a checkpoint a renamed tensor is damage like any other: named, and the one before it taken.
    newest = max((tmp_path / "run").glob("checkpoints/*/*.safetensors"))
    with safe_open(newest, framework="pt") as kept:
        header, tensors = kept.metadata(), {key: kept.get_tensor(key) for key in kept.keys()}  # noqa: SIM118
    save_file({key.replace("parameters", "parameter"): tensor for key, tensor in tensors.items()}, newest, header)
    progress = Telling()
    assert not cross_validate(recipe, progress=progress).failed
    assert [text for text in progress.said if newest.name in text and "damaged" in text]
    cross_validate({**recipe, "output": str(tmp_path / "alone")}, progress=Quiet())
    found, want = digests(tmp_path / "run"), digests(tmp_path / "alone")
    assert found.pop("recipe.yaml") != want.pop("recipe.yaml")
    assert found == want


def test_m01_nothing_of_a_fold_is_alive_when_the_next_one_begins(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    born: list[tuple[int, weakref.ref[Any]]] = []
    alive: dict[int, int] = {}
    real = wave_module.train_step

    def watching(slots: Any, optimizer: Any, lanes: Any, batches: Any, *run: Any) -> Any:
        fold = lanes[0].job.fold
        if fold not in alive:
            dead = [other for other, ref in born if other != fold and ref() is not None]
            assert not dead, f"of folds {dead} something is alive at the first step of fold {fold}"
            born.extend((fold, weakref.ref(thing)) for thing in (slots, optimizer, *lanes, *optimizer.kernels))
            born.extend((fold, weakref.ref(tensor)) for tensor in (slots.master_KP, slots.grad_KP, optimizer.m_KP))
            gc.collect()
            alive[fold] = live_tensors("cpu").total()
        return real(slots, optimizer, lanes, batches, *run)

    monkeypatch.setattr(wave_module, "train_step", watching)
    cross_validate(asked(tiny, cases / "chat24.jsonl", tmp_path / "run", k=4), progress=Quiet())
    assert sorted(alive) == [0, 1, 2, 3]
    assert len(set(alive.values())) == 1, alive
    after = [event["live_bytes_after"] for event in Run.read(tmp_path / "run").events("wave_finished")]
    assert len(after) == 4  # the figure for each fold is in the journal


def test_rows_that_were_moved_are_the_same_rows_and_a_fit_finds_them_where_they_are(
    tiny: Path, cases: Path, tmp_path: Path
) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    here.write_bytes((cases / "chat8.jsonl").read_bytes())
    cross_validate(asked(tiny, here, tmp_path / "alone", k=2), progress=Quiet())
    with pytest.raises(Stopped):
        cross_validate(asked(tiny, here, tmp_path / "run", k=2), progress=Telling(3))
    here.rename(there)
    cross_validate(asked(tiny, there, tmp_path / "run", k=2), progress=Quiet())
    for fold in range(2):
        lane = f"lanes/trial-0/fold-{fold}"
        assert digests(tmp_path / "run" / lane) == digests(tmp_path / "alone" / lane)
    assert fit(tmp_path / "run", progress=Quiet()).adapter.is_dir()
    there.write_text("".join(there.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match=r"resume-data-changed.*row 8 is gone"):
        cross_validate(asked(tiny, there, tmp_path / "run", k=2), progress=Quiet())


def test_a_finished_run_says_so_and_changes_nothing(tiny: Path, cases: Path, tmp_path: Path) -> None:
    recipe = asked(tiny, cases / "chat8.jsonl", tmp_path / "run", k=2)
    first = cross_validate(recipe, progress=Quiet())
    before = digests(tmp_path / "run")
    progress = Telling()
    second = cross_validate(recipe, progress=progress)
    assert any("finished; nothing to do" in text for text in progress.said)
    assert json.dumps(second.to_json()["trials"]) == json.dumps(first.to_json()["trials"])
    assert digests(tmp_path / "run") == before
