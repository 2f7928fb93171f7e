"""The run folder: goes on as the same run or is refused with what changed, and nothing in it is lost or leaks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from crosstune.errors import RunError
from crosstune.recipe.recipe import Recipe
from crosstune.store import files
from crosstune.store.run import Run

ROWS = [1, 2, 3, 5, 6]
HASHES = [hashlib.sha256(bytes([row])).digest() for row in ROWS]
BASIC = {"model": "some/model", "data": "rows.jsonl"}


def recipe(**sections: Any) -> Recipe:
    return Recipe.build({**BASIC, **sections})


def begin(folder: Path, asked: Recipe | None = None, **changes: Any) -> Run:
    return Run.open(folder, **{"recipe": asked or recipe(), "data_hashes": HASHES, "rows": ROWS, **changes})


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_recipe_goes_on_and_sees_what_was_done(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.record("lane_finished", trial=0, fold=0, loss=1.5)
        run.record("lane_failed", trial=0, fold=1, reason="non-finite loss", step=7)
        run.record("lane_finished", trial=0, fold=None, loss=1.25)
    with begin(tmp_path / "run") as run:
        assert {lane: event["loss"] for lane, event in run.finished_lanes().items()} == {(0, 0): 1.5, (0, None): 1.25}
        assert {lane: event["step"] for lane, event in run.failed_lanes().items()} == {(0, 1): 7}
        assert not run.is_finished
        run.record("run_finished")
    assert Run.read(tmp_path / "run").is_finished


def test_failed_lanes_can_be_made_ready_for_another_try(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.record("lane_failed", trial=0, fold=1, reason="non-finite loss", step=7)
        run.record("run_finished")
        assert run.retry_failed() == [(0, 1)]
        assert not run.failed_lanes()
        assert not run.is_finished
    again = Run.read(tmp_path / "run")
    assert not again.failed_lanes()
    assert not again.is_finished


def test_recipe_yaml_reads_back_to_the_recipe(tmp_path: Path) -> None:
    asked = recipe(train={"learning_rate": 2e-4, "stop": {"patience": 3}}, sweep={"lora.rank": [4, 8]})
    with begin(tmp_path / "run", asked) as run:
        pass
    assert Recipe.load(run.folder / "recipe.yaml") == asked


def test_another_recipe_is_refused_naming_each_key_that_differs(tmp_path: Path) -> None:
    begin(tmp_path / "run", recipe(folds={"k": 3}, sweep={"lora.rank": [4]})).close()
    before = content(tmp_path / "run")
    with pytest.raises(RunError) as refused:
        begin(tmp_path / "run", recipe(folds={"k": 4}, lora={"alpha": 8}, sweep={"lora.rank": [4, 8]}))
    text = str(refused.value)
    assert (
        "folds.k was 3 and is now 4; lora.alpha was 32.0 and is now 8.0; sweep.lora.rank was [4] and is now [4, 8]"
        in text
    )
    assert refused.value.exit_code == 2
    assert content(tmp_path / "run") == before


def test_settings_that_change_no_result_may_change(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    wider = recipe(device={"lanes": 2, "micro_batch": 1, "checkpointing": "all"}, output="elsewhere")
    begin(tmp_path / "run", wider).close()
    assert Recipe.load(tmp_path / "run" / "recipe.yaml") == wider
    with pytest.raises(RunError, match=r"device.precision was 'auto' and is now 'fp16'"):
        begin(tmp_path / "run", recipe(device={"precision": "fp16"}))


def test_a_key_that_an_older_run_lacks_counts_with_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = Recipe.model_dump
    with monkeypatch.context() as older:
        older.setattr(
            Recipe, "model_dump", lambda self, **how: {k: v for k, v in dump(self, **how).items() if k != "lora"}
        )
        begin(tmp_path / "run").close()
    begin(tmp_path / "run").close()
    with pytest.raises(RunError, match=r"lora.rank was 16 and is now 8"):
        begin(tmp_path / "run", recipe(lora={"rank": 8}))


@pytest.mark.parametrize(
    ("rows", "hashes", "said"),
    [
        (ROWS, [*HASHES[:3], b"other", HASHES[4]], "row 5 is the first that isn't the same"),
        (ROWS[:4], HASHES[:4], r"row 6 is gone \(5 rows then, 4 now\)"),
        ([*ROWS, 7], [*HASHES, b"more"], r"row 7 is new \(5 rows then, 6 now\)"),
        ([1, 2, 4, 5, 6], HASHES, "row 4 is the first"),
    ],
)
def test_changed_data_is_refused_naming_the_first_changed_row(
    rows: list[int], hashes: list[bytes], said: str, tmp_path: Path
) -> None:
    begin(tmp_path / "run").close()
    with pytest.raises(RunError, match=said):
        begin(tmp_path / "run", rows=rows, data_hashes=hashes)
    begin(tmp_path / "run").close()


def test_another_model_or_template_is_refused_by_name(tmp_path: Path) -> None:
    begin(tmp_path / "run", prints={"tokens": "a", "model": "b"}).close()
    with pytest.raises(RunError, match="model changed since the run"):
        begin(tmp_path / "run", prints={"tokens": "a", "model": "c"})


def test_folds_are_kept_and_others_refused(tmp_path: Path) -> None:
    table = {"row": [1, 2, 3, 5, 6], "fold": [0, 1, 0, 1, 0]}
    with begin(tmp_path / "run") as run:
        assert run.read_folds() is None
        run.write_folds(table)
        run.write_folds(table)
        with pytest.raises(RunError, match="held out row 3 in fold 0, and now it would be row 3 in fold 1"):
            run.write_folds({**table, "fold": [0, 1, 1, 1, 0]})
        with pytest.raises(RunError, match="held out nothing further, and now it would be row 7 in fold 1"):
            run.write_folds({"row": [*table["row"], 7], "fold": [*table["fold"], 1]})
    stored = pyarrow.parquet.read_table(tmp_path / "run" / "folds.parquet").to_pydict()
    assert stored == table


def test_lane_folders_and_names_stay_inside(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        assert run.lane_folder(0, 3) == tmp_path / "run" / "lanes" / "trial-0" / "fold-3"
        assert run.lane_folder(2, None) == tmp_path / "run" / "lanes" / "trial-2" / "all"
        for name in ("..", ".", "", "/etc/passwd", "a/b", "a\\b", "C:x", "a\0b", "x" * 300):
            with pytest.raises(RunError, match="can't be the name"):
                run.path("lanes", name)
        (tmp_path / "run" / "lanes").symlink_to(tmp_path)
        with pytest.raises(RunError, match="leads out of the run folder"):
            run.lane_folder(0, 0)


def test_two_processes_on_one_run_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, '.'); from tests.test_run import begin; from pathlib import Path\n"
        "run = begin(Path(sys.argv[1])); print('ready', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parent.parent
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, cwd=root)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    with pytest.raises(RunError, match=rf"is in use by process {child.pid} on .*, since 20") as refused:
        begin(tmp_path / "run")
    assert f"kill {child.pid}" in refused.value.fix
    assert not Run.read(tmp_path / "run").is_finished  # looking is always allowed
    child.kill()
    child.wait()
    begin(tmp_path / "run").close()  # a dead holder's lock is taken over


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_flock(*_: object, **how: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")

    monkeypatch.setattr("filelock.FileLock.acquire", no_flock)
    with pytest.raises(RunError, match="its file system has no locks"):
        begin(tmp_path / "run")


def test_a_lock_is_given_back_when_the_run_is_refused(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    for _ in range(2):
        with pytest.raises(RunError, match="another recipe"):
            begin(tmp_path / "run", recipe(folds={"k": 9}))


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        begin(tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("model: mine")
    with pytest.raises(RunError, match=r"holds recipe.yaml but no journal"):
        begin(tmp_path / "mine")
    assert content(tmp_path / "mine") == {"recipe.yaml": b"model: mine"}
    with pytest.raises(RunError, match="holds no run"):
        Run.read(tmp_path / "mine")


def test_killed_while_beginning_the_run_begins_anew(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    journal = tmp_path / "run" / "journal.jsonl"
    whole = journal.read_bytes()
    first = whole.index(b"\n") + 1
    for length in (0, 1, first - 1, first):
        journal.write_bytes(whole[:length])
        (tmp_path / "run" / "recipe.yaml").unlink()
        with begin(tmp_path / "run") as run:
            assert [event["event"] for event in run.events()] == ["created", "opened"]
        assert Recipe.load(tmp_path / "run" / "recipe.yaml") == recipe()


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none "$0" && exec "$@"', str(tmp_path)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no read-only disk can be mounted here (unshare, mount)")
    code = "import sys; from pathlib import Path; from tests.test_run import begin; begin(Path(sys.argv[1]) / 'run')"
    root = Path(__file__).parent.parent
    command = [*mount, sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (
        "Read-only file system\n  The disk is mounted read-only: set output to a folder that can be written."
        in done.stderr
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(RunError, match="Permission denied"):
            begin(tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def whole_story(folder: Path) -> None:
    """A run as the caller drives it: goes on where it was."""
    with begin(folder) as run:
        run.write_folds({"row": ROWS, "fold": [0, 1, 0, 1, 0]})
        for fold in (0, 1):
            if (0, fold) not in run.finished_lanes():
                run.write_lane_rows(0, fold, {"row": [fold], "loss": [0.5]})
                run.record("lane_finished", trial=0, fold=fold, loss=0.5)
        run.write_out_of_fold({"row": [1], "loss": np.float32([0.5])})
        run.write_scores({"mean": 0.5})
        run.record("run_finished")


def fail_after(good_calls: int, number: int, patch: pytest.MonkeyPatch) -> None:
    """From now on only so many more calls that write, flush or rename succeed."""
    left = [good_calls]
    for owner, name in ((os, "write"), (os, "fsync"), (Path, "replace")):
        real = owner.__dict__[name]

        def flaky(*args: Any, real: Any = real) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
            return real(*args)

        patch.setattr(owner, name, flaky)


@pytest.mark.parametrize(("code", "stride"), [(errno.ENOSPC, 1), (errno.EROFS, 7), (errno.EACCES, 7), (errno.EIO, 7)])
def test_every_failing_write_is_a_clear_error_and_the_run_goes_on_later(
    code: int, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_story(tmp_path / "undisturbed")
    want = {name: data for name, data in content(tmp_path / "undisturbed").items() if name != "journal.jsonl"}
    failures = 0
    for good_calls in range(0, 1000, stride):
        place = tmp_path / f"run-{good_calls}"
        with monkeypatch.context() as patch:
            fail_after(good_calls, code, patch)
            try:
                whole_story(place)
            except RunError as error:
                assert os.strerror(code) in error.problem
                assert error.fix
                failures += 1
            else:
                break
        whole_story(place)
        assert {name: data for name, data in content(place).items() if name != "journal.jsonl"} == want
    assert 30 < failures * stride < 200


def test_trust_remote_code_is_in_the_journal(tmp_path: Path) -> None:
    with begin(tmp_path / "run", recipe(model={"name": "m", "trust_remote_code": True})) as run:
        assert run.events("opened")[0]["trust_remote_code"] is True


def test_files_of_a_run_hold_no_pickle_and_are_readable_by_the_group(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        with begin(tmp_path / "run") as run:
            run.write_out_of_fold({"row": [1], "loss": [0.5]})
            kinds = {path.suffix for path in run.folder.rglob("*") if path.is_file() and path.name != ".lock"}
            assert kinds == {".json", ".jsonl", ".parquet", ".yaml"}
            assert (run.folder / "out_of_fold.parquet").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(old)


def test_a_run_of_1000_lanes_opens_in_under_2_seconds(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        for lane in range(1000):
            place = run.lane_folder(lane // 5, lane % 5)
            place.mkdir(parents=True)
            for epoch in range(3):
                run.record(
                    "lane_scored", trial=lane // 5, fold=lane % 5, epoch=epoch, loss=1 / (lane + 1), tokens=12345
                )
            run._state.see(run._journal.append("lane_finished", trial=lane // 5, fold=lane % 5, loss=1.5, steps=100))
    started = time.perf_counter()
    with begin(tmp_path / "run") as run:
        assert len(run.finished_lanes()) == 1000
    assert time.perf_counter() - started < 2


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.write_folds({"row": [1], "fold": [0]})
        place = tmp_path / "run" / "folds.parquet"
        place.write_bytes(place.read_bytes()[:50])
        with pytest.raises(RunError, match=r"folds.parquet is damaged"):
            run.read_folds()


def test_half_files_of_a_killed_writer_are_swept_away(tmp_path: Path) -> None:
    begin(tmp_path / "run").close()
    (tmp_path / "run" / ".scores.json.abc.part").write_text("{")
    begin(tmp_path / "run").close()
    assert not list((tmp_path / "run").glob(".*.part"))


def test_what_a_killed_writer_left_is_swept_away_and_hidden_folders_of_somebodys_own_are_not(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        lane = run.lane_folder(0, 0)
    own = [tmp_path / "run" / ".git", tmp_path / "run" / ".merged.0123abcd", lane / ".ipynb_checkpoints"]
    left = [files.beside(lane / "adapter"), files.beside(lane / "adapter", ".old")]
    for folder in (*own, *left):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    for name in (".tmp-notes", ".tmprS5Xxx", ".adapter.part", ".rows.parquet.0123abcd.part"):
        (lane / name).write_text("x")
    begin(tmp_path / "run").close()
    assert all((folder / "file").is_file() for folder in own)
    assert sorted(place.name for place in lane.iterdir()) == [".ipynb_checkpoints", ".tmp-notes"]


def test_write_file_leaves_the_old_file_when_the_new_one_fails(tmp_path: Path) -> None:
    files.write_file(tmp_path / "x", b"old")

    def fill(part: Path) -> None:
        part.write_bytes(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match="No space left"):
        files.write_file(tmp_path / "x", fill)
    assert content(tmp_path) == {"x": b"old"}


class _OfALibrary(Exception):
    """Not an OSError, though it tells of one."""


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), r"Disk quota exceeded\n  Your quota"),
        (
            _OfALibrary("Error while serializing: I/O error: No space left on device (os error 28)"),
            "\n  Free some space",
        ),
        (  # safetensors 0.5
            _OfALibrary('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'),
            "\n  Free some space",
        ),
        (_OfALibrary("Read-only file system (os error 30)"), "\n  The disk is mounted read-only"),
        (_OfALibrary("I/O error: failed to write whole buffer"), "whole buffer\n  Check that disk"),
    ],
    ids=str,
)
def test_what_the_disk_said_is_a_clear_error_through_whichever_library(
    raised: Exception, said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=f"writing '.*x' failed: .*{said}"), files.guard("writing", tmp_path / "x"):
        raise raised


def test_what_is_no_word_of_the_disks_passes_as_it_is(tmp_path: Path) -> None:
    for error in (_OfALibrary("shapes differ"), RunError("no (os error 28)", "room"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as found, files.guard("writing", tmp_path / "x"):
            raise error
        assert found.value is error


def test_a_folder_that_another_thread_finds_made_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, flushed, begun = files.sync_folder, [], threading.Event()

    def slow(folder: Path) -> None:
        begun.set()
        time.sleep(0.2)
        sync(folder)
        flushed.append(folder)

    monkeypatch.setattr(files, "sync_folder", slow)
    other = threading.Thread(target=files.make_folder, args=(tmp_path / "lanes" / "a",))
    other.start()
    begun.wait()  # it has made both, and flushes the first of their parents
    files.make_folder(tmp_path / "lanes" / "a")
    assert sorted(flushed) == [tmp_path, tmp_path / "lanes"]
    other.join()


def test_scores_are_json(tmp_path: Path) -> None:
    with begin(tmp_path / "run") as run:
        run.write_scores({"mean": 0.1 + 0.2, "rows": 3})
    assert json.loads((tmp_path / "run" / "scores.json").read_text()) == {"mean": 0.1 + 0.2, "rows": 3}
