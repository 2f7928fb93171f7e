"""Control tokens in text: their pattern, and marks that stand for text while a template is at work on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Noncharacters of Unicode: text can't hold them by accident, templates don't trim them, JSON filters leave them alone.
MARK = "\ufdd0{}\ufdd1"
MARKED = re.compile("\ufdd0(\\d+)\ufdd1")


def special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Matches the text of any control token of the tokenizer, the longest first."""
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | set(
        tokenizer.all_special_tokens
    )
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed; keys of mappings stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(inner, change) for inner in value]
    return value
