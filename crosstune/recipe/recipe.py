"""What was asked: one frozen `Recipe`, from YAML, `section.key=value` overrides or Python keywords.

Its options stand in sections.py. This module knows nothing of files other than the recipe's own, nor of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from crosstune.errors import RecipeError
from crosstune.recipe.mistakes import ALIASES as ALIASES  # also offered here
from crosstune.recipe.mistakes import known_only, unknown_keys, wrong_values
from crosstune.recipe.options import Option, list_options
from crosstune.recipe.sections import Data, Device, Evaluate, Folds, Lint, Lora, Model, Section, Train
from crosstune.recipe.yaml_text import dump_yaml, parse_yaml
from crosstune.recipe.yaml_text import write_text as write_text  # also offered here

_CHANGES_NO_RESULT: Any = {
    "output": True,
    "data": {"path"},  # a file may be moved: a run compares its rows
    "train": {"checkpoint_every"},
    "device": {"gpus", "layers", "offload", "lanes", "micro_batch", "checkpointing", "ray", "workers", "retries"},
}


SHORTHAND: Mapping[str, tuple[str, type]] = {"model": ("name", str), "data": ("path", str), "folds": ("k", int)}


def open_shorthand(section: str, value: Any) -> Any:
    """`model: X` means `model: {name: X}`, and `folds: 5` means `folds: {k: 5}`."""
    key, kind = SHORTHAND.get(section, ("", NoneType))
    return {key: value} if type(value) is kind and key else value


def _opened(section: str) -> BeforeValidator:
    return BeforeValidator(partial(open_shorthand, section))


ROWS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".pq")  # files that are no recipe, whatever is in them


class Recipe(Section):
    """Everything that was asked for. `Recipe.load` reads a file, `Recipe.build` takes mappings and overrides."""

    model: Annotated[Model, _opened("model")] = Field(description="The frozen base model.")
    data: Annotated[Data, _opened("data")] = Field(description="The rows.")
    folds: Annotated[Folds, _opened("folds")] = Field(default_factory=Folds, description="Training and held-out rows.")
    lora: Lora = Field(default_factory=Lora, description="The adapter.")
    train: Train = Field(default_factory=Train, description="How a lane is trained.")
    evaluate: Evaluate = Field(default_factory=Evaluate, description="What is measured.")
    sweep: dict[str, Any] = Field(default_factory=dict, description="Settings to try: 'section.key: [value, …]'.")
    device: Device = Field(default_factory=Device, description="Where it runs.")
    lint: Lint = Field(default_factory=Lint, description="Faults found before training.")
    output: str = Field("runs/crosstune", description="The run folder.")

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
        """Read a YAML recipe and apply `section.key=value` overrides. All mistakes are reported at once."""
        return cls.build(read_tree(path), overrides)

    @classmethod
    def build(cls, tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
        """Make a Recipe from nested mappings; raise one `RecipeError` that names every mistake and its fix."""
        tree = merge({}, tree)
        for override in overrides:
            tree = merge(tree, _override(override))
        mistakes = unknown_keys(tree, cls)
        try:
            recipe = cls.model_validate(known_only(tree, cls))
        except ValidationError as error:
            mistakes += wrong_values(error.errors(), cls)
        if mistakes:
            raise RecipeError(
                "the recipe has " + (f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "a mistake") + ":\n"
                + "\n".join(f"  {mistake}" for mistake in mistakes),
                "All options: crosstune run --help, or docs/recipe.md.",
            )  # fmt: skip
        return recipe

    def fingerprint(self) -> str:
        """SHA-256 over all that can change a result. `output` and the width of the device can't."""
        return hashlib.sha256(json.dumps(self.what_matters(), sort_keys=True).encode()).hexdigest()

    def what_matters(self) -> dict[str, Any]:
        """All that can change a result, as plain mappings: a run goes on only with the same values of these."""
        return self.model_dump(mode="json", exclude=_CHANGES_NO_RESULT)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load` reads back to an equal Recipe."""
        return dump_yaml(self.model_dump(mode="json"))


def options() -> list[Option]:
    """Every option as (name, type, default, description), in the order of the recipe."""
    return list(list_options(Recipe))


def merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with `changes` put over it, section by section; neither is changed."""
    out = _plain(tree)
    for key, change in _plain(changes).items():
        here, value = open_shorthand(key, out.get(key)), open_shorthand(key, change)
        out[key] = merge(here, value) if isinstance(here, dict) and isinstance(value, dict) else value
    return out


def _plain(tree: Any) -> Any:
    if isinstance(tree, BaseModel):
        return tree.model_dump()
    if isinstance(tree, Mapping):
        return {str(key): _plain(value) for key, value in tree.items()}
    return os.fspath(tree) if isinstance(tree, os.PathLike) else tree


def _override(override: str) -> dict[str, Any]:
    """`section.key=value` → {section: {key: value}}; the value is YAML, a sweep's key keeps its dots."""
    key, equals, value = override.partition("=")
    path = key.strip().split(".", 1 if key.strip().startswith("sweep.") else -1)
    if not equals or not all(path):
        raise RecipeError(
            f"the override {override!r} is not of the form section.key=value", "Write it like lora.rank=8."
        )
    tree = parse_yaml(value, name=f"override {override!r}")
    for part in reversed(path):
        tree = {part: tree}
    return tree


def read_tree(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A recipe file as nested mappings, not judged yet. Raises RecipeError where there is none."""
    if Path(path).suffix.lower() in ROWS:
        make = f"crosstune init {shlex.quote(str(path))} --model NAME"
        raise RecipeError(f"{str(path)!r} is a file of rows, and a recipe is expected", f"Make a recipe of it: {make}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        problem = f"the recipe {str(path)!r} can't be read: {error.strerror}"
        raise RecipeError(problem, "Give the path of a YAML recipe (or, to fit, of a folder with a run).") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"the recipe {str(path)!r} is not UTF-8: {error}", "Save it as UTF-8 text.") from None
    tree = parse_yaml(text, name=str(path))
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} holds no recipe", "A recipe starts with sections such as 'model:' and 'data:'.")
    return tree
