"""Python objects → what was asked: a Recipe, and the things that no YAML can hold (rows, model, splitter)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.errors import RecipeError
from crosstune.recipe import Recipe, read_tree


@dataclass(frozen=True)
class Asked:
    """A recipe, the source of its rows, and what was passed in memory."""

    recipe: Recipe
    source: Any  # path, hub id, DataFrame or Dataset
    model: Any = None  # a transformers model in memory, with its tokenizer
    tokenizer: Any = None
    splitter: Any = None  # a scikit-learn splitter

    @property
    def stop_ids(self) -> list[int] | None:
        """Stop tokens of a model in memory; None where they are to be read with the model."""
        if self.model is None:
            return None
        found = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        return [found] if isinstance(found, int) else list(found or [])


def gather(
    recipe: Recipe | str | os.PathLike[str] | Mapping[str, Any] | None,
    *,
    data: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    lora: Any = None,
    folds: Any = None,
    sections: Mapping[str, Any],
) -> Asked:
    """Merge keywords over `recipe`; each section's keywords replace single keys of that section."""
    tree = _tree(recipe)
    for name, value in {"data": data, "model": model, "folds": folds, **sections}.items():
        if isinstance(value, Mapping) or value is None:
            _merge(tree, name, value or {})
    source = splitter = passed = None
    if isinstance(data, str | os.PathLike):
        _merge(tree, "data", {"path": os.fspath(data)})
    elif data is not None and not isinstance(data, Mapping):
        source = data
        _merge(tree, "data", {"path": f"{type(data).__name__} in memory"})
    if isinstance(model, str | os.PathLike):
        _merge(tree, "model", {"name": os.fspath(model)})
    elif model is not None and not isinstance(model, Mapping):
        passed = model
        _merge(tree, "model", {"name": _model_name(model), **_quantization(model)})
    if folds is not None and not isinstance(folds, Mapping):
        splitter = folds
        _merge(tree, "folds", _splitter_words(folds))
    if lora is not None:
        _merge(tree, "lora", lora if isinstance(lora, Mapping) else lora_section(lora))
    for name, value in sections.items():
        if value is not None and not isinstance(value, Mapping):
            tree[name] = value
    if passed is not None and tokenizer is None:
        raise RecipeError("a model was passed without its tokenizer", "Pass tokenizer=… beside model=….")
    made = Recipe.build(tree)
    if made.folds.splitter and splitter is None:
        raise RecipeError(
            f"folds.splitter names {made.folds.splitter}, which only Python can hold",
            "Pass folds=<the splitter> to crosstune.cross_validate, or set folds.kind.",
        )
    return Asked(made, made.data.path if source is None else source, passed, tokenizer, splitter)


def lora_section(config: Any) -> dict[str, Any]:
    """The lora section of a `peft.LoraConfig`. Raises RecipeError naming every option that lanes don't train."""
    given = config.to_dict()
    plain: dict[str, tuple[Any, ...]] = {
        "bias": ("none", None), "modules_to_save": (None,), "use_dora": (False, None), "rank_pattern": ({}, None),
        "alpha_pattern": ({}, None), "layers_to_transform": (None,), "trainable_token_indices": (None,),
        "target_parameters": (None,), "exclude_modules": (None,), "init_lora_weights": (True,),
        "lora_bias": (False, None),
    }  # fmt: skip
    wrong = [f"{key}={given[key]!r}" for key, fine in plain.items() if key in given and given[key] not in fine]
    if wrong:
        raise RecipeError(
            f"the LoraConfig asks for {', '.join(wrong)}, which would train or change the shared base or isn't offered",
            "Leave these at PEFT's defaults: a lane trains the A and B of LoRA only.",
        )
    targets = given["target_modules"]
    return {
        "rank": given["r"], "alpha": given["lora_alpha"], "dropout": given["lora_dropout"],
        "rslora": bool(given.get("use_rslora")),
        "targets": targets if isinstance(targets, str) else sorted(targets) if targets else "all-linear",
    }  # fmt: skip


def _tree(recipe: Recipe | str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    if isinstance(recipe, Recipe):
        return recipe.model_dump(mode="json")
    if isinstance(recipe, Mapping):
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in recipe.items()}
    return read_tree(recipe)


def _merge(tree: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    if not values:
        return
    shorthand = {"model": "name", "data": "path"}
    found = tree.get(section) or {}
    if isinstance(found, str) and section in shorthand:
        found = {shorthand[section]: found}
    tree[section] = {**found, **values}


def _model_name(model: Any) -> str:
    return str(model.config.name_or_path or type(model).__name__)


def _quantization(model: Any) -> dict[str, Any]:
    """How bitsandbytes has quantised a model in memory, in the recipe's words: the plan counts its bytes by it."""
    layers = list(model.modules()) if hasattr(model, "modules") else []
    if any(type(layer).__name__ == "Linear8bitLt" for layer in layers):
        return {"quantization": "int8"}
    weights = (layer.weight for layer in layers if type(layer).__name__ == "Linear4bit")
    if (weight := next(weights, None)) is None:
        return {"quantization": "none"}
    state = weight.quant_state
    return {"quantization": "nf4", "double_quant": bool(weight.compress_statistics if state is None else state.nested)}


def _splitter_words(splitter: Any) -> dict[str, Any]:
    """The splitter in the recipe's words: as text, so that the fingerprint changes with it."""
    return {"splitter": repr(splitter)}
