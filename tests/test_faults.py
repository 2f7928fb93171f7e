"""A lane that raises fails alone: recorded with its reason, left out of every mean, tried again when asked."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from crosstune import record as record_module
from crosstune.cli import main
from crosstune.crossval import cross_validate
from crosstune.data.tokens import Tokens
from crosstune.errors import LaneFailed, RecipeError, RunError
from crosstune.export.folder import Draft
from crosstune.fitting.fit import fit
from crosstune.interrupt import Interrupted
from crosstune.nested import nested_cross_validate
from crosstune.progress import Quiet
from crosstune.recipe.yaml_text import dump_yaml
from crosstune.results import scores as scores_module
from crosstune.results.result import Result
from crosstune.store.run import Run
from crosstune.train import wave as wave_module
from crosstune.train.fault import WaveFault, blame_each, ends_the_run, reason_of
from crosstune.train.lane import Lane, LaneJob
from tests.kill_run import digests, unreadable

Inject = Callable[[pytest.MonkeyPatch], None]


def asked(tiny: Path, cases: Path, output: Path, *, lanes: int = 3, **sections: Any) -> dict[str, Any]:
    return {
        "model": str(tiny),
        "data": {"path": str(cases / "chat24.jsonl"), "max_tokens": 128},
        "folds": {"k": 3, "seed": 0},
        "lora": {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]},
        "train": {"epochs": 1, "batch_size": 4, "learning_rate": 5e-3, **sections.pop("train", {})},
        "device": {"kind": "cpu", "lanes": lanes, "precision": "fp32"},
        "output": str(output),
        **sections,
    }


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to: three lanes in one wave."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    cross_validate(asked(tiny, Path(__file__).parent / "cases", folder), progress=Quiet())
    return folder


def rows_out_of_range(patch: pytest.MonkeyPatch) -> None:
    """Fold 1 asks for a row that isn't there, in its third step."""
    real = Lane.next_units

    def next_units(lane: Lane) -> Any:
        return [(999,)] if lane.job.fold == 1 and lane.step == 2 and lane.is_fed else real(lane)

    patch.setattr(Lane, "next_units", next_units)


def no_start(patch: pytest.MonkeyPatch) -> None:
    """Fold 1 can't cut its rows into units."""
    real = Lane.start

    def start(job: LaneJob, tokens: Tokens) -> Lane:
        if job.fold == 1:
            raise IndexError("no such row")
        return real(job, tokens)

    patch.setattr(Lane, "start", start)


def no_score(patch: pytest.MonkeyPatch) -> None:
    """Fold 1's held-out rows can't be scored."""
    real = wave_module.score_lanes

    def score_lanes(slots: Any, tokens: Tokens, rows_K: Sequence[Sequence[int]], **how: Any) -> Any:
        if rows_K[1]:
            raise IndexError("no such row")
        return real(slots, tokens, rows_K, **how)

    patch.setattr(wave_module, "score_lanes", score_lanes)


def no_save(patch: pytest.MonkeyPatch) -> None:
    """Fold 1's adapter can't be written, for a reason that has nothing to do with the disk."""
    real = record_module.finish_adapter

    def finish_adapter(draft: Draft, *args: Any, **how: Any) -> None:
        real(draft, *args, **how)
        if "fold-1" in str(draft.final):
            raise IndexError("no such tensor")

    patch.setattr(record_module, "finish_adapter", finish_adapter)


@pytest.mark.parametrize(
    ("inject", "step"),
    [(rows_out_of_range, 2), (no_start, 0), (no_score, 4), (no_save, 4)],
    ids=["rows", "start", "score", "save"],
)
def test_a_lane_that_raises_fails_alone_and_is_tried_again_when_asked(
    inject: Inject, step: int, tiny: Path, cases: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, want = asked(tiny, cases, tmp_path / "run"), Run.read(alone).finished_lanes()
    with monkeypatch.context() as patch:
        inject(patch)
        result = cross_validate(recipe, progress=Quiet())
    assert [(lane["fold"], lane["step"]) for lane in result.failed] == [(1, step)]
    assert result.failed[0]["reason"].startswith("IndexError: ")
    assert ".py line " in result.failed[0]["reason"]
    run = Run.read(tmp_path / "run")
    assert not list(run.lane_folder(0, 1).glob("*"))
    for fold in (0, 2):  # to rounding: without fold 1 the passes have other shapes
        assert run.finished_lanes()[0, fold]["loss"] == pytest.approx(want[0, fold]["loss"], rel=1e-5)
    trial = result.trials[0]
    assert (trial["finished"], trial["asked"]) == (2, 3)
    assert trial["mean"] == pytest.approx((want[0, 0]["loss"] + want[0, 2]["loss"]) / 2, rel=1e-5)

    assert len(cross_validate(recipe, progress=Quiet()).failed) == 1  # not by itself
    mended = cross_validate(recipe, progress=Quiet(), retry_failed=True)
    assert not mended.failed
    assert mended.trials[0]["mean"] == pytest.approx(Result.read(alone).trials[0]["mean"], rel=1e-5)
    assert mended.trials[0]["metrics"]["loss"]["pooled"] == pytest.approx(mended.trials[0]["pooled_loss"], rel=1e-9)
    assert not unreadable(tmp_path / "run")


def test_saving_that_fails_for_one_lane_changes_no_bit_of_the_others(
    tiny: Path, cases: Path, tmp_path: Path, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_save(monkeypatch)
    cross_validate(asked(tiny, cases, tmp_path / "run"), progress=Quiet())
    for fold in (0, 2):
        assert digests(Run.read(tmp_path / "run").lane_folder(0, fold)) == digests(Run.read(alone).lane_folder(0, fold))


def in_training(error: BaseException, fold: int = 1, step: int = 2) -> Inject:
    """A step of the wave that holds a fold raises."""
    real = wave_module.train_step

    def train_step(slots: Any, optimizer: Any, lanes: Sequence[Lane], batches: Any, *run: Any) -> Any:
        if any(lane.job.fold == fold and lane.step == step for lane in lanes):
            raise error
        return real(slots, optimizer, lanes, batches, *run)

    return lambda patch: patch.setattr(wave_module, "train_step", train_step)


def test_a_wave_that_raises_fails_as_a_whole_and_the_next_one_goes_on(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = asked(tiny, cases, tmp_path / "alone", lanes=2)
    cross_validate(undisturbed, progress=Quiet())
    with monkeypatch.context() as patch:
        in_training(ZeroDivisionError("by zero"))(patch)
        recipe = asked(tiny, cases, tmp_path / "run", lanes=2)
        result = cross_validate(recipe, progress=Quiet())
    assert [(lane["fold"], lane["step"]) for lane in result.failed] == [(0, 2), (1, 2)]
    assert all(lane["reason"].startswith("ZeroDivisionError: by zero") for lane in result.failed)
    run, want = Run.read(tmp_path / "run"), Run.read(tmp_path / "alone")
    assert digests(run.lane_folder(0, 2)) == digests(want.lane_folder(0, 2))
    assert not cross_validate(recipe, progress=Quiet(), retry_failed=True).failed
    for fold in (0, 1, 2):  # the same lanes in one wave: the same bytes
        assert digests(run.lane_folder(0, fold)) == digests(want.lane_folder(0, fold))


def test_a_run_in_which_every_lane_raises_says_so(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_training(ZeroDivisionError("by zero"))(monkeypatch)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(asked(tiny, cases, tmp_path / "run")))
    assert main(["run", str(tmp_path / "recipe.yaml")]) == 3


def test_a_nested_cross_validation_counts_lanes_that_failed_within_and_tries_them_again(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = asked(tiny, cases, tmp_path / "run", folds={"k": 3, "outer": 2}, lanes=1)
    (tmp_path / "recipe.yaml").write_text(dump_yaml(recipe))
    with monkeypatch.context() as patch:
        in_training(ZeroDivisionError("by zero"), step=1)(patch)
        assert main(["run", str(tmp_path / "recipe.yaml")]) == 3
    assert json.loads((tmp_path / "run" / "nested.json").read_text())["failed"] == 2  # fold 1 within each outer fold
    assert main(["run", str(tmp_path / "recipe.yaml")]) == 3
    assert main(["run", str(tmp_path / "recipe.yaml"), "--retry-failed"]) == 0


def test_lanes_tried_again_may_make_another_setting_win_within_an_outer_fold(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = {"train.learning_rate": [0.0, 5e-3]}
    recipe = asked(tiny, cases, tmp_path / "run", folds={"k": 2, "outer": 2}, lanes=1, sweep=sweep)
    real = wave_module.train_step

    def train_step(slots: Any, optimizer: Any, lanes: Sequence[Lane], *more: Any) -> Any:
        if any(lane.job.trial == 1 for lane in lanes):
            raise ZeroDivisionError("by zero")
        return real(slots, optimizer, lanes, *more)

    with monkeypatch.context() as patch:
        patch.setattr(wave_module, "train_step", train_step)
        without = nested_cross_validate(recipe, progress=Quiet())
    assert all(fold.settings == {"train.learning_rate": 0.0} for fold in without.folds)
    mended = nested_cross_validate(recipe, progress=Quiet(), retry_failed=True)
    assert all(fold.settings == {"train.learning_rate": 5e-3} for fold in mended.folds)
    assert mended.failed == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"), RunError("no", "room"), AssertionError("ours"), KeyboardInterrupt(),
        Interrupted(2), ValueError("No space left on device (os error 28)"), RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_what_no_other_lane_would_escape_ends_the_run(
    error: BaseException, tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_training(error)(monkeypatch)
    with pytest.raises(type(error)):
        cross_validate(asked(tiny, cases, tmp_path / "run"), progress=Quiet())
    run = Run.read(tmp_path / "run")
    assert not run.failed_lanes()
    monkeypatch.undo()
    assert not cross_validate(asked(tiny, cases, tmp_path / "run"), progress=Quiet()).failed


def test_memory_with_nothing_left_to_make_smaller_is_no_lanes_fault() -> None:
    assert ends_the_run(torch.OutOfMemoryError("CUDA out of memory"))
    assert ends_the_run(MemoryError())
    assert not ends_the_run(RuntimeError("shapes don't match"))


def test_a_metric_that_raises_for_one_lane_fails_that_lane(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crosstune.train.exam import Exam

    real, calls = Exam.scores, [0]

    def scores(exam: Exam, marks: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:  # the base, fold 0, fold 1
            raise ZeroDivisionError("no word in an answer")
        return real(exam, marks)

    evaluate = {"metrics": ["loss", "exact_match"], "max_new_tokens": 2}
    recipe = asked(tiny, cases, tmp_path / "run", evaluate=evaluate)
    with monkeypatch.context() as patch:
        patch.setattr(Exam, "scores", scores)
        result = cross_validate(recipe, progress=Quiet())
    assert [lane["fold"] for lane in result.failed] == [1]
    assert result.trials[0]["metrics"]["exact_match"]["folds"] == 2
    assert not cross_validate(recipe, progress=Quiet(), retry_failed=True).failed


def broken_metric(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    raise ZeroDivisionError("no word in an answer")


def test_a_metric_that_raises_for_the_base_is_refused_before_any_lane_is_trained(
    tiny: Path, cases: Path, tmp_path: Path
) -> None:
    evaluate = {"metrics": ["loss", broken_metric], "max_new_tokens": 2}
    with pytest.raises(RecipeError, match="the untuned base raised ZeroDivisionError: no word in an answer"):
        cross_validate(asked(tiny, cases, tmp_path / "run", evaluate=evaluate), progress=Quiet())
    assert not Run.read(tmp_path / "run").events("lane_evaluated")


def test_a_metric_that_raises_over_all_rows_is_refused_and_every_lane_is_kept(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = asked(tiny, cases, tmp_path / "run", evaluate={"metrics": ["loss", "exact_match"], "max_new_tokens": 2})
    with monkeypatch.context() as patch:
        patch.setattr(scores_module, "pool_marks", lambda metrics, marks, groups: broken_metric([], []))
        with pytest.raises(RecipeError, match="all answers together raised ZeroDivisionError: no word in an answer"):
            cross_validate(recipe, progress=Quiet())
    kept = Run.read(tmp_path / "run").finished_lanes()
    result = cross_validate(recipe, progress=Quiet())
    assert len(kept) == 3 and not result.failed
    assert result.trials[0]["metrics"]["exact_match"]["pooled"] is not None


def test_a_fit_that_raises_is_a_failed_lane_with_its_reason(
    tiny: Path, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {**asked(tiny, cases, tmp_path / "fit"), "folds": {"k": 3}}
    with monkeypatch.context() as patch:
        in_training(ZeroDivisionError("by zero"), fold=None)(patch)  # type: ignore[arg-type]
        with pytest.raises(LaneFailed, match="ZeroDivisionError: by zero") as failed:
            fit(recipe, progress=Quiet())
    assert failed.value.exit_code == 3
    assert fit(recipe, again=True, progress=Quiet()).adapter.is_dir()


def test_blame_falls_on_those_who_raise_alone() -> None:
    broken, told = {1, 3}, {}

    def alone(k: int) -> int:
        return 10 // (k not in broken)

    def together() -> list[int]:
        return [alone(k) for k in range(5) if k not in told]

    assert len(blame_each(together, alone, range(5), told.__setitem__)) == 3
    assert set(told) == broken
    with pytest.raises(ZeroDivisionError):
        blame_each(lambda: 1 // 0, lambda k: k, range(5), told.__setitem__)


def test_a_reason_is_one_line_and_survives_pickling() -> None:
    try:
        [][3]
    except IndexError as error:
        assert reason_of(error).startswith("IndexError: list index out of range (test_faults.py line ")
    fault = pickle.loads(pickle.dumps(WaveFault("IndexError: x", 7)))
    assert (fault.reason, fault.step, reason_of(fault)) == ("IndexError: x", 7, "IndexError: x")
    assert reason_of(ValueError("one\ntwo")) == "ValueError: one"
