"""From a run to something that answers: what is deployed is what was scored, and it ends its answers by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import crosstune
from crosstune.data.load import load_rows
from crosstune.deploy import average, merge, rows_for
from crosstune.errors import CrosstuneError, DataError, ModelError, RunError
from crosstune.fitting.fit import fit
from crosstune.nested import nested_cross_validate
from crosstune.progress import Quiet
from crosstune.recipe.sections import Data
from crosstune.store.run import Run
from crosstune.train.generate import Sampling
from tests.test_fit import CHAT8, CHAT24, LORA, recipe, run_folds
from tests.tiny import make_tiny

LEARN_BY_HEART = {
    "lora": {"rank": 8, "alpha": 16, "targets": "all-linear"},
    "train": {"max_steps": 150, "batch_size": 8, "learning_rate": 5e-3},
}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("CROSSTUNE_CACHE", "")


def test_a_folds_merge_has_the_loss_that_the_run_recorded(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    run = Run.read(tmp_path / "run")
    for fold in range(3):
        event = run.finished_lanes()[0, fold]
        found = merge(run.lane_folder(0, fold) / "adapter", tmp_path / f"merged-{fold}").verification
        assert found.rows == event["rows"]
        assert found.loss_adapter == pytest.approx(event["loss"], rel=1e-5)
        assert found.loss_merged == pytest.approx(event["loss"], rel=1e-5)
        assert found.loss_base == pytest.approx(event["base_loss"], rel=1e-5)


def test_a_fits_merge_is_judged_on_rows_it_held_out_else_on_its_own(tiny, tmp_path):
    fit(recipe(tiny, tmp_path / "some"), held_out=0.25, progress=Quiet())
    event = Run.read(tmp_path / "some").finished_lanes()[0, None]
    report = merge(tmp_path / "some", tmp_path / "merged")
    assert report.verification.rows == len(event["held_out_rows"]) == 2
    assert report.verification.loss_adapter == pytest.approx(event["held_out"]["loss"], rel=1e-5)
    fit(recipe(tiny, tmp_path / "all"), progress=Quiet())
    assert merge(tmp_path / "all", tmp_path / "merged-all").verification.rows == 8
    assert len(rows_for(tmp_path / "all/lanes/trial-0/all/adapter", most=3)) == 3
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "| fold | all rows but those held out |" in card and "loss of base, base + adapter, merged" in card


def test_a_run_without_a_fit_and_one_with_two_say_what_to_do(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run", sweep={"lora.rank": [2, 4]})
    with pytest.raises(ModelError, match="no fit on all rows") as caught:
        merge(tmp_path / "run", tmp_path / "merged")
    assert "crosstune fit" in caught.value.fix
    fit(tmp_path / "run", trial=0, progress=Quiet())
    fit(tmp_path / "run", trial=1, progress=Quiet())
    for trial in (0, 1):
        report = merge(tmp_path / "run", tmp_path / f"merged-{trial}", trial=trial)
        assert report.layers == 4
    with pytest.raises(RunError, match="no fit of trial 5"):
        merge(tmp_path / "run", tmp_path / "merged", trial=5)


def test_of_several_seeds_one_is_to_be_named_and_no_fit_is_asked_for(tiny, tmp_path):
    fit(recipe(tiny, tmp_path / "seeds"), seeds=(1, 2), progress=Quiet())
    with pytest.raises(RunError, match="2 fits and no folds") as caught:
        merge(tmp_path / "seeds", tmp_path / "merged")
    assert caught.value.fix == "Name one: --trial 0 or --trial 1."
    assert merge(tmp_path / "seeds", tmp_path / "merged", trial=1).layers == 4


def test_a_result_stands_for_its_folder_and_one_prompt_for_a_list_of_one(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    result = crosstune.Result.read(tmp_path / "run")
    assert crosstune.Result.read(result) == result
    assert result.compare(result).sentence == result.compare(tmp_path / "run").sentence
    assert crosstune.write_report(result) == tmp_path / "run/report.html"
    averaged = average(result, tmp_path / "mean")
    assert averaged.rank == 12 and json.loads(json.dumps(averaged.to_json()))["folder"] == str(tmp_path / "mean")
    fitted = fit(result, progress=Quiet())
    merge(fitted, tmp_path / "merged")
    sampling = Sampling(max_new_tokens=4)
    named = list(crosstune.generate([str(tmp_path / "run")], ["Name one tree."], sampling=sampling))
    for source in (result, fitted, tmp_path / "run", str(tmp_path / "run")):
        assert [one.ids for one in crosstune.generate(source, "Name one tree.", sampling=sampling)] == [named[0].ids]


def test_merging_on_a_device_that_is_not_there_is_refused(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    with pytest.raises(CrosstuneError, match="device"):
        merge(tmp_path / "run/lanes/trial-0/fold-0/adapter", tmp_path / "merged", device="gpu")
    assert not (tmp_path / "merged").exists()


def test_the_average_of_a_runs_folds_opens_and_merges(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    assert average(tmp_path / "run", tmp_path / "mean").rank == 12
    assert average(tmp_path / "run", tmp_path / "small", rank=4).lost > 0
    merge(tmp_path / "small", tmp_path / "merged")
    with pytest.raises(RunError, match="no trial 3"):
        average(tmp_path / "run", tmp_path / "other", trial=3)


def test_an_average_is_scored_on_new_rows_of_a_file_as_peft_scores_it(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    known = set(load_rows(CHAT8, Data(path=CHAT8)).hashes)
    rows = load_rows(CHAT24, Data(path=CHAT24))
    lines = Path(CHAT24).read_text().splitlines(keepends=True)
    new = [line for line, key in zip(lines, rows.hashes, strict=True) if key not in known]
    mixed, only_new = tmp_path / "mixed.jsonl", tmp_path / "new.jsonl"
    mixed.write_text(Path(CHAT8).read_text() + "".join(new))
    only_new.write_text("".join(new))
    made = average(tmp_path / "run", tmp_path / "mean", rank=4, data=str(mixed), device="cpu")
    assert made.score.rows == len(new) > 8
    want = merge(tmp_path / "mean", tmp_path / "merged", data=str(only_new)).verification  # by PEFT's own forward
    assert made.score.loss == pytest.approx(want.loss_adapter, rel=1e-5)
    assert made.score.base_loss == pytest.approx(want.loss_base, rel=1e-5)
    alone = [
        merge(Run.read(tmp_path / "run").lane_folder(0, fold), tmp_path / f"alone-{fold}", data=str(only_new))
        for fold in range(3)
    ]
    assert made.score.alone == pytest.approx([one.verification.loss_adapter for one in alone], rel=1e-5)
    assert f"{len(new)} rows of" in (tmp_path / "mean" / "README.md").read_text()


def test_an_average_has_no_score_where_every_row_was_seen(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    made = average(tmp_path / "run", tmp_path / "mean")
    assert made.score is None and "no score" in made.words()
    with pytest.raises(DataError, match="all 8 rows are among those of the run"):
        average(tmp_path / "run", tmp_path / "other", data=CHAT8)
    assert not (tmp_path / "other").exists()


def test_an_average_within_a_nested_cross_validation_is_scored_on_the_outer_fold(tiny, tmp_path):
    tree = recipe(tiny, tmp_path / "n", folds={"k": 2, "outer": 2}, data=CHAT24, sweep={"lora.rank": [2, 4]})
    nested_cross_validate(tree, progress=Quiet())
    for fold in range(2):
        made = average(tmp_path / "n" / f"outer-{fold}", tmp_path / f"mean-{fold}", device="cpu")
        (chosen,) = (tmp_path / "n").glob(f"outer-{fold}-chosen-*")
        outside = Run.read(chosen)
        assert made.score.rows == len(outside.read_folds()["row"])
        assert made.score.base_loss == pytest.approx(outside.finished_lanes()[0, 0]["base_loss"], rel=1e-5)
        assert made.score.loss < made.score.base_loss


NEW_PROCESS = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
kind, base, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(base if kind == "adapter" else folder)
if kind == "adapter":
    from peft import PeftModel
    from transformers import GenerationConfig
    model = PeftModel.from_pretrained(model, folder)
    model.generation_config = GenerationConfig.from_pretrained(folder)
text = tokenizer.apply_chat_template([{"role": "user", "content": "Name one metal."}], tokenize=False, add_generation_prompt=True)
ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
new = model.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids.input_ids.shape[1]:].tolist()
print(json.dumps({"ids": new, "text": tokenizer.decode(new, skip_special_tokens=True)}))
"""


def test_t03_a_learned_answer_ends_with_the_templates_token_in_a_new_process(tmp_path):
    base = make_tiny(tmp_path / "base", "base")  # the tokenizer says 361, the template ends turns with 368
    one = tmp_path / "one.jsonl"
    one.write_text(Path(CHAT8).read_text().splitlines()[0] + "\n")
    adapter = fit(recipe(base, tmp_path / "fit", data=str(one), **LEARN_BY_HEART), progress=Quiet()).adapter
    merge(tmp_path / "fit", tmp_path / "merged")
    for kind, folder in (("adapter", adapter), ("merged", tmp_path / "merged")):
        command = [sys.executable, "-c", NEW_PROCESS, kind, str(base), str(folder)]
        said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        assert said["text"] == "zinc" and said["ids"][-1] == 368 and len(said["ids"]) < 40
        assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [361, 368]


def test_a_chat_learned_by_heart_ends_by_itself_on_every_prompt(tiny, tmp_path):
    fit(recipe(tiny, tmp_path / "fit", **LEARN_BY_HEART), progress=Quiet())
    merge(tmp_path / "fit", tmp_path / "merged")
    rows = load_rows(CHAT8, Data(path=CHAT8))
    sources = ["base", str(tmp_path / "fit"), str(tmp_path / "merged")]
    answers = list(crosstune.generate(sources, rows, sampling=Sampling(max_new_tokens=40), device="cpu"))
    want = [row.turns[-1].content for row in rows.rows]
    for source in sources[1:]:
        said = [answer for answer in answers if answer.source == source]
        assert [answer.text for answer in said] == want
        assert all(answer.stopped for answer in said)
    assert [answer.text for answer in answers if answer.source == "base"] != want


def test_rows_that_were_in_memory_are_not_asked_for(tiny, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(CHAT8, lines=True)
    crosstune.cross_validate(
        data=frame,
        model=str(tiny),
        output=str(tmp_path / "run"),
        folds={"k": 2},
        lora=LORA,
        train={"epochs": 1},
        progress=Quiet(),
    )
    folder = tmp_path / "run/lanes/trial-0/fold-0/adapter"
    assert rows_for(folder) == [] and len(rows_for(folder, frame)) == 8
    assert merge(folder, tmp_path / "merged").verification.loss_merged is None
