"""A byte-level BPE tokenizer as llama.cpp stores it: tokens, types, merges, special ids, its splitting rule by name.

llama.cpp has the splitting rules of known models built in and picks one by name; its converter finds the name by a hash
over sample text. Here it is read off the rule itself in tokenizer.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from crosstune.errors import MissingExtra, ModelError

try:
    import gguf
except ImportError:
    raise MissingExtra("gguf", "gguf") from None

CONVERTER = "python convert_hf_to_gguf.py FOLDER (llama.cpp's own converter)"
# Splitting rule in tokenizer.json → llama.cpp's name for it (src/llama-vocab.cpp, llama_vocab::impl::load).
_BEFORE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {rf"{_BEFORE}\p{{N}}{{1,3}}{_AFTER}": "llama-bpe", rf"{_BEFORE}\p{{N}}{_AFTER}": "qwen2"}


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> None:
    """Write the tokenizer of `folder` for a model with `num_rows` embedding rows (often more than there are tokens)."""
    tree = _tokenizer_json(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer(tree))
    texts, types = token_list(tokenizer, num_rows)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tree["model"]["merges"]]
    writer.add_token_merges(merges)
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if ids[name] is not None:
            add(ids[name])
    writer.add_add_bos_token(_puts_bos_first(tokenizer))
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def token_list(tokenizer: PreTrainedTokenizerBase, num_rows: int) -> tuple[list[str], list[int]]:
    """Text and type of every embedding row; rows without a token are marked unused."""
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    texts, types = [], []
    for number in range(num_rows):
        if number not in by_id:
            kind = gguf.TokenType.UNUSED
        elif number not in added:
            kind = gguf.TokenType.NORMAL
        else:
            kind = gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED
        texts.append(by_id.get(number, f"[PAD{number}]"))
        types.append(int(kind))
    return texts, types


def pre_tokenizer(tree: dict[str, Any]) -> str:
    """llama.cpp's name of the splitting rule in a tokenizer.json; refuses rules that are not known here."""
    parts = tree["pre_tokenizer"].get("pretokenizers", [tree["pre_tokenizer"]]) if tree.get("pre_tokenizer") else []
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and (name := RULES.get(parts[0]["pattern"].get("Regex", ""))):
        return name
    raise ModelError(
        f"the tokenizer splits text by a rule that has no known name in llama.cpp ({' + '.join(kinds) or 'none'})",
        f"Convert the merged folder with {CONVERTER}.",
    )


def _tokenizer_json(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    tree: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if tree.get("model", {}).get("type") != "BPE" or tree["model"].get("byte_fallback"):
        raise ModelError(
            f"{folder.name} has no byte-level BPE tokenizer", f"Convert the merged folder with {CONVERTER}."
        )
    return tree


def _puts_bos_first(tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer("a").input_ids
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
