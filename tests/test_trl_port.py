"""docs/from-a-trl-loop.md: the same cross-validation from a notebook cell and from the command, with equal results."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from peft import LoraConfig
from sklearn.model_selection import KFold

import crosstune
from crosstune import cli
from crosstune.progress import Quiet
from crosstune.recipe.recipe import Recipe, parse_yaml

WORDS = ["salt", "water", "stone", "river", "light", "morning", "bread", "table", "window", "garden", "winter", "apple"]
DOC = Path(__file__).parent.parent / "docs" / "from-a-trl-loop.md"


@pytest.fixture
def rows_csv(tmp_path):
    """20 rows of text, no two alike; commas and quotes in them, as in any CSV."""
    draw, file = np.random.default_rng(3), tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["text", "source"])
        for number in range(20):
            words = draw.choice(WORDS, size=draw.integers(3, 9))
            writer.writerow([f'{number}: "{words[0]}", ' + " ".join(words[1:]), f"s{number % 3}"])
    return file


def in_a_cell(tiny, rows, out):
    return crosstune.cross_validate(
        data={"path": str(rows), "max_tokens": 30, "packing": True},
        model=str(tiny),
        folds=KFold(n_splits=5, shuffle=True, random_state=7),
        lora=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
        train={"epochs": 2, "learning_rate": 2e-3, "batch_size": 4, "schedule": "cosine", "warmup": 0.03, "seed": 7},
        device={"micro_batch": 1},
        output=str(out),
        progress=Quiet(),
    )


def test_a_cell_and_the_command_give_equal_results(tiny, rows_csv, tmp_path, capsys):
    cell = in_a_cell(tiny, rows_csv, tmp_path / "cell")
    (tmp_path / "rows.yaml").write_text(
        f"""
model: {tiny}
data:  {{path: {rows_csv}, max_tokens: 30, packing: true}}
folds: {{kind: kfold, k: 5, seed: 7}}
lora:  {{rank: 4, alpha: 8, dropout: 0.05, targets: all-linear}}
train: {{epochs: 2, learning_rate: 2e-3, batch_size: 4, schedule: cosine, warmup: 0.03, seed: 7}}
device: {{micro_batch: 1}}
"""
    )
    capsys.readouterr()
    assert cli.main(["run", str(tmp_path / "rows.yaml"), "--out", str(tmp_path / "command"), "--json"]) == 0
    command = json.loads(capsys.readouterr().out.splitlines()[-1])

    assert command["trials"][0]["folds"] == cell.to_json()["trials"][0]["folds"]
    assert command["trials"][0]["mean"] == cell.mean
    for fold in range(5):
        mine = cell.adapters[0, fold] / "adapter_model.safetensors"
        theirs = tmp_path / "command" / "lanes" / "trial-0" / f"fold-{fold}" / "adapter" / "adapter_model.safetensors"
        assert mine.read_bytes() == theirs.read_bytes()


def test_the_folds_are_those_of_the_loop(tiny, rows_csv, tmp_path):
    in_a_cell(tiny, rows_csv, tmp_path / "run")
    table = pd.read_parquet(tmp_path / "run" / "folds.parquet")
    rows = pd.read_csv(rows_csv)
    for fold, (_, held_out) in enumerate(KFold(n_splits=5, shuffle=True, random_state=7).split(rows)):
        assert sorted(table.loc[table.fold == fold, "row"]) == sorted(held_out + 1)


def test_the_pages_own_recipe_and_call_are_current():
    text = DOC.read_text(encoding="utf-8")
    recipe = Recipe.build(parse_yaml(re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]))
    assert (recipe.train.batch_size, recipe.device.micro_batch, recipe.data.packing) == (4, 1, True)
    call = re.search(r"crosstune\.cross_validate\((.*?)\n\)", text, re.DOTALL)[1]
    given = dict(re.findall(r"^    (\w+)=(\{.*\}|\".*\"),$", call, re.MULTILINE))
    sections = {name: eval(value) for name, value in given.items()}  # dict literals of our own page
    called = Recipe.build({**sections, "folds": {"k": 5, "seed": 7}, "lora": recipe.lora.model_dump()})
    assert called == recipe


def test_the_pages_loop_uses_arguments_that_trl_has(tmp_path):
    from trl import SFTConfig

    call = re.search(r"args=SFTConfig\((.*?)\n        \),", DOC.read_text(encoding="utf-8"), re.DOTALL)[1]
    given = re.sub(r"#.*", "", call).replace('f"fold-{fold}"', repr(str(tmp_path))).replace("bf16=True", "bf16=False")
    config = eval(f"SFTConfig({given})", {"SFTConfig": SFTConfig})
    assert (config.max_length, config.packing, config.warmup_steps, config.gradient_accumulation_steps) == (
        30,
        True,
        0.03,
        4,
    )
    assert SFTConfig(output_dir=str(tmp_path), bf16=False).max_length == 1024, "as the page says"
