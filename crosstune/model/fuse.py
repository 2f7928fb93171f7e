"""Fused blocks (block.py) put in the place of a base's own, and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from crosstune.model.base import Base
from crosstune.model.block import FUSED_ON, fused_block, fused_norm, kind_of
from crosstune.model.decoder import FusedDecoder
from crosstune.model.lora import Pass


def fuse(base: Base, now_of: Callable[[str], Pass], replace: Callable[[str, nn.Module], None]) -> None:
    """Have every block, and the norm after them, replaced by fused ones, if all are of kinds that are known.

    `now_of`: what the adapted layers of a block share; `replace`: puts a module in the place of the one of that name.
    """
    names = {module: name for name, module in base.model.named_modules()}
    blocks, ends = base.decoder_layers, list(base.decoder.children())
    fused: list[nn.Module | None] = [fused_block(block, now_of(names[block]), base.dtype) for block in blocks]
    if None in fused:
        return
    for old, new in zip([*blocks, *ends], [*fused, *map(fused_norm, ends)], strict=True):
        if new is not None:
            replace(names[old], new)
    if base.spread is None:
        base.fused = FusedDecoder.of(base.decoder)


def swap(base: Base, name: str, module: nn.Module) -> tuple[nn.Module, str, nn.Module]:
    """Put a module in the place of the one of that name; says what undoes it: setattr(parent, leaf, what was there)."""
    parent_name, _, leaf = name.rpartition(".")
    parent = base.model.get_submodule(parent_name)
    old = parent.get_submodule(leaf)
    setattr(parent, leaf, module)
    return parent, leaf, old


@contextmanager
def fused_without_lanes(base: Base) -> Iterator[None]:
    """The bare base in fused blocks, where those run, for what is asked of it alone."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    now = Pass(torch.zeros(0, device=base.device, dtype=base.dtype))
    if FUSED_ON[kind_of(base.device, base.dtype)] and base.spread is None:
        fuse(base, lambda name: now, lambda name, module: found.append(swap(base, name, module)))
    try:
        yield
    finally:
        base.fused = None
        for parent, leaf, module in found:
            setattr(parent, leaf, module)
