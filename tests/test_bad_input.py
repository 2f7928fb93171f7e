"""A user's mistakes through the command: one clear error with its fix, exit code 2, nothing written, no traceback."""

import json
import signal
import subprocess
import sys
import time

import pytest

from crosstune import cli
from tests.signals import end_by

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A number, {n}."}],
     "label": "ab"[n % 2], "fold": str(n % 3)} for n in range(12)
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny):
    """A working folder with rows and a recipe for the tiny model; the encoded rows' cache lies elsewhere."""
    monkeypatch.setenv("CROSSTUNE_CACHE", "")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no retries where there is no network
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (place / "recipe.yaml").write_text(
        f"model: {tiny}\ndata: {{path: rows.jsonl, max_tokens: 64}}\nfolds: {{k: 3}}\ntrain: {{epochs: 1}}\noutput: run\n"
    )
    (place / "empty").mkdir()
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text('{"model_type": "llama"')
    return place


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.path=gone.jsonl"], ["gone.jsonl"]),
        (["model=gone/model"], ["gone/model"]),
        (["model=empty"], ["empty"]),
        (["model=broken"], ["broken"]),
        (["model=gone.gguf"], ["gone.gguf"]),
        (["model.tokenizer=./gone"], ["./gone", "Check model.tokenizer"]),
        (["folds.kind=stratified", "folds.by=lable"], ["lable", "label"]),
        (["folds.kind=group", "folds.group=usr"], ["usr", "label"]),
        (["folds.k=13"], ["13", "12"]),
        (["folds.kind=stratified", "folds.by=label", "folds.k=7"], ["7", "6"]),
        (["lora.targets=[q_prj]"], ["q_prj", "q_proj"]),
        (["train.epochs=2", "train.max_steps=5"], ["epochs", "max_steps"]),
        (["train.keep=best"], ["train.stop"]),
        (["data.shape=text", "data.text=body"], ["body"]),
        (["data.max_tokens=2"], ["max_tokens"]),
        (["device.kind=cuda"], ["cuda"]),
        (["device.precision=fp16"], ["fp16"]),
        (["evaluate.metrics=[los]"], ["los", "loss"]),
        (["output=rows.jsonl"], ["rows.jsonl"]),
    ],
)
def test_it_is_refused_before_anything_is_written(folder, capsys, changes, said):
    if changes == ["device.kind=cuda"]:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    before = sorted(str(path) for path in folder.rglob("*"))
    code = cli.main(["run", "recipe.yaml", *changes, "--json"])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert out == "" and "Traceback" not in err
    problem = err[err.index("error") :]
    assert all(word in problem for word in said), problem
    assert "\n  " in problem, "the fix stands on a line of its own"
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_a_column_that_leaves_a_fold_without_rows_is_refused(folder, capsys):
    rows = [{**row, "fold": "0"} for row in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["run", "recipe.yaml", "folds.kind=column", "folds.by=fold"]) == 2
    assert "fold" in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_the_same_recipe_again_says_so_and_another_is_refused(folder, capsys):
    assert cli.main(["run", "recipe.yaml", "--json"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert cli.main(["run", "recipe.yaml", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "finished" in err and json.loads(out)["trials"] == first["trials"]
    assert cli.main(["run", "recipe.yaml", "lora.rank=2"]) == 2
    assert "lora.rank" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_the_same_command_goes_on(folder):
    command = [sys.executable, "-m", "crosstune", "run", "recipe.yaml", "train.epochs=3000", "--json"]
    journal = folder / "run" / "journal.jsonl"
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        while process.poll() is None and not (journal.exists() and "lane_evaluated" in journal.read_text()):
            time.sleep(0.1)
        out, _, seconds = end_by(signal.SIGINT, process)
    said = (folder / "log").read_text()
    assert process.returncode == 130 and 0 < seconds < 10
    assert "Traceback" not in said and "interrupted" in said and out == ""
    events = [json.loads(line)["event"] for line in journal.read_text().splitlines()]
    assert events[0] == "created" and "run_finished" not in events
