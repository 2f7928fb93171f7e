"""What Python is given → a recipe: what scikit-learn, PEFT and datasets users pass is taken, or refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from peft import AdaLoraConfig, IA3Config, LoraConfig
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold

import crosstune
from crosstune.data.load import load_rows
from crosstune.errors import CrosstuneError, RecipeError
from crosstune.metrics import find_metric
from crosstune.recipe.asked import gather
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Folds
from crosstune.splits.splits import split_rows

PLAIN = {"model": "m", "data": "rows.jsonl"}
FRAME = pd.DataFrame({"prompt": list("abcdefgh"), "completion": list("ijklmnop"), "label": list("xyxyxyxy")})


def asked(**given):
    sections = {name: given.pop(name) for name in list(given) if name not in ("data", "model", "lora", "folds")}
    return gather(PLAIN, **given, sections=sections)


@pytest.mark.parametrize("folds", [3, {"k": 3}])
def test_a_number_of_folds_is_enough_as_in_scikit_learn(folds):
    assert asked(folds=folds).recipe.folds == Folds(k=3)
    assert Recipe.build({**PLAIN, "folds": folds}).folds == Folds(k=3)


def test_a_number_of_folds_changes_that_number_only():
    stratified = {**PLAIN, "folds": {"kind": "stratified", "by": "label"}}
    as_override = Recipe.build(stratified, ["folds=3"])
    as_keyword = gather(stratified, folds=3, sections={}).recipe
    assert as_override == as_keyword == Recipe.build({**PLAIN, "folds": {"kind": "stratified", "by": "label", "k": 3}})


def test_the_short_form_of_a_model_as_an_override_keeps_its_other_keys():
    recipe = Recipe.build({**PLAIN, "model": {"name": "a", "quantization": "nf4"}}, ["model=b"])
    assert (recipe.model.name, recipe.model.quantization) == ("b", "nf4")


def test_paths_are_taken_wherever_text_is(tmp_path):
    made = asked(data={"path": tmp_path / "r.csv"}, model=tmp_path / "m", output=tmp_path / "run").recipe
    as_text = (str(tmp_path / "r.csv"), str(tmp_path / "m"), str(tmp_path / "run"))
    assert (made.data.path, made.model.name, made.output) == as_text


@pytest.mark.parametrize("folds", [KFold, object(), lambda: 3])
def test_what_splits_nothing_is_refused_with_what_may_be_passed(folds):
    with pytest.raises(RecipeError, match="splits nothing") as refused:
        asked(folds=folds)
    assert "KFold(5" in refused.value.fix


@pytest.mark.parametrize(
    "lora", [8, "q_proj", LoraConfig, IA3Config(), AdaLoraConfig(total_step=10), LoraConfig(task_type="SEQ_CLS")]
)
def test_an_adapter_that_is_no_causal_lora_is_refused(lora):
    with pytest.raises(RecipeError, match="lora"):
        asked(lora=lora)


@pytest.mark.parametrize("model", [3, object()])
def test_a_model_that_is_none_is_refused(model):
    with pytest.raises(RecipeError, match="model"):
        gather(PLAIN, model=model, tokenizer=object(), sections={})


def test_a_dict_of_data_sets_is_rows_of_its_split_not_a_section():
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_pandas(FRAME.head(6)), test=datasets.Dataset.from_pandas(FRAME)
    )
    made = asked(data=both)
    assert made.source is both and len(load_rows(made.source, made.recipe.data)) == 6
    with pytest.raises(CrosstuneError, match="train, test"):
        load_rows(both, made.recipe.data.model_copy(update={"split": "dev"}))


@pytest.mark.parametrize(("splitter", "column"), [(StratifiedKFold(2), "by"), (GroupKFold(2), "group")])
def test_a_splitter_without_the_column_that_it_needs_is_refused_with_that_column(splitter, column):
    rows = load_rows(FRAME, asked().recipe.data)
    with pytest.raises(CrosstuneError, match="can't be split") as refused:
        split_rows(rows, Folds(), splitter=splitter)
    assert f"folds.{column}" in refused.value.fix
    folds = split_rows(rows, Folds.model_validate({column: "label"}), splitter=splitter)
    codes = pd.factorize(FRAME["label"])[0]
    given = (codes, None) if column == "by" else (None, codes)
    theirs = [tuple(held_out) for _, held_out in splitter.split(np.zeros((8, 1)), *given)]
    assert [fold.held_out for fold in folds] == theirs


def test_a_built_in_function_is_a_metric_like_any_other():
    assert find_metric("builtins:len").higher_is_better


def test_part_of_a_metrics_name_is_answered_with_the_names_that_have_it():
    with pytest.raises(RecipeError) as refused:
        find_metric("f1")
    assert refused.value.fix == "Did you mean token_f1 or macro_f1 or micro_f1?"


def test_a_wrong_value_is_shown_in_short():
    with pytest.raises(RecipeError) as refused:
        asked(data={"path": "r.csv", "prompt": ["a question"] * 1000})
    assert len(refused.value.problem) < 300


def test_rows_may_be_named_by_a_path_object():
    assert gather(None, data=Path("r.csv"), model="m", sections={}).source == "r.csv"
    assert isinstance(crosstune.Recipe.build({"data": Path("r.csv"), "model": Path("m")}).data.path, str)
