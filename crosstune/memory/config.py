"""A model's config as a mapping, without its weights and without torch: folder, hub id or GGUF file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from crosstune.errors import ModelError, first_line, hub_fix
from crosstune.recipe.sections import Model

NAMES_A_BASE = "Give a hub id, a folder with config.json and safetensors, or a .gguf file in model.name."
# GGUF value types (github.com/ggml-org/ggml/blob/master/docs/gguf.md): struct formats of the plain ones
_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_FROM_GGUF = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "vocab_size": "vocab_size",
}  # fmt: skip


def read_config(model: Model) -> dict[str, Any]:
    """The mapping in config.json, or the same keys from a GGUF header. Raises ModelError if there is none."""
    place = Path(model.name).expanduser()
    if model.name.endswith(".gguf"):
        return read_gguf_config(place)
    if place.is_dir():
        return _load(place / "config.json", model.name)
    refuse_missing_path(model.name)
    return _load(_from_hub(model), model.name)


def refuse_missing_path(name: str) -> None:
    """Raise ModelError for a path that isn't there: the hub would say that it is no id."""
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().exists():
        looked = "" if name.startswith(("/", "~")) else f" (looked for from {str(Path.cwd())!r})"
        raise ModelError(
            f"there is no base model at {name!r}{looked}",
            NAMES_A_BASE,
        )


def _load(file: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the base model {name!r} has no config.json that can be read: {error}",
            NAMES_A_BASE,
        ) from None
    return dict(found)


def _from_hub(model: Model) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
        if isinstance(cached, str):
            return Path(cached)
        return Path(hf_hub_download(model.name, "config.json", revision=model.revision))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"the base model {model.name!r} can't be found: {first_line(error)}", hub_fix(error, NAMES_A_BASE)
        ) from None


def read_gguf_config(file: Path) -> dict[str, Any]:
    """A transformers-like config from a GGUF file's header; the weights are not read."""
    try:
        with file.open("rb") as stream:
            values, tensors = _gguf_header(stream)
    except OSError as error:
        raise ModelError(f"{file} can't be read: {error}", "Give the path of a .gguf file in model.name.") from None
    except (struct.error, UnicodeDecodeError, KeyError, ValueError):
        raise ModelError(f"{file} is no whole GGUF file", "Download it again, or name another model.") from None
    family = str(values.get("general.architecture", ""))
    config: dict[str, Any] = {"model_type": family}
    for name, key in _FROM_GGUF.items():
        if f"{family}.{name}" in values:
            config[key] = values[f"{family}.{name}"]
    config.setdefault("vocab_size", values.get("tokenizer.ggml.tokens"))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return config


def _gguf_header(stream: BinaryIO) -> tuple[Mapping[str, Any], frozenset[str]]:
    """(key → value, with the length in place of an array; names of the tensors)."""
    if stream.read(4) != b"GGUF":
        raise ValueError("not GGUF")
    _, num_tensors, num_values = struct.unpack("<IQQ", stream.read(20))
    values = {}
    for _ in range(num_values):
        key = _string(stream)
        values[key] = _value(stream, _number(stream, "I"))
    names = []
    for _ in range(num_tensors):
        names.append(_string(stream))
        stream.seek(8 * _number(stream, "I") + 4 + 8, 1)  # sizes, type, offset
    return values, frozenset(names)


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _number(stream, _PLAIN[kind])
    inner, count = struct.unpack("<IQ", stream.read(12))
    if inner == _STRING:
        for _ in range(count):
            stream.seek(_number(stream, "Q"), 1)
    else:
        stream.seek(count * struct.calcsize(_PLAIN[inner]), 1)
    return count


def _number(stream: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", stream.read(struct.calcsize(code)))[0]


def _string(stream: BinaryIO) -> str:
    return stream.read(_number(stream, "Q")).decode()
