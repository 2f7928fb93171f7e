"""Tokens and passwords stay out of all that a run writes or says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crosstune.store import secrets
from tests.test_run import begin, content, recipe


def test_a_planted_token_reaches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, named, password = "hf_" + "aB3dE6gH" * 4, "plain-words-only", "hunter2hunter2"
    monkeypatch.setenv("MY_SECRET_THING", named)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    asked = recipe(model={"name": f"https://me:{password}@hub/{looks}"}, sweep={"data.path": [named, "false"]})
    with begin(tmp_path / "run", asked) as run:
        run.record("lane_failed", trial=0, fold=0, reason=f"401 for Bearer {password}, {looks}", extra={looks: [named]})
        run.write_scores({"note": named, "key": looks})
    for name, data in content(tmp_path / "run").items():
        assert not any(secret.encode() in data for secret in (looks, named, password)), name
    assert b"false" in content(tmp_path / "run")["recipe.yaml"]
    begin(tmp_path / "run", asked).close()  # the same recipe still is
    monkeypatch.setenv("MY_SECRET_THING", "other-words-now")
    begin(tmp_path / "run", recipe(model=asked.model, sweep={"data.path": ["other-words-now", "false"]})).close()


def test_a_planted_token_reaches_no_output_of_the_command(tiny: Path, cases: Path, tmp_path: Path) -> None:
    looks, named = "hf_" + "aB3dE6gH" * 4, "plain-words-only"
    folder = tmp_path / f"model-{named}-{looks}"
    folder.symlink_to(tiny)
    rows = tmp_path / f"{looks}.jsonl"
    rows.write_bytes((cases / "chat8.jsonl").read_bytes())
    env = {**os.environ, "HF_TOKEN": looks, "SOME_API_KEY": named}
    words = [f"model={folder}", f"data={rows}", "folds.k=2", "train.max_steps=1", "device.kind=cpu"]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}\n")

    def command(*words: str) -> subprocess.CompletedProcess[bytes]:
        run = [sys.executable, "-m", "crosstune", *words]
        return subprocess.run(run, cwd=Path(__file__).parent.parent, env=env, capture_output=True, check=False)

    done = command("run", str(recipe), *words, f"output={tmp_path / 'run'}", "--json")
    assert done.returncode == 0, done.stderr.decode()
    outputs = {"stdout": done.stdout, "stderr": done.stderr}
    done = command("report", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr.decode()
    refused = command("run", str(recipe), *words, f"model={folder}-that-is-not-there", f"output={tmp_path / 'other'}")
    assert refused.returncode == 2
    outputs |= {"report": done.stdout + done.stderr, "refused": refused.stdout + refused.stderr}
    for name, data in {**outputs, **content(tmp_path / "run")}.items():
        assert looks.encode() not in data, name
        assert named.encode() not in data, name


def test_a_secret_that_the_environment_gets_or_changes_later_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"first-secret-words": ["second-secret-words", "third-secret-words"]}
    assert secrets.redact_tree(tree) == tree
    monkeypatch.setenv("MY_SECRET_THING", "first-secret-words")
    assert secrets.redact_tree(tree) == {secrets.MASK: ["second-secret-words", "third-secret-words"]}
    monkeypatch.setenv("MY_SECRET_THING", "second-secret-words")
    assert secrets.redact_tree(tree) == {"first-secret-words": [secrets.MASK, "third-secret-words"]}
    assert secrets.redact("second-secret-words") == secrets.MASK
    monkeypatch.delenv("MY_SECRET_THING")
    assert secrets.redact("second-secret-words") == "second-secret-words"


def test_the_environment_is_asked_once_for_a_whole_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, real = [], secrets._environment_secrets
    monkeypatch.setattr(secrets, "_environment_secrets", lambda: asked.append(1) or real())
    secrets.redact_tree({"a": ["b", {"c": "d"}], "e": "f"})
    assert asked == [1]


def test_ordinary_words_are_not_redacted() -> None:
    for text in (
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "runs/hf_models/task-based-risk-analysis",
        "http://localhost:8000/x",
    ):
        assert secrets.redact(text) == text
