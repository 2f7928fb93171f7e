"""`crosstune demo`: a real model, real rows, five folds, on any machine.

Question–answer rows of the package `chatterbot-corpus` (English), each with its category; folds stratified by category.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from crosstune.demo_model import find_model
from crosstune.errors import DataError, MissingExtra
from crosstune.memory.precision import native_cpu_bf16
from crosstune.memory.visible import visible_gpus
from crosstune.progress import Progress
from crosstune.recipe.recipe import Recipe, write_text
from crosstune.recipe.yaml_text import parse_yaml

LONGEST_ANSWER = 200  # characters; the corpus holds a few essays that would take most of the demo's time


@dataclass(frozen=True)
class DemoSize:
    """How much the demo does."""

    rows: int = 100
    folds: int = 5
    epochs: float = 1.0


def demo_recipe(
    size: DemoSize, changes: Iterable[str] = (), *, out: str, model: str | None, progress: Progress
) -> Recipe:
    """Write the demo's rows beside the run folder, find its model, and return its recipe."""
    chosen = choose_rows(read_corpus(), size.rows, size.folds)
    file = Path(f"{out.rstrip('/')}-rows.jsonl")
    # SmolLM2's own padding token ends turns, which would be replaced with a warning.
    base = {"name": model} if model else {"name": find_model(progress), "pad_token": "<|endoftext|>"}
    recipe = Recipe.build(
        {
            "model": base,
            "data": {"path": str(file), "max_tokens": 256},
            "folds": {"kind": "stratified", "k": size.folds, "by": "category", "seed": 7},
            "lora": {"rank": 8, "alpha": 16},
            "train": {"epochs": size.epochs, "learning_rate": 1e-3, "batch_size": 8, "seed": 7},
            "device": {"precision": fastest_precision()},
            "output": out,
        },
        changes,
    )
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen))
    return recipe


def fastest_precision() -> str:
    """bf16 on a CPU that multiplies it natively, else auto.

    On 2 cores with avx512_bf16, SmolLM2-135M's forward and backward pass took 584 tokens a core second in bf16, 166 in
    fp32; a CPU without it converts each operand and is slower than in fp32.
    """
    return "bf16" if not visible_gpus() and native_cpu_bf16() else "auto"


def read_corpus() -> dict[str, list[dict[str, Any]]]:
    """Category → rows: the first question and its first answer; a question asked before is left out."""
    spec = find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra("chatterbot-corpus", "demo")
    asked: set[str] = set()
    corpus: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(Path(spec.submodule_search_locations[0], "data", "english").glob("*.yml")):
        rows = corpus.setdefault(file.stem, [])
        for turns in parse_yaml(file.read_text(encoding="utf-8"), name=file.name)["conversations"]:
            question, answer = turns[0].strip(), turns[1].strip()
            if question.casefold() in asked or not answer or len(answer) > LONGEST_ANSWER:
                continue
            asked.add(question.casefold())
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append({"messages": turns, "category": file.stem})
    return corpus


def choose_rows(corpus: dict[str, list[dict[str, Any]]], count: int, folds: int) -> list[dict[str, Any]]:
    """`count` rows from the largest categories, in turn, so that each has about two rows a fold or more."""
    usable = [category for category in corpus if len(corpus[category]) >= 2 * folds]
    largest = sorted(usable, key=lambda category: -len(corpus[category]))
    categories = largest[: max(1, count // (2 * folds))]
    chosen = [row for turn in zip_longest(*(corpus[category] for category in categories)) for row in turn if row]
    most = sum(len(corpus[category]) for category in usable)
    if not 2 * folds <= count <= most:
        raise DataError(
            f"--rows {count}: with {folds} folds the demo has {2 * folds} to {most} rows",
            "Ask for a number in between, or for fewer folds.",
        )
    return chosen[:count]
