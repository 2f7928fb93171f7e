"""Checkpoints of a wave: come back to the bit, or are named as damaged and the one before is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from crosstune.errors import RunError
from crosstune.train.checkpoint import load_checkpoint, save_checkpoint


def state(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {
        "parameters": torch.randn(3, 50),
        "m": torch.randn(3, 50).to(torch.bfloat16),
        "scale": torch.full((3,), 2.0**16, dtype=torch.float64),
        "done": torch.tensor([True, False, True]),
        "strided": torch.randn(4, 6).T,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(step),
    }


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(folder, state(step), {"step": step, "lanes": [[0, 1], [0, None]], "loss": 0.1 + 0.2})


def assert_is_step(folder: Path, step: int) -> None:
    loaded = load_checkpoint(folder)
    assert loaded is not None
    tensors, meta = loaded
    assert meta == {"step": step, "lanes": [[0, 1], [0, None]], "loss": 0.1 + 0.2}
    for name, tensor in state(step).items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_all_types_and_shapes_come_back_to_the_bit(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "wave") is None
    save(tmp_path / "wave", 7)
    assert_is_step(tmp_path / "wave", 7)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000003.safetensors",
        "step-000000010.safetensors",
    ]
    assert_is_step(tmp_path, 10)


@pytest.mark.parametrize("where", ["cut to 100 bytes", "cut by one byte", "empty", "first byte", "header", "data"])
def test_a_damaged_one_is_named_and_the_one_before_it_taken(where: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    newest = tmp_path / "step-000000002.safetensors"
    data = bytearray(newest.read_bytes())
    cut = {"cut to 100 bytes": 100, "cut by one byte": -1, "empty": 0}
    flip = {"first byte": 0, "header": 60, "data": len(data) - 200}
    if where in cut:
        data = data[: cut[where]]
    else:
        data[flip[where]] ^= 1
    newest.write_bytes(data)
    said: list[str] = []
    loaded = load_checkpoint(tmp_path, say=said.append)
    assert loaded is not None
    assert loaded[1]["step"] == 1
    assert len(said) == 1
    assert str(newest) in said[0]
    save(tmp_path, 2)
    assert_is_step(tmp_path, 2)


def test_after_a_damaged_one_the_last_two_are_again_two_to_go_on_from(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    newest = tmp_path / "step-000000010.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    assert_is_step(tmp_path, 5)
    save(tmp_path, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000000005.safetensors",
        "step-000000006.safetensors",
    ]
    (tmp_path / "step-000000006.safetensors").write_bytes(b"")
    assert_is_step(tmp_path, 5)


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = tmp_path / "step-000000001.safetensors"
    whole = place.read_bytes()
    unnoticed = []
    for byte in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[byte] ^= 1 << byte % 8
        place.write_bytes(flipped)
        if load_checkpoint(tmp_path) is not None:
            unnoticed.append(byte)
    assert not unnoticed


def test_with_none_whole_the_wave_starts_over(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for place in tmp_path.iterdir():
        place.write_bytes(b"")
    said: list[str] = []
    assert load_checkpoint(tmp_path, say=said.append) is None
    assert len(said) == 2


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(*((os, "fsync") if name == "fsync" else (Path, "replace")), full)
        with pytest.raises(RunError, match="No space left on device"):
            save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.safetensors"]
    assert_is_step(tmp_path, 1)


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from crosstune.errors import RunError
from crosstune.train.checkpoint import load_checkpoint
from tests.test_checkpoint import assert_is_step, save
from tests.test_run import whole_story

disk = Path(sys.argv[1])
step = 0
try:
    while True:
        (disk / f"ballast-{step}").write_bytes(bytes(3000))
        save(disk / "wave", step + 1)
        step += 1
except (RunError, OSError) as error:
    assert isinstance(error, RunError), error
    assert "No space left on device" in error.problem and "Free some space" in error.fix, error
assert step > 5
assert_is_step(disk / "wave", step)
print("checkpoint", step)

for ballast in disk.glob("ballast-*"):
    ballast.unlink()
    try:
        whole_story(disk / "run")
    except RunError as error:
        assert "No space left on device" in error.problem, error
        print("full")
whole_story(disk / "run")
print("done")
"""


AN_ADAPTER_ON_A_SMALL_DISK = """
import os
import sys
from pathlib import Path

from crosstune.errors import RunError
from crosstune.recipe.sections import Lora
from tests.adapters import export

disk, model = map(Path, sys.argv[1:])
ballast, full = disk / "ballast", 0
for left in range(0, 120, 4):
    ballast.write_bytes(b"")
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - 1024 * left)))
    try:
        export(disk / "adapter", model, Lora(rank=4))
    except RunError as error:
        full += 1
        assert "No space left on device" in error.problem, error
        assert [file.name for file in disk.iterdir()] == ["ballast"]
    else:
        break
assert (disk / "adapter").is_dir()
print(full)
print("done")
"""


A_MERGE_ON_A_SMALL_DISK = """
import os
import sys
from pathlib import Path

from crosstune.errors import CrosstuneError
from crosstune.export import merge
from crosstune.recipe.sections import Lora
from tests.adapters import export

disk, model = map(Path, sys.argv[1:])
export(disk / "adapter", model, Lora(rank=4))
ballast, said = disk / "ballast", set()
for left in range(470, 600, 10):  # KiB: the tensors take 481
    ballast.write_bytes(b"")
    free = os.statvfs(disk)
    ballast.write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - 1024 * left)))
    try:
        merge(disk / "adapter", disk / "merged")
    except CrosstuneError as error:
        said.add("No space left" if "No space left on device" in str(error) else "needs")
        assert sorted(file.name for file in disk.iterdir()) == ["adapter", "ballast"]
    else:
        break
print(sorted(said))
print("done")
"""


def on_a_small_disk(size: str, code: str, disk: Path, *more: str) -> str:
    mount = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size={size} none "$0" && exec "$@"', str(disk)]
    if subprocess.run([*mount, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no small disk can be mounted here (unshare, mount)")
    command = [*mount, sys.executable, "-c", code, str(disk), *more]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
    return done.stdout


def test_on_a_disk_that_is_really_full(tmp_path: Path) -> None:
    assert "full" in on_a_small_disk("120k", ON_A_SMALL_DISK, tmp_path)


def test_an_adapter_for_which_the_disk_is_too_small_is_said_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    """Weights, config, tokenizer, card: whichever file is the one that no longer fits."""
    assert int(on_a_small_disk("400k", AN_ADAPTER_ON_A_SMALL_DISK, tmp_path, str(tiny)).split()[0]) > 8


def test_a_merge_for_which_the_disk_is_too_small_is_said_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    said = on_a_small_disk("3m", A_MERGE_ON_A_SMALL_DISK, tmp_path, str(tiny))
    assert said.splitlines()[0] == "['No space left', 'needs']"  # beforehand for tensors, else when it happens
