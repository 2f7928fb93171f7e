"""What is wrong with a recipe, in sentences: unknown keys with the nearest right one, values that don't fit.

Knows pydantic models and nested mappings, not which ones they are.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from crosstune.recipe.options import section_of, type_words

MOST_SHOWN = 80  # characters of a wrong value

# What other trainers call our options; nearness of spelling would not find these.
ALIASES = {
    "r": "rank", "lora_r": "rank", "lora_rank": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout",
    "target_modules": "targets", "use_rslora": "rslora", "lr": "learning_rate", "max_length": "max_tokens",
    "max_seq_length": "max_tokens", "cutoff_len": "max_tokens", "n_splits": "k", "num_folds": "k", "groups": "group",
    "num_train_epochs": "epochs", "per_device_train_batch_size": "batch_size", "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup", "warmup_steps": "warmup", "random_state": "seed", "load_in_4bit": "quantization",
    "bnb_4bit_use_double_quant": "double_quant", "model_name_or_path": "name", "early_stopping": "stop",
    "gradient_checkpointing": "checkpointing", "output_dir": "output", "dataset": "path", "dataset_text_field": "text",
}  # fmt: skip


def unknown_keys(tree: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """One sentence for each key that no section knows, with the nearest right one."""
    return list(_unknown_keys(tree, kind, "", option_homes(kind)))


def _unknown_keys(
    tree: Mapping[str, Any], kind: type[BaseModel], prefix: str, homes: Mapping[str, list[str]]
) -> Iterable[str]:
    for key, value in tree.items():
        field = kind.model_fields.get(key)
        if field is None:
            what = "key" if prefix else "section"
            yield f"{prefix}{key}: unknown {what}; {_hint(key, list(kind.model_fields), homes)}"
        elif (section := section_of(field.annotation)) and isinstance(value, Mapping):
            yield from _unknown_keys(value, section, f"{prefix}{key}.", homes)


def option_homes(kind: type[BaseModel], prefix: str = "") -> dict[str, list[str]]:
    """Key → the sections that know it: {'rank': ['lora'], 'seed': ['folds', 'train'], …}."""
    homes: dict[str, list[str]] = {}
    for key, field in kind.model_fields.items():
        section = section_of(field.annotation)
        if prefix:
            homes.setdefault(key, []).append(prefix)
        if section is not None:
            for inner, places in option_homes(section, f"{prefix}.{key}" if prefix else key).items():
                homes.setdefault(inner, []).extend(places)
    return homes


def _hint(key: str, known: list[str], homes: Mapping[str, list[str]]) -> str:
    right = ALIASES.get(key, key)
    if right in known:
        return f"did you mean {right}?"
    if key in homes:
        return f"it belongs under {' or '.join(homes[key])}"
    if right in homes:
        return "did you mean " + " or ".join(f"{home}.{right}" for home in homes[right]) + "?"
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    elsewhere = difflib.get_close_matches(key, list(homes), n=1, cutoff=0.7)
    if elsewhere:
        return f"did you mean {homes[elsewhere[0]][0]}.{elsewhere[0]}?"
    return f"known here: {', '.join(known)}"


def known_only(tree: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """`tree` without its unknown keys, so that the values of the others can be judged in the same pass."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        field = kind.model_fields.get(key)
        if field is None:
            continue
        section = section_of(field.annotation)
        out[key] = known_only(value, section) if section is not None and isinstance(value, Mapping) else value
    return out


def wrong_values(problems: Iterable[Any], kind: type[BaseModel]) -> list[str]:
    """pydantic's problems in words, one an option: `device.lanes: auto | whole number ≥ 1 expected (got 'many')`."""
    sentences: dict[str, str] = {}
    for problem in problems:
        place, field = _locate(problem["loc"], kind)
        got = shown(problem["input"])
        if problem["type"] == "missing" or (got == "null" and field is not None and field.is_required()):
            sentence = f"{place}: is required"
        elif problem["type"] == "value_error":
            message = problem["msg"].removeprefix("Value error, ")
            whole = isinstance(problem["input"], BaseModel | Mapping)
            sentence = f"{place}: {message}" + ("" if whole else f" (got {got})")
        elif field is None:
            sentence = f"{place}: {problem['msg']} (got {got})"
        else:
            words = type_words(field)
            near = difflib.get_close_matches(str(problem["input"]), words.split(" | "), n=1)
            sentence = f"{place}: {words} expected (got {got}"
            sentence += f"; did you mean {near[0]}?)" if near else ")"
        sentences.setdefault(place, sentence)  # a union gives one problem for each of its sides: the first says it
    return list(sentences.values())


def shown(value: Any) -> str:
    """A value as a recipe has it, and not much of a long one."""
    words = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return words if len(words) <= MOST_SHOWN else words[:MOST_SHOWN] + "…"


def _locate(loc: tuple[int | str, ...], kind: type[BaseModel]) -> tuple[str, FieldInfo | None]:
    """The option that pydantic's location means; what follows it are names of union sides and validators."""
    place: list[str] = []
    here: type[BaseModel] | None = kind
    field: FieldInfo | None = None
    for part in loc:
        if here is None or str(part) not in here.model_fields:
            continue
        field = here.model_fields[str(part)]
        place.append(str(part))
        here = section_of(field.annotation)
    return ".".join(place) or "recipe", field
