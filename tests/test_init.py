"""`crosstune init`: what it sees in the rows, and that what it writes is a recipe."""

import csv
import json

import pytest

from crosstune.errors import DataError, RecipeError
from crosstune.init import describe_data, scalar, write_recipe
from crosstune.recipe.recipe import Recipe, parse_yaml


def write_csv(file, rows):
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


def recipe_of(path, model="org/model"):
    text = describe_data(path, model)
    return Recipe.build(parse_yaml(text)), text


@pytest.mark.parametrize(
    ("columns", "kind", "by", "group"),
    [
        ({}, "kfold", None, None),
        ({"label": lambda i: "ab"[i % 2]}, "stratified", "label", None),
        ({"colour": lambda i: "rgb"[i % 3]}, "stratified", "colour", None),
        ({"colour": lambda i: "rgb"[i % 3], "label": lambda i: "ab"[i % 2]}, "stratified", "label", None),
        ({"user_id": lambda i: f"u{i // 3}"}, "group", None, "user_id"),
        ({"label": lambda i: "ab"[i % 2], "user_id": lambda i: f"u{i // 3}"}, "stratified-group", "label", "user_id"),
        ({"fold": lambda i: str(i % 4)}, "column", "fold", None),
        ({"id": lambda i: str(i)}, "kfold", None, None),  # as many values as rows: no class
        ({"label": lambda i: "rare" if i == 0 else "often"}, "kfold", None, None),  # a class smaller than K
    ],
)
def test_folds_follow_from_the_columns(tmp_path, columns, kind, by, group):
    rows = [{"text": f"row {i} of salt", **{name: make(i) for name, make in columns.items()}} for i in range(30)]
    recipe, _ = recipe_of(write_csv(tmp_path / "rows.csv", rows))
    assert (recipe.folds.kind, recipe.folds.by, recipe.folds.group) == (kind, by, group)


def test_what_was_seen_stands_in_the_comments(cases):
    recipe, text = recipe_of(str(cases / "chat8.jsonl"))
    assert text.startswith("# 8 rows of conversations in ")
    assert "characters a row: median" in text
    assert recipe.data.path == str(cases / "chat8.jsonl")
    assert recipe.output == "runs/chat8"


def test_a_file_with_faults_points_at_lint(tmp_path):
    lines = [json.dumps({"text": f"row {i}"}) for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "{broken"]) + "\n")
    _, text = recipe_of(str(tmp_path / "rows.jsonl"))
    assert "1 error(s)" in text and "crosstune lint" in text


@pytest.mark.parametrize("content", ["", "{broken\n", "[]"])
def test_nothing_to_look_at_is_refused(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError):
        describe_data(str(tmp_path / "rows.jsonl"), "m")


@pytest.mark.parametrize("name", ["a: b", "true", "7", "# x", "[x", "it's", "null", " lead", "a\\b", "ä", "2e-4", "-"])
def test_any_name_reads_back_as_itself(tmp_path, name):
    assert parse_yaml(f"model: {{name: {scalar(name)}}}\nx: {scalar(name)}") == {"model": {"name": name}, "x": name}


def test_a_recipe_that_is_there_is_left_alone(tmp_path):
    file = tmp_path / "recipe.yaml"
    write_recipe(str(file), "model: a\n")
    with pytest.raises(RecipeError, match="exists already"):
        write_recipe(str(file), "model: b\n")
    assert file.read_text() == "model: a\n"
