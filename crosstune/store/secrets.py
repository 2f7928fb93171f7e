"""Keep tokens and passwords out of everything that a run writes: journal, recipe.yaml, report, model card.

Two nets: strings that look like a token whatever their source, and the values of this process's environment variables
whose names say that they are secret. This module knows nothing of where the text goes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

MASK = "[redacted]"
_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
# TOKENIZERS_PARALLELISM=false and KEYBOARD=us are no secrets: a value counts from 8 characters on, and paths never do.
_SHORTEST = 8
_LOOKS = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{16,}                                   # Hugging Face: hf_ and 34 letters or digits
    | \b(?:sk|rk)-[A-Za-z0-9_-]{16,}                        # OpenAI and the like
    | \b(?:ghp|gho|ghs|ghu|ghr)_[A-Za-z0-9]{20,}            # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bAKIA[0-9A-Z]{16}\b                                  # AWS access key id
    | \bxox[abprs]-[A-Za-z0-9-]{10,}                        # Slack
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*   # JSON web token
    | (?<=Bearer\ )[^\s"']{8,} | (?<=Basic\ )[A-Za-z0-9+/=]{8,}
    | (?<=://)[^\s/@:]+:[^\s/@]+(?=@)                       # https://user:password@host
    """,
    re.VERBOSE,
)


def redact(text: str) -> str:
    """`text` with every token that can be told as one replaced by "[redacted]"."""
    return _masked(text, _environment_secrets())


def redact_tree(tree: Any) -> Any:
    """The same for every string in nested mappings and sequences; keys too, for a token may stand in one."""
    return _masked_tree(tree, _environment_secrets())


def _masked(text: str, secrets: Sequence[str]) -> str:
    for value in secrets:
        text = text.replace(value, MASK)
    return _LOOKS.sub(MASK, text)


def _masked_tree(tree: Any, secrets: Sequence[str]) -> Any:
    if isinstance(tree, str):
        return _masked(tree, secrets)
    if isinstance(tree, Mapping):
        return {_masked(str(key), secrets): _masked_tree(value, secrets) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_masked_tree(value, secrets) for value in tree]
    return tree


def _environment_secrets() -> list[str]:
    """As the environment is now. Longest first, so that a secret which contains another is masked whole."""
    values = {
        value
        for name in os.environ
        if _is_secret(name)
        and len(value := os.environ.get(name, "")) >= _SHORTEST
        and not value.startswith(("/", "~", "."))
    }
    return sorted(values, key=lambda value: (-len(value), value))


@cache  # text is masked line by line, and the names hardly change
def _is_secret(name: str) -> bool:
    return _NAMES.search(name) is not None
