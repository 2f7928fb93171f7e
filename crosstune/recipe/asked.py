"""Python objects → what was asked: a Recipe, and the things that no YAML can hold (rows, model, splitter)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from crosstune.errors import RecipeError
from crosstune.recipe.mistakes import shown
from crosstune.recipe.recipe import Recipe, open_shorthand, read_tree


@runtime_checkable
class _HasConfig(Protocol):
    config: Any


@runtime_checkable
class _PeftConfig(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class _Splitter(Protocol):
    def split(self, X: Any, y: Any = None, groups: Any = None) -> Any: ...


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
    source = data if data is not None and not _is_section(data) else None
    passed = model if model is not None and not _is_section(model) else None
    splitter = folds if folds is not None and not _is_section(folds) else None
    if passed is not None and tokenizer is None:
        raise RecipeError("a model was passed without its tokenizer", "Pass tokenizer=… beside model=….")
    given: dict[str, Any] = {
        "data": data if source is None else {"path": f"{type(source).__name__} in memory"},
        "model": model if passed is None else {"name": _model_name(passed), **_quantization(passed)},
        "folds": folds if splitter is None else {"splitter": _splitter_words(splitter)},
        "lora": lora if lora is None or isinstance(lora, Mapping) else lora_section(lora),
        **sections,
    }
    tree = _tree(recipe)
    for name, value in given.items():
        if value is not None:
            _merge(tree, name, value)
    made = Recipe.build(tree)
    if made.folds.splitter and splitter is None:
        raise RecipeError(
            f"folds.splitter names {made.folds.splitter}, which only Python can hold",
            "Pass folds=<the splitter> to crosstune.cross_validate, or set folds.kind.",
        )
    return Asked(made, made.data.path if source is None else source, passed, tokenizer, splitter)


def _is_section(value: Any) -> bool:
    """Whether `value` is written as in a recipe, not an object in memory: a `DatasetDict` is a mapping, and rows."""
    if isinstance(value, Mapping):
        return type(value).__module__.partition(".")[0] != "datasets"
    return isinstance(value, str | int | float | os.PathLike)


def lora_section(config: Any) -> dict[str, Any]:
    """The lora section of a `peft.LoraConfig`. Raises RecipeError naming every option that lanes don't train."""
    given = {} if isinstance(config, type) or not isinstance(config, _PeftConfig) else config.to_dict()
    if given.get("peft_type") != "LORA" or given.get("task_type") not in (None, "CAUSAL_LM"):
        raise RecipeError(
            f"lora is {shown(config)}, and lanes train LoRA of causal language models only",
            "Pass a mapping, such as {'rank': 16, 'alpha': 32}, or a peft.LoraConfig(task_type='CAUSAL_LM').",
        )
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
    return dict(recipe) if isinstance(recipe, Mapping) else read_tree(recipe)


def _merge(tree: dict[str, Any], section: str, given: Any) -> None:
    value = open_shorthand(section, os.fspath(given) if isinstance(given, os.PathLike) else given)
    found = open_shorthand(section, tree.get(section) or {})
    tree[section] = {**found, **value} if isinstance(found, Mapping) and isinstance(value, Mapping) else value


def _model_name(model: Any) -> str:
    if not isinstance(model, _HasConfig):
        raise RecipeError(
            f"model is {shown(model)}: neither a name nor a model",
            "Pass a hub id, a folder, a mapping such as {'name': …, 'quantization': 'nf4'}, or a transformers model.",
        )
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


def _splitter_words(splitter: Any) -> str:
    """The splitter in the recipe's words: as text, so that the fingerprint changes with it."""
    if isinstance(splitter, type) or not isinstance(splitter, _Splitter | Iterable):
        raise RecipeError(
            f"folds is {shown(splitter)}, which splits nothing",
            "Pass a number of folds, a mapping such as {'kind': 'stratified', 'by': 'label', 'k': 5}, or a "
            "scikit-learn splitter such as KFold(5, shuffle=True, random_state=0).",
        )
    return repr(splitter)
