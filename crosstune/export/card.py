"""README.md of an adapter or a merged model: what it is, how it was made, what it scored, how to open it.

The same facts give the same bytes: no date, no path of the machine, no name of a user or host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path, PureWindowsPath
from typing import Any

from crosstune import __version__

PACKAGES = ("torch", "transformers", "peft")


def model_card(card: Mapping[str, Any], *, base_name: str, kind: str, serve: str = "") -> str:
    """Markdown with front matter. Mappings in `card` become tables of their own, plain values one table at the top.

    `kind` is "adapter" or "merged model"; `serve` is Markdown with the commands that open the result.
    """
    base = public_name(base_name)
    title = card.get("title") or f"{'LoRA adapter for' if kind == 'adapter' else 'Fine-tuned'} {base}"
    plain = {key: value for key, value in card.items() if key != "title" and not isinstance(value, Mapping)}
    tables = {key: value for key, value in card.items() if isinstance(value, Mapping)}
    parts = [_front_matter(base_name, kind), f"# {title}", _table({"base model": base, "kind": kind, **plain})]
    parts += [f"## {_heading(key)}\n\n{_table(value)}" for key, value in tables.items() if value]
    parts += [f"## Open it\n\n{serve.strip()}"] if serve else []
    parts += [f"## Versions\n\n{_table(versions())}"]
    return "\n\n".join(parts) + "\n"


@cache  # reading one takes a millisecond
def versions() -> dict[str, str]:
    """Versions of the packages that made the weights."""
    return {"crosstune": __version__, **{package: version(package) for package in PACKAGES}}


def public_name(name: str) -> str:
    """A hub id as it is; of a path on this machine only its last part, which tells nothing about the machine."""
    if not is_path(name):
        return name
    parts = PureWindowsPath(name).parts if "\\" in name else Path(name).expanduser().parts
    return parts[-1] if parts else name


def public_facts(tree: Any) -> Any:
    """A card's facts with no place of this machine in them: the last part of each path, nested ones too."""
    if isinstance(tree, Mapping):
        return {key: public_facts(value) for key, value in tree.items()}
    if isinstance(tree, str):
        return public_name(tree) if tree.startswith(("/", "~/", "./", "../")) else tree
    return [public_facts(value) for value in tree] if isinstance(tree, list | tuple) else tree


def is_path(name: str) -> bool:
    """Whether `name` is a place on this machine and not a hub id."""
    rooted = name.startswith(("/", "./", "../", "~")) or "\\" in name or name[1:3] in (":/", ":\\")
    return rooted or name.endswith(".gguf") or Path(name).exists()


def _front_matter(base_name: str, kind: str) -> str:
    lines = ["---", f"library_name: {'peft' if kind == 'adapter' else 'transformers'}", "pipeline_tag: text-generation"]
    if not is_path(base_name) and base_name.count("/") == 1:
        lines += [f"base_model: {base_name}"]
        lines += [f"base_model_relation: {'adapter' if kind == 'adapter' else 'finetune'}"]
    return "\n".join([*lines, "tags:", "- lora", "- crosstune", "---"])


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {_heading(str(key), first=False)} | {_words(value)} |" for key, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _heading(key: str, *, first: bool = True) -> str:
    words = key.replace("_", " ")
    return words[:1].upper() + words[1:] if first else words


def _words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{_heading(str(key), first=False)} {_words(part)}" for key, part in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_words(part) for part in value)
    return str(public_facts(value)).replace("|", "\\|").replace("\n", " ")
