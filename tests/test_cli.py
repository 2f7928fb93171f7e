"""The command: what goes where, exit codes, and that mistakes are shown rather than thrown."""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crosstune import __version__, cli
from crosstune.recipe.recipe import Recipe, options
from crosstune.store.run import Run


def run(*arguments, **more):
    return subprocess.run([sys.executable, "-m", "crosstune", *arguments], capture_output=True, text=True, **more)


@pytest.fixture
def answers(monkeypatch):
    """`cross_validate` replaced by one that returns `report`, or raises it; gives the list of recipes it is called with."""

    def put(report):
        class Result:
            def to_json(self):
                return report

        asked = []

        def cross_validate(recipe, *, progress, retry_failed=False):
            asked.append(recipe)
            print("a library prints this")
            if isinstance(report, BaseException):
                raise report
            return Result()

        module = type(sys)("crosstune.crossval")
        module.cross_validate = cross_validate
        monkeypatch.setitem(sys.modules, "crosstune.crossval", module)
        return asked

    return put


def report(**more):
    fold = {
        "fold": 0,
        "loss": 1.5,
        "perplexity": 4.48,
        "token_accuracy": 0.5,
        "base_loss": 2.5,
        "rows": 8,
        "tokens": 80,
    }
    trial = {"trial": 0, "settings": {}, "folds": [fold], "mean": 1.5, "interval95": None, "metrics": {}}
    whole = {"run": "runs/x", "trials": [trial], "failed": [], "seconds": 3.0, "peak_bytes": 2**30}
    return {**whole, "conclusion": "", "baselines": {"base": {"loss": 2.0}}, **more}


def test_help_is_instant_and_lists_the_verbs():
    began = time.perf_counter()
    done = run("--help")
    assert done.returncode == 0
    assert time.perf_counter() - began < 2.0  # 0.1 s where nothing else runs; a loaded machine may take its time
    for verb in ("run", "demo", "init", "lint", "plan", "doctor", "fit", "merge", "generate", "compare", "report"):
        assert f"\n  {verb}" in done.stdout


def test_version():
    assert run("--version").stdout.strip() == f"crosstune, version {__version__}"


def test_help_of_run_lists_every_option(capsys):
    assert cli.main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    assert not [option.name for option in options() if f"  {option.name} " not in shown]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere.yaml"], "'nowhere.yaml' can't be read: No such file or directory"),
        (["run"], "Missing argument 'RECIPE'"),
        (["runn"], "No such command 'runn'"),
        (["run", "recipe.yaml", "lora.ranl=4"], "did you mean rank?"),
        (["run", "recipe.yaml", "lora"], "is not of the form"),
        (["run", "recipe.yaml", "data.path=gone.jsonl"], "gone.jsonl"),
        (["demo", "--rows", "many"], "'many' is not a valid integer"),
        (["demo", "--rows", "3"], "--rows 3"),
        (["init", "gone.jsonl", "--model", "m"], "gone.jsonl"),
        (["run", "rows.jsonl"], "crosstune init rows.jsonl --model NAME"),
        (["fit", "more rows.csv"], "crosstune init 'more rows.csv' --model NAME"),
        (["run", "recipe.yaml", "data.path=gone.jsonl"], "It was looked for from"),
        (["plan", "recipe.yaml", "model=./gone", "--memory", "1GiB"], "there is no base model at './gone'"),
        (["plan", "recipe.yaml", "--picture", "parts.jpg"], "ends neither in .svg nor in .png"),
    ],
)
def test_a_mistake_is_one_clear_error(arguments, said, tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: nowhere\ndata: rows.jsonl\n")
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"], "nothing is written"


def test_the_effective_recipe_can_be_shown(cases, capsys):
    assert cli.main(["run", str(cases / "F01-sci.yaml"), "data.path=rows.jsonl", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "  learning_rate: 0.0002\n" in shown and "  weight_decay: 0.01\n" in shown


def test_json_is_the_last_line_and_alone_on_stdout(answers, capsys, cases):
    answers(report())
    assert cli.main(["run", str(cases / "F01-sci.yaml"), "data.path=x", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == report()
    assert "a library prints this" in err


def test_scores_are_a_table_for_people(answers, capsys, cases):
    answers(report())
    assert cli.main(["run", str(cases / "F01-sci.yaml"), "data.path=x"]) == 0
    out = capsys.readouterr().out
    for word in ("base loss", "2.5000", "1.5000", "mean", "95%", "runs/x"):
        assert word in out


def test_a_failed_lane_is_exit_code_3(answers, capsys, cases):
    answers(report(failed=[{"trial": 0, "fold": 1, "reason": "non-finite-loss", "step": 2}]))
    assert cli.main(["run", str(cases / "F01-sci.yaml"), "data.path=x"]) == 3
    assert "non-finite-loss" in capsys.readouterr().out


def test_interrupt_is_exit_code_130(answers, capsys, cases):
    answers(KeyboardInterrupt())
    assert cli.main(["run", str(cases / "F01-sci.yaml"), "data.path=x"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_out_replaces_the_recipes_output_whatever_it_is_called(answers, cases):
    asked = answers(report())
    assert cli.main(["run", str(cases / "F01-sci.yaml"), "data.path=x", "--out", "else/where: 1", "--json"]) == 0
    assert asked[0].output == "else/where: 1"


def test_init_and_report_give_json_and_a_command_that_can_be_pasted(cases, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rows.csv").write_text("prompt,completion\n" + "".join(f"q {n},a {n}\n" for n in range(20)))
    assert cli.main(["init", "my rows.csv", "--model", "m", "--out", "my recipe.yaml", "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told == {"recipe": "my recipe.yaml", "text": (tmp_path / "my recipe.yaml").read_text(encoding="utf-8")}
    command = shlex.split(err.rpartition("next: ")[2])
    assert cli.main([*command[1:], "--show"]) == 0 and "name: m" in capsys.readouterr().out
    with Run.open("run", recipe=Recipe.build({"model": "m", "data": "d"}), data_hashes=[b"0" * 16], rows=[1]):
        pass
    assert cli.main(["report", "run", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)["page"]
    assert "<!doctype html>" in Path(page).read_text(encoding="utf-8")


def test_every_verb_that_makes_something_has_json():
    without = [name for name, verb in cli.crosstune.commands.items() if "as_json" not in {p.name for p in verb.params}]
    assert without == []


def test_another_librarys_advice_on_its_own_kernels_is_no_line_of_ours():
    code = """
import logging
from crosstune import cli
cli.main(["run", "nowhere.yaml"])
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load a kernel")
logging.getLogger("bitsandbytes").warning("something else")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "kernel" not in done.stderr and "something else" in done.stderr
