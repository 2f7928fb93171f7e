"""The files around the merged weights: config, tokenizer, template, generation config, the model's own code.

What the adapter brings (it was trained with it) goes before what the base has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from crosstune.errors import ModelError, first_line
from crosstune.export.adapter import GENERATION, write_json
from crosstune.export.folder import read_json
from crosstune.export.merger import Merger

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"


def write_companions(merger: Merger, out: Path) -> PreTrainedTokenizerBase:
    """Write tokenizer, generation config and the model's own code into `out`; the tokenizer as it loads from there."""
    base, adapter = merger.weights.folder, merger.adapter.folder
    _copy_tokenizer(adapter if has_tokenizer(adapter) else base, out)
    for code in base.glob("*.py"):
        shutil.copy(code, out)
    tokenizer = load_saved_tokenizer(out)
    if len(tokenizer) > merger.adapter.vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} entries, the embedding only {merger.adapter.vocab_size} rows",
            "The adapter doesn't carry the rows of its added tokens: save it with its embeddings.",
        )
    write_json(out / GENERATION, generation_fields(base, adapter, tokenizer))
    return tokenizer


def merged_config(merger: Merger) -> dict[str, Any]:
    """The base's config.json with what merging changed: dtype, vocabulary rows, tied or not, no quantisation."""
    config = dict(merger.weights.config)
    config.pop("quantization_config", None)
    dtype = str(merger.dtype).removeprefix("torch.")
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if merger.adapter.vocab_size != config.get("vocab_size", merger.adapter.vocab_size):
        config["vocab_size"] = merger.adapter.vocab_size
    if merger.unties:
        config["tie_word_embeddings"] = False
    return config


def generation_fields(base: Path, adapter: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The base's generation config with every stop token that base, adapter or tokenizer knows."""
    fields = {**_read_json_if_there(base / GENERATION)}
    known = (fields, _read_json_if_there(base / "config.json"), _read_json_if_there(adapter / GENERATION))
    stops = {token for source in known for token in _ids(source.get("eos_token_id"))} | set(
        _ids(tokenizer.eos_token_id)
    )
    fields["eos_token_id"] = sorted(stops)
    if tokenizer.pad_token_id is not None:
        fields["pad_token_id"] = tokenizer.pad_token_id
    if tokenizer.bos_token_id is not None:
        fields["bos_token_id"] = tokenizer.bos_token_id
    return {key: value for key, value in fields.items() if value is not None}


def load_saved_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in `folder`."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the tokenizer of {folder.name!r} can't be read: {first_line(error)}",
            "Neither adapter nor base brings a tokenizer that loads: add one to the adapter's folder.",
        ) from None


def stop_ids_in(folder: Path) -> tuple[int, ...]:
    """All stop tokens that the generation config of a model or adapter folder names."""
    return tuple(_ids(_read_json_if_there(folder / GENERATION).get("eos_token_id")))


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer was saved in `folder`."""
    return (folder / "tokenizer_config.json").is_file()


def _copy_tokenizer(source: Path, out: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copy(source / name, out)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, out / TEMPLATES)


def _read_json_if_there(file: Path) -> Mapping[str, Any]:
    return read_json(file) if file.is_file() else {}


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [int(value)] if isinstance(value, int) else [int(token) for token in value]
