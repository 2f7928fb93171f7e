"""The recipe: what gets in, what is refused, and how it says so."""

import math
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstune.errors import RecipeError
from crosstune.recipe.recipe import Recipe, dump_yaml, merge, options, parse_yaml, write_text

SMALL = {"model": "tiny", "data": "rows.jsonl"}
FROM_THE_ISSUE = """
model:    {name: meta-llama/Meta-Llama-3-8B-Instruct, quantization: nf4}   # hub id, folder or .gguf; none | int8 | nf4
data:     {path: rows.jsonl, max_tokens: 512, packing: false}
folds:    {kind: stratified, k: 5, by: label, seed: 7}
lora:     {rank: 16, alpha: 32, dropout: 0.05, targets: all-linear}
train:    {epochs: 3, learning_rate: 2e-4, batch_size: 8, schedule: cosine, warmup: 0.03, seed: 7}
evaluate: {metrics: [loss, token_accuracy]}
device:   {lanes: auto, micro_batch: auto, checkpointing: auto, precision: auto}
output:   runs/rows
"""


def refused(tree, *overrides):
    with pytest.raises(RecipeError) as caught:
        Recipe.build(tree, overrides)
    return str(caught.value)


def test_the_contract_is_a_recipe():
    recipe = Recipe.build(parse_yaml(FROM_THE_ISSUE))
    assert (recipe.model.quantization, recipe.folds.by, recipe.train.learning_rate) == ("nf4", "label", 0.0002)
    assert (recipe.device.lanes, recipe.output) == ("auto", "runs/rows")


def test_scientific_numbers_are_numbers(cases):
    recipe = Recipe.load(cases / "F01-sci.yaml", ["data.path=rows.jsonl"])
    assert (recipe.train.learning_rate, recipe.train.weight_decay) == (0.0002, 0.01)
    shown = parse_yaml(recipe.to_yaml())["train"]
    assert (shown["learning_rate"], shown["weight_decay"]) == (0.0002, 0.01)


def test_misspelt_and_misplaced_keys_are_named_together(cases):
    with pytest.raises(RecipeError) as caught:
        Recipe.load(cases / "F01-typo.yaml", ["data.path=rows.jsonl"])
    assert "2 mistakes" in str(caught.value)
    assert "lora.ranl: unknown key; did you mean rank?" in str(caught.value)
    assert "learning_rate: unknown section; it belongs under train" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.learning_rate=fast", "train.learning_rate: number ≥ 0 expected (got 'fast')"),
        ("train.epochs=1.5x", "train.epochs: number > 0 expected (got '1.5x')"),
        ("train.learning_rate=.nan", "train.learning_rate: number ≥ 0 expected (got nan)"),
        ("lora.rank=true", "lora.rank: a number is expected, not true or false (got true)"),
        ("device.lanes=0", "device.lanes: auto | whole number ≥ 1 expected (got 0)"),
        ("folds.kind=stratifed", "did you mean stratified?"),
        ("folds.kind=group", "folds: kind group needs folds.group"),
        ("folds.kind=stratified", "folds: kind stratified needs folds.by"),
        ("train.keep=best", "train: keep: best needs train.stop"),
        ("train.stop={shar: 0.1}", "train.stop.shar: unknown key; did you mean share?"),
        ("lora.r=8", "lora.r: unknown key; did you mean rank?"),
        ("lora.target_modules=[q_proj]", "did you mean targets?"),
        ("train.max_seq_length=512", "did you mean data.max_tokens?"),
        ("loras.rank=8", "did you mean lora?"),
        ("data.rank=8", "data.rank: unknown key; it belongs under lora"),
        ("lora=[1]", "lora: mapping expected (got [1])"),
    ],
)
def test_a_mistake_names_key_value_and_way_out(override, said):
    assert said in refused(SMALL, override)


def test_two_ways_to_say_how_long_exclude_one_another():
    assert "both say how long" in refused(SMALL, "train.epochs=2", "train.max_steps=40")
    by_steps = Recipe.build(SMALL, ["train.max_steps=40"])
    assert Recipe.build(parse_yaml(by_steps.to_yaml())) == by_steps


def test_everything_wrong_is_said_at_once():
    said = refused({"model": 3, "lora": {"r": 3, "rank": 0}, "train": {"epochs": "x", "stop": {"patience": 0}}})
    assert "6 mistakes" in said
    for place in ("model:", "data: is required", "lora.r:", "lora.rank:", "train.epochs:", "train.stop.patience:"):
        assert place in said


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"model": None, "data": "r"}, "model: is required"),
        ({"model": "m", "data": "r", "train": {"stop": True}}, "(got true)"),
        ({"model": "m", "data": "r", "lora": {"rank": None}}, "(got null)"),
    ],
)
def test_a_wrong_value_is_spelt_as_in_a_recipe(tree, said):
    with pytest.raises(RecipeError) as refused:
        Recipe.build(tree)
    assert said in refused.value.problem


@pytest.mark.parametrize("override", ["lora.rank", "=8", "lora..rank=8", ".rank=8", ""])
def test_an_override_without_key_or_value_is_refused(override):
    assert "is not of the form" in refused(SMALL, override)


def test_overrides_open_the_short_forms():
    recipe = Recipe.build(SMALL, ["model.quantization=nf4", "data.packing=true", "train.stop.patience=3"])
    assert (recipe.model.name, recipe.model.quantization, recipe.data.path) == ("tiny", "nf4", "rows.jsonl")
    assert recipe.data.packing is True
    assert recipe.train.stop is not None and recipe.train.stop.patience == 3


def test_broken_yaml_is_named_by_line_and_column(tmp_path):
    (tmp_path / "broken.yaml").write_text("model: tiny\ndata: [a, b\n")
    with pytest.raises(RecipeError, match=r"broken\.yaml line 3 column 1"):
        Recipe.load(tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("model: tiny\nmodel: other\n")
    with pytest.raises(RecipeError, match="line 2"):
        Recipe.load(tmp_path / "twice.yaml")
    (tmp_path / "twice.yaml").write_text("lora: {rank: 4}\nlora: {rank: 8}\n")
    with pytest.raises(RecipeError, match="line 2") as refused:
        Recipe.load(tmp_path / "twice.yaml")
    assert refused.value.problem.endswith('found duplicate key "lora"'), "its value would be shown as {}"


@pytest.mark.parametrize("content", [b"", b"- 1\n", b"\xff\xfe", b"just words"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content):
    (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(RecipeError):
        Recipe.load(tmp_path / "recipe.yaml")


def test_a_recipe_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Recipe.build(SMALL).output = "elsewhere"


def test_the_fingerprint_ignores_where_and_how_wide():
    recipe = Recipe.build(SMALL)
    for same in (
        "output=elsewhere",
        "device.gpus=[1]",
        "device.lanes=2",
        "device.micro_batch=1",
        "device.checkpointing=all",
    ):
        assert Recipe.build(SMALL, [same]).fingerprint() == recipe.fingerprint(), same
    for other in ("lora.rank=8", "train.seed=1", "data.max_tokens=64", "model.quantization=nf4"):
        assert Recipe.build(SMALL, [other]).fingerprint() != recipe.fingerprint(), other


def test_a_written_recipe_reads_back_equal(tmp_path):
    recipe = Recipe.build(parse_yaml(FROM_THE_ISSUE), ["lora.targets=[q_proj, v_proj]", "train.stop.share=0.2"])
    write_text(tmp_path / "deep" / "recipe.yaml", recipe.to_yaml())
    again = Recipe.load(tmp_path / "deep" / "recipe.yaml")
    assert again == recipe and again.fingerprint() == recipe.fingerprint()
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["recipe.yaml"]


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 512), st.text(min_size=1).filter(str.strip))
def test_any_value_survives_yaml(rate, rank, name):
    printable = "".join(letter for letter in name if letter.isprintable()) or "x"
    recipe = Recipe.build(
        {"model": {"name": printable}, "data": "d", "lora": {"rank": rank}, "train": {"learning_rate": rate}}
    )
    again = Recipe.build(parse_yaml(recipe.to_yaml()))
    assert again == recipe
    assert math.isclose(again.train.learning_rate, rate, rel_tol=0)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12))  # fmt: skip
def test_no_tree_gives_anything_but_a_recipe_or_a_recipe_error(tree):
    for section in ("model", "data", "folds", "lora", "train", "evaluate", "sweep", "device", "output"):
        try:
            Recipe.build({**SMALL, section: tree})
        except RecipeError as error:
            assert error.problem and error.fix


def test_merge_goes_section_by_section_and_changes_neither():
    tree, changes = (
        {"model": "tiny", "lora": {"rank": 8, "alpha": 16}},
        {"lora": {"rank": 4}, "model": {"quantization": "nf4"}},
    )
    assert merge(tree, changes) == {"model": {"name": "tiny", "quantization": "nf4"}, "lora": {"rank": 4, "alpha": 16}}
    assert tree == {"model": "tiny", "lora": {"rank": 8, "alpha": 16}}


def test_every_option_is_described_once_and_can_be_set():
    listed = options()
    assert len({option.name for option in listed}) == len(listed)
    for option in listed:
        assert option.description.strip(), option.name
        assert option.type != "text" or option.default != "[]", option.name
    assert ("lora.rank", "whole number ≥ 1", "16") in [option[:3] for option in listed]
    assert ("device.lanes", "auto | whole number ≥ 1", "auto") in [option[:3] for option in listed]


def test_defaults_written_out_are_the_defaults():
    assert Recipe.build(parse_yaml(dump_yaml(Recipe.build(SMALL).model_dump(mode="json")))) == Recipe.build(SMALL)


def test_docs_list_the_options_as_they_are():
    docs = Path(__file__).parent.parent / "docs"
    page = runpy.run_path(str(docs / "write_recipe_page.py"))["recipe_page"]()
    assert (docs / "recipe.md").read_text(encoding="utf-8") == page, "python docs/write_recipe_page.py"
