"""A fit is the winner's setting on all rows: same trainer, epoch and expectation from the folds, equal bytes each time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import crosstune
from crosstune.cli import main
from crosstune.errors import LaneFailed, RecipeError, RunError
from crosstune.fitting.fit import fit
from crosstune.progress import Quiet
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.yaml_text import dump_yaml
from crosstune.stats import fold_interval
from crosstune.store.run import Run
from crosstune.workers import local
from tests.kill_run import digests
from tests.test_resume_cases import Stopped, Telling
from tests.tiny import CASES

CHAT8, CHAT24 = str(CASES / "chat8.jsonl"), str(CASES / "chat24.jsonl")
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("CROSSTUNE_CACHE", "")


def run_folds(tiny: Path, out: Path, **sections):
    given = {"folds": {"k": 3, "seed": 5}, "lora": LORA, "train": {"epochs": 2, "batch_size": 4, "learning_rate": 5e-3}}
    given |= {"model": str(tiny), "output": str(out), "progress": Quiet()} | sections
    return crosstune.cross_validate(data=CHAT8, **given)


def recipe(tiny: Path, out: Path, **sections) -> dict:
    given = {"model": str(tiny), "data": CHAT8, "lora": LORA, "output": str(out)}
    return given | {"train": {"epochs": 2, "batch_size": 4, "learning_rate": 5e-3}} | sections


def test_a_runs_fit_has_rows_epoch_and_the_folds_expectation_in_its_card(tiny, tmp_path):
    result = run_folds(tiny, tmp_path / "run")
    done = fit(tmp_path / "run", progress=Quiet())
    one = done.fits[0]
    assert one.rows == 8 and one.adapter == tmp_path / "run/lanes/trial-0/all/adapter"
    events = Run.read(tmp_path / "run").events("lane_evaluated")
    means = {
        epoch: np.mean([e["loss"] for e in events if e["epoch"] == epoch]) for epoch in {e["epoch"] for e in events}
    }
    best = min(means, key=means.get)
    want = fold_interval(
        [e["loss"] for e in sorted(events, key=lambda e: e["fold"]) if e["epoch"] == best], test_share=1 / 3
    )
    assert one.expected.epoch == best
    assert one.expected.loss == pytest.approx(want.mean) and one.expected.low == pytest.approx(want.low, rel=1e-2)
    card = (one.adapter / "README.md").read_text()
    for said in (f"| loss | {want.mean:.6g} |", "95% interval", "| rows | 8 |", "| epochs | 2 |", "| rank | 4 |"):
        assert said in card
    assert Run.read(tmp_path / "run").is_finished
    again = run_folds(tiny, tmp_path / "run")  # the run is what it was: nothing to do
    assert again.to_json()["trials"] == result.to_json()["trials"]
    assert done.to_json()["fits"][0]["expected"]["loss"] == one.expected.loss
    json.dumps(done.to_json())


def test_no_loss_below_zero_is_expected_of_folds_that_differ_much(tiny, tmp_path):
    rows = [{"prompt": f"{n}: ", "completion": "ok ok ok ok", "part": "odd" if n % 2 else "even"} for n in range(8)] + [
        {"prompt": f"{n}: ", "completion": f"{3**n} zebra quiz", "part": "odd"} for n in range(4)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = crosstune.cross_validate(
        data=str(file), model=str(tiny), output=str(tmp_path / "run"), folds={"kind": "column", "by": "part"},
        lora={"rank": 16, "alpha": 128}, train={"epochs": 60, "batch_size": 4, "learning_rate": 0.002}, progress=Quiet(),
    )  # fmt: skip
    losses = [fold["loss"] for fold in result.trials[0]["folds"]]
    assert fold_interval(losses, test_share=0.5).low < 0
    assert result.interval95[0] == 0
    expected = fit(tmp_path / "run", progress=Quiet()).fits[0].expected
    assert expected.low == 0 < expected.loss < expected.high


def test_the_epoch_that_the_folds_found_best_ends_the_fit_on_the_same_schedule(tiny, tmp_path):
    train = {"epochs": 6, "batch_size": 4, "learning_rate": 0.2}  # so high that the folds get worse
    run_folds(tiny, tmp_path / "run", train=train)
    done = fit(tmp_path / "run", progress=Quiet()).fits[0]
    assert done.expected.epoch < 6 and done.expected.optimistic
    assert done.steps == done.expected.epoch * 2  # 8 rows, 4 a step
    whole = fit(recipe(tiny, tmp_path / "whole", train=train), progress=Quiet()).fits[0]  # the same lane to its end
    losses = [
        next(e for e in Run.read(folder).events("lane_finished") if e["fold"] is None)["losses"]
        for folder in (tmp_path / "run", tmp_path / "whole")
    ]
    assert whole.steps == 12 and losses[0] == losses[1][: done.steps]


def test_a_second_fit_gives_equal_bytes(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    folder = fit(tmp_path / "run", progress=Quiet()).adapter
    first = {file.name: file.read_bytes() for file in folder.iterdir()}
    stamp = (folder / "adapter_model.safetensors").stat().st_mtime_ns
    fit(tmp_path / "run", progress=Quiet())
    assert (folder / "adapter_model.safetensors").stat().st_mtime_ns == stamp, "a finished fit was done again unasked"
    fit(tmp_path / "run", again=True, progress=Quiet())
    assert (folder / "adapter_model.safetensors").stat().st_mtime_ns != stamp
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == first


def test_the_best_trial_of_a_sweep_is_fitted_unless_another_is_named(tiny, tmp_path):
    result = run_folds(tiny, tmp_path / "run", sweep={"lora.rank": [2, 4], "lora.alpha": [16]})
    best = fit(tmp_path / "run", progress=Quiet()).fits[0]
    assert best.trial == result.best["trial"]
    other = fit(tmp_path / "run", trial=1 - best.trial, progress=Quiet()).fits[0]
    for one in (best, other):
        config = json.loads((one.adapter / "adapter_config.json").read_text())
        assert config["r"] == [2, 4][one.trial] and config["lora_alpha"] == 16
    assert "the best of 2 trials" in best.expected.chosen and "trials" not in other.expected.chosen
    with pytest.raises(RunError, match="no trial 7"):
        fit(tmp_path / "run", trial=7, progress=Quiet())


def test_a_recipe_is_fitted_without_folds_and_scored_on_a_held_out_share(tiny, tmp_path):
    done = fit(recipe(tiny, tmp_path / "fit", data=CHAT24), held_out=0.25, progress=Quiet()).fits[0]
    assert done.rows == 18 and done.held_out["rows"] == 6 and done.expected is None
    assert 0 < done.held_out["loss"] < done.held_out["base_loss"]
    event = Run.read(tmp_path / "fit").finished_lanes()[0, None]
    assert len(event["held_out_rows"]) == 6
    assert "untuned base" in fit(recipe(tiny, tmp_path / "fit", data=CHAT24), held_out=0.25, progress=Quiet()).words()


def test_several_seeds_side_by_side_are_those_of_each_alone(tiny, tmp_path):
    both = fit(recipe(tiny, tmp_path / "both"), seeds=[3, 4], progress=Quiet())
    assert [one.settings for one in both.fits] == [{"train.seed": 3}, {"train.seed": 4}]
    for one in both.fits:
        alone = recipe(tiny, tmp_path / f"seed-{one.trial}")
        alone["train"] = {**alone["train"], "seed": one.settings["train.seed"]}
        want = load_file(fit(alone, progress=Quiet()).adapter / "adapter_model.safetensors")
        got = load_file(one.adapter / "adapter_model.safetensors")
        assert all(abs(got[key] - want[key]).max() < 1e-5 for key in want)


def test_several_recipes_side_by_side_are_those_of_each_alone(tiny, tmp_path):
    files = []
    for name, rank, rate in (("a", 4, 5e-3), ("b", 2, 5e-3), ("c", 4, 1e-3)):
        one = recipe(tiny, tmp_path / "runs", lora={**LORA, "rank": rank})
        one["train"] = {**one["train"], "learning_rate": rate}
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(dump_yaml(one))
    progress = Telling()
    together = fit(files, progress=progress)
    assert [one.settings for one in together.fits] == [
        {"lora.rank": 4, "train.learning_rate": 5e-3},
        {"lora.rank": 2, "train.learning_rate": 5e-3},
        {"lora.rank": 4, "train.learning_rate": 1e-3},
    ]
    assert any("3 lanes" in text for text in progress.said), progress.said
    for one, file in zip(together.fits, files, strict=True):
        alone = fit(Recipe.load(file).model_copy(update={"output": str(tmp_path / file.stem)}), progress=Quiet())
        want = load_file(alone.adapter / "adapter_model.safetensors")
        got = load_file(one.adapter / "adapter_model.safetensors")
        assert all(abs(got[key] - want[key]).max() < 1e-5 for key in want)
    both = fit(
        [Recipe.load(f).model_copy(update={"output": str(tmp_path / "both")}) for f in files[:2]],
        seeds=[1, 2],
        progress=Quiet(),
    )
    assert [(one.settings["lora.rank"], one.settings["train.seed"]) for one in both.fits] == [
        (4, 1), (4, 2), (2, 1), (2, 2)
    ]  # fmt: skip


def test_recipes_over_other_rows_or_another_base_are_not_fitted_together(tiny, tmp_path):
    one = recipe(tiny, tmp_path / "fit")
    for other, named in (
        ({**one, "data": CHAT24}, "data.path"),
        ({**one, "model": f"{tiny}-other"}, "model.name"),
        ({**one, "output": str(tmp_path / "elsewhere")}, "output is"),
    ):
        with pytest.raises(RecipeError, match=f"recipe 2 can't be fitted together.*{named}"):
            fit([one, other], progress=Quiet())
    with pytest.raises(RecipeError, match="recipe 2 has the same settings"):
        fit([one, one], progress=Quiet())
    assert not (tmp_path / "fit").exists()


def test_a_folder_of_fits_is_not_taken_for_that_of_other_seeds_or_recipes(tiny, tmp_path):
    fit(recipe(tiny, tmp_path / "fit"), seeds=[3, 4], progress=Quiet())
    with pytest.raises(RunError, match=r"resume-recipe-changed.*'train.seed': 3"):
        fit(recipe(tiny, tmp_path / "fit"), seeds=[5, 6], progress=Quiet())
    assert len(fit(recipe(tiny, tmp_path / "fit"), seeds=[3, 4], progress=Quiet()).fits) == 2


def test_the_command_takes_several_recipes_and_changes_for_all(tiny, tmp_path, capsys):
    for name, rank in (("a", 4), ("b", 2)):
        text = dump_yaml(recipe(tiny, tmp_path / name, lora={**LORA, "rank": rank}))
        (tmp_path / f"{name}.yaml").write_text(text)
    files = [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")]
    assert main(["fit", *files]) == 2
    assert "output is" in capsys.readouterr().err
    assert main(["fit", *files, "train.epochs=1", "--out", str(tmp_path / "both"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["settings"], one["epochs"]) for one in made["fits"]] == [({"lora.rank": 4}, 1), ({"lora.rank": 2}, 1)]
    assert main(["fit", str(tmp_path / "both"), files[0]]) == 2


def test_what_cannot_be_fitted_is_refused_before_anything_is_written(tiny, tmp_path):
    with pytest.raises(RecipeError, match="sweep"):
        fit(recipe(tiny, tmp_path / "fit", sweep={"lora.rank": [2, 4]}), progress=Quiet())
    with pytest.raises(RecipeError, match="held_out"):
        fit(recipe(tiny, tmp_path / "fit"), held_out=1.5, progress=Quiet())
    assert not (tmp_path / "fit").exists()
    run_folds(tiny, tmp_path / "run")
    with pytest.raises(RecipeError, match="takes all rows"):
        fit(tmp_path / "run", held_out=0.1, progress=Quiet())


def test_a_lane_that_goes_non_finite_is_an_error_of_its_own(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output * torch.inf)
    asked = {"model": model, "tokenizer": AutoTokenizer.from_pretrained(tiny), "progress": Quiet()}
    with pytest.raises(LaneFailed, match="non-finite") as caught:
        fit({key: value for key, value in recipe(tiny, tmp_path / "fit").items() if key != "model"}, **asked)
    assert caught.value.exit_code == 3 and "again" in caught.value.fix
    assert not (tmp_path / "fit/lanes/trial-0/all/adapter").exists()
    assert (
        fit(recipe(tiny, tmp_path / "fit", model=model.config.name_or_path), again=True, progress=Quiet()).fits[0].rows
        == 8
    )


def test_rows_in_memory_are_passed_again(tiny, tmp_path):
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
    with pytest.raises(RunError, match="in memory"):
        fit(tmp_path / "run", progress=Quiet())
    assert fit(tmp_path / "run", data=frame, progress=Quiet()).fits[0].rows == 8


def test_a_fit_that_is_cut_off_leaves_the_cross_validation_finished(tiny, tmp_path):
    run_folds(tiny, tmp_path / "run")
    fit(tmp_path / "run", progress=Quiet())
    with pytest.raises(Stopped):
        fit(tmp_path / "run", again=True, progress=Telling(1))
    assert Run.read(tmp_path / "run").is_finished
    progress = Telling()
    run_folds(tiny, tmp_path / "run", progress=progress)
    assert any("finished; nothing to do" in text for text in progress.said)


def test_fits_done_again_and_cut_off_between_two_lines_go_on_as_the_same_wave_to_the_same_bytes(
    tiny, tmp_path, monkeypatch
):
    asked = recipe(tiny, tmp_path / "fit", device={"kind": "cpu", "lanes": 2, "precision": "fp32"})
    first = fit(asked, seeds=[1, 2], progress=Quiet())
    want = [digests(one.adapter) for one in first.fits]
    record, train, waves = Run.record, local.run_wave, []

    def watched(base, jobs, *args, **how):
        waves.append([job.trial for job in jobs])
        return train(base, jobs, *args, **how)

    def cut_off(run, event, *args, **fields):
        if event == "lane_finished" and fields["trial"] == 1:
            raise RunError("no", "room")
        record(run, event, *args, **fields)

    monkeypatch.setattr(local, "run_wave", watched)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="no"):
        patch.setattr(Run, "record", cut_off)
        fit(asked, seeds=[1, 2], again=True, progress=Quiet())
    assert list(Run.read(tmp_path / "fit").finished_lanes()) == [(0, None)]
    assert [digests(one.adapter) for one in fit(asked, seeds=[1, 2], progress=Quiet()).fits] == want
    assert waves == [[0, 1], [0, 1]]
