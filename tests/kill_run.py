"""Kill a cross-validation at random moments, go on each time until it is done, and compare with one left alone.

    python tests/kill_run.py --kills 200
    python tests/kill_run.py --kills 10 --device cuda --precision bf16 --longer 100

Half of the kills come at a random time, half at a random write, flush or rename inside the run, before, in the middle
of, or after it. After each kill every file in the run folder must be readable; at the end scores, out-of-fold losses,
adapters and all other files must be byte-equal to the undisturbed run's (the journal tells of the kills, so not it).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TRAIN = {"epochs": 2, "learning_rate": 5e-3, "batch_size": 4, "checkpoint_every": 1, "seed": 3}


def recipe_for(folder: Path, model: Path, device: dict[str, Any]) -> dict[str, Any]:
    """Three folds in two waves, with dropout; one lane's best step is kept."""
    return {
        "model": str(model),
        "data": {"path": str(ROOT / "tests" / "cases" / "chat24.jsonl"), "max_tokens": 128},
        "folds": {"k": 3, "seed": 1},
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
        "train": {**TRAIN, "keep": "best", "stop": {"share": 0.2, "patience": 9}},
        "device": {"kind": "cpu", "lanes": 2, **device},
        "output": str(folder),
    }


def with_longer_answers(recipe: dict[str, Any], times: int, file: Path) -> dict[str, Any]:
    """The same on rows whose answers are written `times` over: attention on a GPU takes such rows in several blocks."""
    rows = [json.loads(line) for line in Path(recipe["data"]["path"]).read_text().splitlines()]
    for row in rows:
        row["messages"][-1]["content"] *= times
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**recipe, "data": {"path": str(file), "max_tokens": 2048}}


def as_sweep(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same with four trials, of which weak ones are given up, and answers written and marked."""
    return {
        **recipe,
        "sweep": {"lora.rank": [2, 4], "train.learning_rate": [1e-3, 1e-2], "prune": "halving"},
        "evaluate": {"metrics": ["loss", "exact_match"], "max_new_tokens": 4},
    }


def train(recipe: dict[str, Any], call: int = 0, how: str = "") -> None:
    """The whole run, in this process; it kills itself at its `call`-th write, unless that is 0."""
    import torch

    from crosstune.crossval import cross_validate
    from crosstune.progress import Quiet

    if call:
        fill_disk_at_call(call) if how == "full" else die_at_call(call, how)
    torch.set_num_threads(1)
    cross_validate(recipe, progress=Quiet())


def start(recipe: dict[str, Any], call: int = 0, how: str = "") -> int:
    """Begin `train` in a child. CUDA can't be started again in a fork, so on a GPU the child is a new program."""
    if recipe["device"]["kind"] == "cpu":
        return fork(lambda: train(recipe, call, how))
    words = json.dumps([recipe, call, how])
    return os.posix_spawn(sys.executable, [sys.executable, __file__, "--child", words], os.environ)


def fork(work: Callable[[], None]) -> int:
    """Run `work` in a child: torch is imported once, and every child starts in milliseconds."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:  # the child ends here, whatever it was
            code = getattr(error, "exit_code", 1)
            print(error, file=sys.stderr) if code == 2 else traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def fill_disk_at_call(number: int) -> None:
    """From the `number`-th write, flush or rename on, none succeeds: the disk is full."""
    from crosstune.train import checkpoint

    left = [number]

    def full(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **named)

        return call

    os.write, os.fsync = full(os.write), full(os.fsync)  # type: ignore[assignment]
    Path.replace, Path.write_bytes = full(Path.replace), full(Path.write_bytes)  # type: ignore[method-assign]
    Path.mkdir = full(Path.mkdir)  # type: ignore[method-assign]
    checkpoint.save_file = full(checkpoint.save_file)  # type: ignore[assignment]


def die_at_call(number: int, how: str) -> None:
    """From now on, this process kills itself at its `number`-th write, flush, rename or folder removal."""
    left = [number]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if how == "after":
                    real(*args, **named)
                if how == "half" and real is real_write:
                    real(args[0], args[1][: len(args[1]) // 2])
                if how == "half" and real is real_save:
                    real(*args, **named)
                    os.truncate(args[1], Path(args[1]).stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **named)

        return call

    from crosstune.train import checkpoint

    real_write, real_save = os.write, checkpoint.save_file
    os.write, os.fsync, os.unlink = deadly(os.write), deadly(os.fsync), deadly(os.unlink)  # type: ignore[assignment]
    Path.replace, shutil.rmtree = deadly(Path.replace), deadly(shutil.rmtree)  # type: ignore[method-assign,assignment]
    checkpoint.save_file = deadly(checkpoint.save_file)  # type: ignore[assignment]


def unreadable(folder: Path) -> list[str]:
    """Files that can't be read as what their name says. Half-written ones carry a dot or lie in a folder that does."""
    import pyarrow.parquet
    from safetensors import safe_open

    from crosstune.recipe.yaml_text import parse_yaml
    from crosstune.store.journal import Journal

    def read_tensors(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)

    readers: dict[str, Callable[[Path], Any]] = {
        ".json": lambda path: json.loads(path.read_text()),
        ".jsonl": Journal.read,
        ".parquet": pyarrow.parquet.read_table,
        ".safetensors": read_tensors,
        ".yaml": lambda path: parse_yaml(path.read_text()),
    }
    bad = []
    for path in folder.rglob("*"):
        if path.suffix in readers and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            try:
                readers[path.suffix](path)
            except Exception as error:  # whatever it is, the file can't be read
                bad.append(f"{path}: {error}")
    return bad


def digests(folder: Path) -> dict[str, str]:
    """Name → SHA-256 of every file but the journal and the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("journal.jsonl", ".lock")
    }


def wait(child: int, seconds: float | None = None) -> int | None:
    """Exit status of `child` (negative: the signal that killed it); SIGKILL it after `seconds`."""
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, 0 if end is None else os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            end = None
        else:
            time.sleep(0.002)


def kill_and_resume(kills: int, recipe: dict[str, Any], *, seed: int, say: Callable[[str], None]) -> None:
    """Raise AssertionError unless every killed run ends as the undisturbed one."""
    chance = random.Random(seed)
    folder = Path(recipe["output"])  # a run that is done begins anew there
    began = time.monotonic()
    assert wait(start(recipe)) == 0, "the undisturbed run failed"
    seconds, want, calls = time.monotonic() - began, digests(folder), 150
    shutil.rmtree(folder)
    say(f"undisturbed: {seconds:.1f} s, {len(want)} files")

    imports = 0 if recipe["device"]["kind"] == "cpu" else 0.5  # a new program spends half its time on them
    done = deaths = runs = 0
    while deaths < kills:
        by_time = chance.random() < 0.5
        moment, call = chance.uniform(imports, 1) * seconds, chance.randrange(1, calls)
        how = chance.choice(["before", "half", "after"])
        code = wait(start(recipe), moment) if by_time else wait(start(recipe, call, how))
        assert code in (0, -signal.SIGKILL), f"exit {code} after {deaths} kills (by_time {by_time}, call {call} {how})"
        bad = unreadable(folder) if folder.exists() else []
        assert not bad, f"after {deaths} kills: {bad}"
        deaths += code != 0
        runs += 1
        if code == 0:
            compare(folder, want, deaths)
            shutil.rmtree(folder)
            done += 1
            say(f"{deaths} kills, {done} runs done, all byte-equal")
    assert wait(start(recipe)) == 0
    compare(folder, want, deaths)
    say(f"{deaths} kills in {runs + 1} starts, {done + 1} runs done, all byte-equal, no unreadable file")


def fill_disk_and_resume(recipe: dict[str, Any], *, stride: int, say: Callable[[str], None]) -> None:
    """The disk is full from write 1, 1 + stride, … on: exit code 2 and a sentence each time, and nothing lost."""
    folder = Path(recipe["output"])
    assert wait(start(recipe)) == 0, "the undisturbed run failed"
    want = digests(folder)
    shutil.rmtree(folder)
    for faults, call in enumerate(range(1, 10**6, stride)):
        code = wait(start(recipe, call, "full"))
        if code == 0:
            say(f"{faults} full disks, each refused with exit code 2, all byte-equal afterwards")
            return
        assert code == 2, f"exit {code} with the disk full from write {call} on"
        bad = unreadable(folder) if folder.exists() else []
        assert not bad, f"full from write {call} on: {bad}"
        assert wait(start(recipe)) == 0
        compare(folder, want, faults)
        shutil.rmtree(folder)


def compare(folder: Path, want: dict[str, str], deaths: int) -> None:
    found = digests(folder)
    assert found == want, f"after {deaths} kills: " + ", ".join(
        name for name in sorted(found.keys() | want.keys()) if found.get(name) != want.get(name)
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--longer", type=int, default=1, metavar="N", help="write each answer N times over")
    parser.add_argument("--sweep", action="store_true", help="four trials with pruning and written answers")
    parser.add_argument(
        "--full", type=int, metavar="N", help="in place of kills: the disk is full from every N-th write on"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        train(*json.loads(asked.child))
        return
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        make_model(model)
        device = {"kind": asked.device, "precision": asked.precision}
        recipe = recipe_for(Path(place) / "run", model, device)
        if asked.longer > 1:
            recipe = with_longer_answers(recipe, asked.longer, Path(place) / "longer.jsonl")
        if asked.full:
            fill_disk_and_resume(recipe, stride=asked.full, say=print)
            return
        kill_and_resume(asked.kills, as_sweep(recipe) if asked.sweep else recipe, seed=asked.seed, say=print)


def make_model(folder: Path) -> None:
    """In a child: a parent that has used torch's threads must not fork."""

    def make() -> None:
        from tests.tiny import make_tiny

        make_tiny(folder)

    assert wait(fork(make)) == 0


def preload() -> None:
    """Everything that a run imports, once, before the children fork: a kill then hits the run and not its imports."""
    names = "pandas pyarrow.parquet sklearn.model_selection torch transformers.models.llama.modeling_llama"
    for name in [*names.split(), "crosstune.crossval", "crosstune.record", "crosstune.train.wave"]:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("bitsandbytes")


if __name__ == "__main__":
    if "--child" not in sys.argv:
        preload()
    main()
