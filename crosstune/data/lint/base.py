"""The tokenizer against the model's config and embedding: stop tokens, vocabulary, control tokens never trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.lint.embedding import Embedding, find_embedding, model_folder
from crosstune.errors import Finding, ModelError, Place
from crosstune.memory.shape import ModelShape
from crosstune.recipe.sections import Model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_stop_token(
    tokenizer: PreTrainedTokenizerBase, end: str, generation_stops: Sequence[int] = ()
) -> Iterator[Finding]:
    """`end`: the control token after each assistant turn of the chat template, "" if none."""
    number = tokenizer.get_vocab().get(end) if end else None
    if number is not None and number not in {tokenizer.eos_token_id, *generation_stops}:
        message = (
            f"turns end in {end} ({number}), while generation stops at {tokenizer.eos_token} ({tokenizer.eos_token_id})"
        )
        yield FAULTS["stop-token-mismatch"].found(message)


def check_template_source(model: Model) -> Iterator[Finding]:
    """A chat template from the recipe, and none with the tokenizer."""
    folder = model_folder(model.tokenizer or model.name)
    if model.chat_template is None or folder is None or folder.suffix == ".gguf":
        return
    if not (folder / "chat_template.jinja").exists() and "chat_template" not in _json(folder / "tokenizer_config.json"):
        message = f"{model.chat_template} is the chat template; the tokenizer of {model.name} has none of its own"
        yield FAULTS["template-on-base-model"].found(message, where=Place(field="model.chat_template"))


def check_vocabulary(num_entries: int, num_rows: int, highest_used: int) -> Iterator[Finding]:
    """Tokenizer entries against embedding rows. An entry too many hurts only if the rows use it."""
    if highest_used >= num_rows:
        message = f"the rows use token {highest_used}, the embedding has {num_rows:,} rows"
        yield FAULTS["vocabulary-exceeds-embedding"].found(message)
    elif num_entries > num_rows:
        message = f"the tokenizer has {num_entries:,} entries, the embedding {num_rows:,} rows; no row uses the rest"
        yield FAULTS["vocabulary-exceeds-embedding"].found(message, severity="note")
    elif num_entries < num_rows:
        message = f"the embedding has {num_rows:,} rows, the tokenizer {num_entries:,} entries"
        yield FAULTS["vocabulary-below-embedding"].found(message)


def check_untrained(tokenizer: PreTrainedTokenizerBase, embedding: Embedding, used: Sequence[int]) -> Iterator[Finding]:
    """`used`: the control tokens that occur in the encoded rows. Reserved ones that nobody uses may be as they are."""
    untrained = embedding.untrained(sorted(used))
    if untrained:
        names = ", ".join(f"{token} {tokenizer.convert_ids_to_tokens(token)}" for token in untrained)
        message = f"the rows use control tokens whose embedding was never trained: {names}"
        yield FAULTS["untrained-special-tokens"].found(message)


def check_base(
    tokenizer: PreTrainedTokenizerBase, model: Model, used: Sequence[int], highest_used: int
) -> Iterator[Finding]:
    """All checks that need the model's files."""
    folder = model_folder(model.name)
    if folder is None:
        message = f"no files of {model.name} are on this machine; its embedding wasn't looked at"
        yield FAULTS["embedding-unread"].found(message, where=Place(field="model.name"))
        return
    embedding = find_embedding(folder)
    num_rows = embedding.num_rows if embedding else config_of(model.name).get("vocab_size")
    if isinstance(num_rows, int):
        yield from check_vocabulary(len(tokenizer), num_rows, highest_used)
    if embedding is not None:
        yield from check_untrained(tokenizer, embedding, used)


def config_of(name: str) -> dict[str, Any]:
    """The model's config.json, where the model is a folder or in the hub's cache; else an empty mapping."""
    folder = model_folder(name)
    return _json(folder / "config.json") if folder is not None and folder.is_dir() else {}


def shape_of(name: str) -> ModelShape | None:
    """The model's sizes and layer names, where its config is on this machine and can be read."""
    config = config_of(name)
    try:
        return ModelShape.from_config(config) if config else None
    except ModelError:
        return None  # a config that lacks a size is refused where the model is planned


def generation_stops(name: str) -> list[int]:
    """Stop tokens of the model's generation config, read from its folder without asking the hub."""
    folder = model_folder(name)
    ids = _json(folder / "generation_config.json").get("eos_token_id") if folder and folder.is_dir() else None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # absent, or reported where the model is loaded
    return read if isinstance(read, dict) else {}
