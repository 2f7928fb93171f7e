"""A saved PEFT adapter as what it does to each weight of the base, one weight at a time.

PEFT itself, on a base without memory (meta tensors), says which keys must be there, with what shape and scale.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from crosstune.errors import ModelError, first_line
from crosstune.export.adapter import BASE_CHECKSUMS, CONFIG, FACTS, WEIGHTS
from crosstune.export.changes import Change, LowRank, Replaced, Rows
from crosstune.export.folder import read_json, wrong_checksums

PREFIX = "base_model.model."
Shape = tuple[int, ...]


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter whose keys and shapes were checked against its base."""

    folder: Path
    config: LoraConfig
    changes: Mapping[str, Change]  # name of the base's parameter → what happens to it
    vocab_size: int  # embedding rows of base + adapter
    input_embedding: str  # parameter names, for tied bases
    output_embedding: str
    is_tied: bool  # of the base: config.json may leave it to the architecture, as Gemma's does
    prefix: str  # transformers' base_model_prefix: some files name their tensors without it
    names: frozenset[str]  # every parameter of the base
    layers: int  # adapted layers


def adapter_folder(source: str | Path) -> Path:
    """The folder of a PEFT adapter: `source` itself, or the one fit of a run."""
    place = Path(source).expanduser()
    if (place / CONFIG).is_file():
        return place
    if (place / "adapter" / CONFIG).is_file():
        return place / "adapter"
    fits = sorted(config.parent for config in place.glob(f"lanes/*/all/adapter/{CONFIG}"))
    if len(fits) == 1:
        return fits[0]
    if fits:
        raise ModelError(f"{str(source)!r} holds {len(fits)} fits", f"Name one: {', '.join(str(fit) for fit in fits)}.")
    if any(place.glob(f"lanes/*/*/adapter/{CONFIG}")):
        raise ModelError(
            f"{str(source)!r} holds adapters of folds, each trained without a part of the rows, and no fit on all rows",
            "Fit the winner first (crosstune fit), or name one adapter's folder.",
        )
    raise ModelError(
        f"{str(source)!r} holds no adapter: there is no {CONFIG}", "Give the folder of a PEFT adapter or a run."
    )


def holds_adapter(source: str | Path) -> bool:
    """Whether `source` is a PEFT adapter's folder or a run (with a fit or without)."""
    place = Path(source).expanduser()
    return (place / CONFIG).is_file() or (place / "adapter" / CONFIG).is_file() or (place / "journal.jsonl").is_file()


def adapter_config(folder: Path) -> LoraConfig:
    """adapter_config.json, refused unless it is a LoRA adapter whose merge is known."""
    file = folder / CONFIG
    if not file.is_file():
        raise ModelError(
            f"{str(folder)!r} holds no adapter: there is no {CONFIG}", "Give the folder of a PEFT adapter."
        )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(f"{file} can't be read: {error}", "Write the adapter again, or mend that file.") from None
    if not isinstance(config, LoraConfig):
        raise ModelError(
            f"{str(folder)!r} is a {config.peft_type} adapter", "Only LoRA adapters are merged here; use PEFT."
        )
    odd = [name for name, value in config.to_dict().items() if name in NOT_MERGED and value]
    if odd:
        raise ModelError(f"the adapter uses {', '.join(odd)}", "That isn't merged here; use PEFT's merge_and_unload.")
    return config


# Options that change the merge in ways the formulas above don't know.
NOT_MERGED = (
    "lora_bias", "layer_replication", "ensure_weight_tying", "use_qalora", "use_bdlora", "arrow_config",
    "alora_invocation_tokens", "target_parameters", "kasa_config", "velora_config",
)  # fmt: skip


def read_adapter(folder: Path, base_config: PretrainedConfig) -> SavedAdapter:
    """Read the adapter in `folder` and check it, key by key, against a base with this config."""
    config = adapter_config(folder)
    tensors, model = _checked(folder, config, base_config)
    return _saved(folder, config, tensors, model)


def check_adapter(folder: Path, base_config: PretrainedConfig) -> None:
    """Refuse an adapter that is damaged, or whose keys don't fit a base with this config."""
    _checked(folder, adapter_config(folder), base_config)


def _checked(folder: Path, config: LoraConfig, base_config: PretrainedConfig) -> tuple[dict[str, Tensor], Any]:
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    model = _on_meta(config, base_config, _rows_in(tensors))
    refuse_wrong_keys({key: tuple(tensor.shape) for key, tensor in tensors.items()}, _expected(model), folder)
    has_biases = any(name.endswith("base_layer.bias") for name in model.state_dict())
    if config.bias != "none" and has_biases and not any(key.endswith(".bias") for key in tensors):
        raise ModelError(
            f"the adapter was trained with bias={config.bias!r}, and its file holds no biases",
            "PEFT 0.18 doesn't save them: save it with a newer one, or train without biases.",
        )
    wrong = wrong_checksums(folder)
    if wrong:
        raise ModelError(f"{', '.join(wrong)} in {str(folder)!r} differs from its checksum", "Write the adapter again.")
    infinite = [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if infinite:
        raise ModelError(f"{infinite[0]} holds numbers that are not finite", "Train that lane again.")
    return tensors, model


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"{folder / WEIGHTS} can't be read: {first_line(error)}", "Write the adapter again (fit, or run)."
    )


def model_config(place: Mapping[str, Any]) -> PretrainedConfig:
    """The base's config, from `from_pretrained` arguments that say where."""
    try:
        return AutoConfig.from_pretrained(**place)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the base's config can't be read: {first_line(error)}", "Name a base that transformers opens with base=…."
        ) from None


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of the adapter's card, as `save_adapter` wrote them; {} for an adapter from elsewhere."""
    file = folder / FACTS
    return dict(read_json(file).get("card") or {}) if file.is_file() else {}


def recorded_checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the base's weight files by name, where the adapter recorded them."""
    file = folder / BASE_CHECKSUMS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def refuse_wrong_keys(found: Mapping[str, Shape], expected: Mapping[str, Shape], folder: Path) -> None:
    """adapter-keys: every missing, unexpected or misshapen key at once. PEFT only warns, and acts as the bare base."""
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(key for key in set(found) - set(expected) if not _is_embedding(key))
    misshapen = [
        f"{key} {found[key]}, not {shape}"
        for key, shape in sorted(expected.items())
        if key in found and found[key] != shape
    ]
    faults = [("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen)]
    if any(keys for _, keys in faults):
        words = "; ".join(f"{word}: {_listed(keys)}" for word, keys in faults if keys)
        raise ModelError(
            f"adapter-keys: {folder / WEIGHTS} doesn't fit its base. {words}",
            "Is this the base it was trained on, and the file as it was written? Otherwise train or export it again.",
        )


def refuse_other_layers(folder: Path, layers: Sequence[str]) -> None:
    """adapter-keys, for an adapter that is known to be plain LoRA on these layers. Reads the file's header only."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, error) from None
    keys = [f"{PREFIX}{layer}.lora_{part}.weight" for layer in layers for part in "AB"]
    refuse_wrong_keys(found, {key: found.get(key, ()) for key in keys}, folder)


def _on_meta(config: LoraConfig, base_config: PretrainedConfig, rows: int | None) -> Any:
    """PEFT's model of this adapter without memory: names, shapes and scales only."""
    base_config = copy.deepcopy(base_config)
    base_config.quantization_config = None
    if rows is not None:
        base_config.get_text_config().vocab_size = rows
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice about tied weights: handled in merger.py
            base = AutoModelForCausalLM.from_config(base_config)
            return get_peft_model(base, copy.deepcopy(config), low_cpu_mem_usage=True)
    except ValueError as error:
        raise ModelError(
            f"the adapter doesn't fit its base: {first_line(error)}", "Name the base it was trained on with base=…."
        ) from None


def _expected(model: Any) -> dict[str, tuple[int, ...]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def _saved(folder: Path, config: LoraConfig, tensors: Mapping[str, Tensor], model: Any) -> SavedAdapter:
    base = model.get_base_model()
    names = frozenset(re.sub(r"\.base_layer\.", ".", name) for name in base.state_dict())
    inner = {id(module): name for name, module in base.named_modules()}
    ends = [inner[id(base.get_input_embeddings())], inner[id(base.get_output_embeddings())]]
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    low_rank: dict[str, LowRank] = {f"{name}.weight": _low_rank(name, layer, tensors) for name, layer in layers.items()}
    whole: dict[str, Change] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        if ".lora_" in key:
            continue
        if name.endswith(".token_adapter.trainable_tokens_delta"):
            module = name.removesuffix(".token_adapter.trainable_tokens_delta")
            whole[f"{module}.weight"] = Rows(_token_indices(config, module), tensor)
        elif name in low_rank:
            low_rank[name] = replace(low_rank[name], own_weight=tensor)
        else:
            whole[name] = Replaced(tensor)
    return SavedAdapter(
        folder=folder,
        config=config,
        changes={**low_rank, **whole},
        vocab_size=int(base.config.get_text_config().vocab_size),
        input_embedding=f"{ends[0]}.weight",
        output_embedding=f"{ends[1]}.weight",
        is_tied=bool(base.config.tie_word_embeddings),
        prefix=base.base_model_prefix,
        names=names,
        layers=len(layers),
    )


def _low_rank(name: str, layer: LoraLayer, tensors: Mapping[str, Tensor]) -> LowRank:
    key, scale = f"{PREFIX}{name}", float(layer.scaling["default"])
    if f"{key}.lora_embedding_A" in tensors:
        if f"{key}.lora_magnitude_vector" in tensors:
            raise ModelError(f"the adapter uses DoRA on the embedding {name}", "Use PEFT's merge_and_unload for it.")
        a, b = tensors[f"{key}.lora_embedding_A"], tensors[f"{key}.lora_embedding_B"]
        return LowRank(a, b, scale, is_transposed=True)
    return LowRank(
        tensors[f"{key}.lora_A.weight"],
        tensors[f"{key}.lora_B.weight"],
        scale,
        is_transposed=bool(layer.fan_in_fan_out),  # type: ignore[attr-defined]  # of every linear LoRA layer
        magnitude_O=tensors.get(f"{key}.lora_magnitude_vector"),
    )


def _token_indices(config: LoraConfig, module: str) -> tuple[int, ...]:
    indices = config.trainable_token_indices
    if isinstance(indices, dict):
        return tuple(next(value for name, value in indices.items() if module == name or module.endswith(f".{name}")))
    return tuple(indices or ())


def _rows_in(tensors: Mapping[str, Tensor]) -> int | None:
    """Embedding rows, where the adapter carries the whole embedding (PEFT saves it after a resize)."""
    rows = {int(tensor.shape[0]) for key, tensor in tensors.items() if _is_embedding(key)}
    return max(rows) if rows else None


def _is_embedding(key: str) -> bool:
    return key.endswith((".embed_tokens.weight", ".lm_head.weight", ".base_layer.weight")) and ".lora_" not in key


def _listed(keys: list[str], most: int = 6) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
