"""Which layers adapters go on: full names of the linear layers that a recipe means, or a refusal with near matches."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from torch import nn

from crosstune.errors import ModelError
from crosstune.model.base import Base
from crosstune.model.lora import LaneLinear


def linear_sizes(base: Base) -> dict[str, tuple[int, int]]:
    """Full name → (inputs, outputs) of every linear layer, output head included."""
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight transposed

    sizes = {}
    for name, module in base.model.named_modules():
        if isinstance(module, LaneLinear):
            module = module.base
        if isinstance(module, nn.Linear):
            sizes[name] = (module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            sizes[name] = (module.nx, module.nf)
    return {name: size for name, size in sizes.items() if not name.endswith(".base")}


def resolve_targets(base: Base, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Full names of the layers that `targets` means, by PEFT's rule: equal, or the end after a dot.

    Raises ModelError naming every target that matches nothing, with near matches.
    """
    names = linear_sizes(base)
    if targets == "all-linear":
        head = base.head_name
        found = {name for name in names if name != head and not _is_expert(name)}
        return tuple(name for name in names if name in found)
    wanted = (targets,) if isinstance(targets, str) else tuple(targets)
    found, missing = set(), []
    for target in wanted:
        hits = {name for name in names if name == target or name.endswith(f".{target}")}
        if not hits and re.search(r"[*+?\\|(\[]", target):
            hits = {name for name in names if re.fullmatch(target, name)}
        found |= hits
        if not hits:
            last = sorted({name.rsplit(".", 1)[-1] for name in names})
            near = difflib.get_close_matches(target.rsplit(".", 1)[-1], last, n=2, cutoff=0.5)
            missing.append(
                f"{target!r}"
                + (f" (did you mean {' or '.join(near)}?)" if near else f" (there are: {', '.join(last)})")
            )
    if missing:
        raise ModelError(
            f"target-not-found: no linear layer of {base.name} matches {', '.join(missing)}",
            "Set lora.targets to names of linear layers, or to all-linear.",
        )
    experts = sorted(name for name in found if _is_expert(name))
    if experts:
        raise ModelError(
            f"lora.targets names {len(experts)} expert layers, {experts[0]} among them",
            "Experts see only some of the tokens, so lanes would mix there: name attention and shared layers only.",
        )
    return tuple(name for name in names if name in found)


def _is_expert(name: str) -> bool:
    return ".experts." in name
