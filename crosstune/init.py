"""`crosstune init`: look at the rows, write a recipe that says what was seen and why each setting was chosen.

Looks only at the rows: no model is loaded, and lengths are in characters.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from statistics import median

from crosstune.data.load import load_rows
from crosstune.data.rows import Rows, content_parts
from crosstune.errors import DataError, RecipeError
from crosstune.recipe.recipe import parse_yaml, write_text
from crosstune.recipe.sections import Data

LABEL_NAMES = ("label", "category", "class", "intent", "topic", "target", "sentiment", "type")
GROUP_NAMES = (
    "group", "group_id", "user", "user_id", "author", "patient", "session", "session_id", "document", "doc_id",
    "conversation_id", "source", "url",
)  # fmt: skip
TIME_NAMES = ("time", "timestamp", "date", "created", "created_at")
MOST_CLASSES = 50
CHARACTERS_A_TOKEN = 4  # a rule of thumb for English; code and other languages need more tokens
SHAPE_WORDS = {"messages": "conversations", "prompt": "prompt and completion", "text": "plain text"}


def describe_data(path: str, model: str) -> str:
    """The text of a commented recipe for the rows of `path`. Raises `DataError` where nothing can be read."""
    rows = load_rows(path, Data(path=path))
    if not len(rows):
        faults = f"; the first fault is: {rows.findings[0]}" if rows.findings else ""
        raise DataError(f"{path} holds no row that can be used{faults}", "Give rows of text, prompts or messages.")
    k = min(5, max(2, len(rows)))
    lengths = [sum(map(len, content_parts(row))) for row in rows.rows]
    faulty = Counter(finding.severity for finding in rows.findings)
    seen = f"# {len(rows):,} rows of {SHAPE_WORDS.get(rows.shape, rows.shape)} in {path}; columns: "
    lines = [
        seen + ", ".join(rows.column_names),
        f"# characters a row: median {median(lengths):,.0f}, longest {max(lengths):,} (row {longest(rows, lengths)})",
    ]
    if faulty:
        lines.append(
            "# found: " + ", ".join(f"{n} {name}(s)" for name, n in faulty.items()) + f"; crosstune lint {path}"
        )
    lines += [
        "# all options: docs/recipe.md, or crosstune run --help",
        "",
        "model:",
        f"  name: {scalar(model)}",
        "  # quantization: nf4     # a GPU and bitsandbytes: a quarter of the memory for the base",
        "",
        "data:",
        f"  path: {scalar(path)}",
        f"  # max_tokens: {tokens_near(max(lengths))}      # unset: the model's own limit; the longest row has about "
        f"{max(lengths) // CHARACTERS_A_TOKEN + 1:,} tokens",
        "",
        "folds:",
        *fold_lines(rows, k),
        "  seed: 7",
        "",
        "lora:",
        "  rank: 16",
        "  alpha: 32               # the adapter's output is multiplied by alpha / rank",
        "  dropout: 0.05",
        "  targets: all-linear     # or a list: [q_proj, v_proj]",
        "",
        *train_lines(len(rows), k),
        "",
        "# sweep:                  # every setting of the sweep is cross-validated on the same folds",
        "#   lora.rank: [8, 16, 64]",
        "",
        f"output: runs/{scalar(re.sub(r'[^A-Za-z0-9._-]+', '-', Path(path).stem).strip('-.') or 'crosstune')}",
    ]
    return "\n".join(lines) + "\n"


def write_recipe(out: str, text: str) -> None:
    """Write the recipe; a file that is there already is left alone."""
    if Path(out).exists():
        raise RecipeError(f"{out} exists already", "Name another file with --out, or print the recipe with --out -.")
    write_text(Path(out), text)


def longest(rows: Rows, lengths: Sequence[int]) -> int:
    return rows.rows[max(range(len(lengths)), key=lengths.__getitem__)].number


def fold_lines(rows: Rows, k: int) -> list[str]:
    """The kind of folds, by the columns found."""
    if "fold" in rows.column_names:
        return ["  kind: column            # the file says to which fold each row belongs", "  by: fold"]
    label, group = label_column(rows, k), group_column(rows, k)
    kinds = {(True, True): "stratified-group", (True, False): "stratified", (False, True): "group"}
    lines = [f"  kind: {kinds.get((label is not None, group is not None), 'kfold')}", f"  k: {k}"]
    if label is not None:
        lines += [f"  by: {scalar(label)}", "  # every fold gets its share of each value of that column"]
    if group is not None:
        lines += [f"  group: {scalar(group)}", "  # rows with one value of that column stay on one side of a fold"]
    if any(name.casefold() in TIME_NAMES for name in rows.column_names):
        lines.append("  # the rows have a time: with kind: time-series a fold is scored on later rows only")
    return lines


def label_column(rows: Rows, k: int) -> str | None:
    """The column that looks like a class: few values, each in at least k rows; a telling name comes first."""
    fitting = [
        name
        for name, counts in value_counts(rows).items()
        if 2 <= len(counts) <= MOST_CLASSES and min(counts.values()) >= k and None not in counts
    ]
    return min(fitting, key=lambda name: (name.casefold() not in LABEL_NAMES, fitting.index(name)), default=None)


def group_column(rows: Rows, k: int) -> str | None:
    """The column with a telling name whose values repeat: more of them than folds, fewer than rows."""
    for name, counts in value_counts(rows).items():
        if name.casefold() in GROUP_NAMES and k <= len(counts) < len(rows):
            return name
    return None


def value_counts(rows: Rows) -> dict[str, Counter[Hashable]]:
    """Column → how often each value occurs, for the columns beside the content whose values can be counted."""
    counted = {}
    for name in rows.column_names:
        if name not in rows.fields:
            values = rows.column(name, option="column")
            if all(isinstance(value, str | int | bool | None) for value in values):
                counted[name] = Counter(values)
    return counted


def train_lines(count: int, k: int) -> list[str]:
    batch_size = 8 if count >= 200 else 4
    steps = -(-(count - count // k) // batch_size)
    return [
        "train:",
        "  epochs: 3",
        "  learning_rate: 2e-4",
        f"  batch_size: {batch_size}           # rows a fold and optimizer step: {steps} steps an epoch",
        "  # stop: {share: 0.1, patience: 2}   # early stopping on a share of the training rows",
        "  seed: 7",
    ]


def tokens_near(characters: int) -> int:
    """A round limit above the longest row's likely length."""
    return int(max(64, 2 ** (characters // CHARACTERS_A_TOKEN).bit_length()))


def scalar(text: str) -> str:
    """`text` as YAML: plain where it reads back as itself, else quoted."""
    try:
        plain = parse_yaml(f"[{text}]") == [text] and parse_yaml(f"a: {text}") == {"a": text}
    except RecipeError:
        plain = False
    return text if plain else json.dumps(text)
