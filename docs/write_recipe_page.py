"""Write docs/recipe.md from the options' own descriptions: `python docs/write_recipe_page.py`."""

from pathlib import Path

from crosstune.recipe.recipe import Recipe, options

PAGE = Path(__file__).parent / "recipe.md"
HEAD = """# The recipe

A recipe is a YAML file. `crosstune init rows.jsonl --model NAME` writes one after looking at the rows. A
whole one:

```yaml
model:    {name: meta-llama/Meta-Llama-3-8B-Instruct, quantization: nf4}
data:     {path: rows.jsonl, max_tokens: 512}
folds:    {kind: stratified, k: 5, by: label, seed: 7}
lora:     {rank: 16, alpha: 32, dropout: 0.05, targets: all-linear}
train:    {epochs: 3, learning_rate: 2e-4, batch_size: 8}
output:   runs/rows
```

Only `model` and `data` are required; `model: NAME`, `data: PATH` and `folds: 5` are short for `name`,
`path` and `k`.

The same options are given on the command line, `crosstune run recipe.yaml lora.rank=8 train.epochs=1`, and in Python,
`crosstune.cross_validate("recipe.yaml", lora={"rank": 8}, train={"epochs": 1})`. Later ones win. A value on the command
line is YAML: `lora.targets=[q_proj, v_proj]`, `train.stop={share: 0.1, patience: 2}`.

YAML is read by its version 1.2: `2e-4` is a number, and `no` is a word. Keys that don't exist are refused with the
nearest one that does, and all mistakes are reported at once. `auto` is decided when the run starts, and said.

This page is written by `python docs/write_recipe_page.py`.
"""


def recipe_page() -> str:
    """The whole page: one table a section, in the recipe's order."""
    parts = [HEAD]
    listed = options()
    for section, field in Recipe.model_fields.items():
        parts += [f"\n## {section}\n\n{field.description}\n\n", "| option | may be | default | |\n|---|---|---|---|\n"]
        for option in listed:
            if option.name == section or option.name.startswith(f"{section}."):
                words = (f"`{option.name}`", option.type, f"`{option.default}`", option.description)
                parts.append("| " + " | ".join(word.replace("|", "\\|") for word in words) + " |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(recipe_page(), encoding="utf-8")
