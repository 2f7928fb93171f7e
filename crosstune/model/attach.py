"""lora.py put into base.py: which layers, where each lane's numbers lie, and lane k's tensors under PEFT's names.

All adapters of a wave are one flat fp32 tensor (K lanes, P numbers); every layer's A and B are views into it, and so
are their gradients. So clipping, AdamW, the finite check and a checkpoint are operations on rows of one tensor.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crosstune.errors import ModelError
from crosstune.model.base import Base
from crosstune.model.block import FUSED_ON, fused_block, fused_norm
from crosstune.model.bundle import Bundle, BundledLinear
from crosstune.model.frozen_int8 import keep_inputs_again, keep_no_inputs
from crosstune.model.lora import Adapters, Dropout, LaneLinear, Pass
from crosstune.recipe import Lora

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LaneSpec:
    """What a lane's adapter is made of: its settings, the layers it adapts, and the seed of its initial values."""

    lora: Lora
    targets: tuple[str, ...]  # full module names
    seed: int

    @property
    def scale(self) -> float:
        """alpha / rank, or alpha / √rank with rsLoRA."""
        return self.lora.alpha / (math.sqrt(self.lora.rank) if self.lora.rslora else self.lora.rank)


@dataclass(frozen=True)
class Site:
    """One adapted layer: its name, sizes, and where its A and B begin in a lane's row of the flat tensor."""

    name: str
    in_features: int
    out_features: int
    a_start: int
    b_start: int


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
        found = {name for name in names if name != base.head_name and not _is_expert(name)}
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


class Slots:
    """The K places of a wave: flat tensors, the adapted layers, and what is shared while a pass runs.

    `master_KP`, `grad_KP`: fp32. `copy_KP`: the compute type, refreshed once a step (the master itself in fp32).
    """

    def __init__(self, base: Base, specs: Sequence[LaneSpec]) -> None:
        self.base, self.specs = base, list(specs)
        self.num_lanes, device = len(specs), base.device
        self.rank = max(spec.lora.rank for spec in specs)
        self.sites = _lay_out(base, specs, self.rank)
        self.size = sum(self.rank * (site.in_features + site.out_features) for site in self.sites)
        self.master_KP = torch.zeros(self.num_lanes, self.size, device=device)
        self.grad_KP = torch.zeros_like(self.master_KP)
        same = base.dtype == torch.float32
        self.copy_KP = (
            self.master_KP if same else torch.zeros(self.num_lanes, self.size, device=device, dtype=base.dtype)
        )
        self.now = Pass(torch.tensor([spec.scale for spec in specs], device=device, dtype=base.dtype))
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._checkpointed: list[nn.Module] = []
        self._int8: list[nn.Module] = []
        for k, spec in enumerate(specs):
            self.reset(k, spec)

    def views(self, flat_KP: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """A (K, R, I) and B (K, O, R) of one layer, as views."""
        end = site.a_start + self.rank * site.in_features
        a = flat_KP[:, site.a_start : end].view(self.num_lanes, self.rank, site.in_features)
        end = site.b_start + self.rank * site.out_features
        return a, flat_KP[:, site.b_start : end].view(self.num_lanes, site.out_features, self.rank)

    def put_in(self, checkpointed_layers: int) -> None:
        """Replace the target layers by LaneLinear, and let the first layers recompute their activations."""
        modules = dict(self.base.model.named_modules())
        for site in self.sites:
            a, b = (nn.Parameter(view) for view in self.views(self.master_KP, site))
            adapters = Adapters(a, b, self.views(self.copy_KP, site), self.views(self.grad_KP, site))
            layer = LaneLinear(modules[site.name], site.name, self.now, adapters)
            bundle = Bundle.of([layer], self.now, self.base.dtype)
            layer.alone = None if bundle is None else partial(BundledLinear.apply, bundle, bundle.leaf)
            self._replace(site.name, layer)
        self._int8 = keep_no_inputs(self.base.model)
        if FUSED_ON[self.base.device.type]:
            self._fuse()
        self.recompute_first(checkpointed_layers)

    def recompute_first(self, count: int) -> None:
        """Let the first `count` blocks make their activations again in the backward pass; no others."""
        block: Any  # transformers sets these attributes on its own blocks too
        for block in self._checkpointed:
            block.gradient_checkpointing, block.training = False, False
            del block._gradient_checkpointing_func
        self._checkpointed = []
        for block in self.base.decoder_layers[:count]:
            # transformers' own layers (modeling_layers.GradientCheckpointingLayer) check these three; the layer alone
            # is put into training mode, not its children, so the base's own dropouts stay off.
            block.gradient_checkpointing, block.training = True, True
            block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            self._checkpointed.append(block)

    def _fuse(self) -> None:
        """Put fused nodes in the place of blocks that are known, and of the norm after them."""
        names = {module: name for name, module in self.base.model.named_modules()}
        blocks, dtype = self.base.decoder_layers, self.base.dtype
        fused: list[nn.Module | None] = [fused_block(block, self.now, dtype) for block in blocks]
        if None in fused:
            return
        ends = list(self.base.decoder.children())
        for old, new in zip([*blocks, *ends], [*fused, *map(fused_norm, ends)], strict=True):
            if new is not None:
                self._replace(names[old], new)

    def _replace(self, name: str, module: nn.Module) -> None:
        parent_name, _, leaf = name.rpartition(".")
        parent = self.base.model.get_submodule(parent_name)
        self._replaced.append((parent, leaf, getattr(parent, leaf)))
        setattr(parent, leaf, module)

    def take_out(self) -> None:
        """Leave the base exactly as it was."""
        layer: Any
        for parent, leaf, module in self._replaced:
            layer = parent.get_submodule(leaf)
            layer.alone = None  # it and its bundle hold one another: memory would wait for Python's cycle collector
            setattr(parent, leaf, module)
        keep_inputs_again(self._int8)
        self.recompute_first(0)
        self._replaced, self._int8 = [], []

    def reset(self, k: int, spec: LaneSpec) -> None:
        """Give slot k to a lane: exactly zero but for A's initial values, whatever ran there before."""
        self.specs[k] = spec
        self.master_KP[k].zero_()
        self.grad_KP[k].zero_()
        wanted = set(spec.targets)
        for site in self.sites:
            if site.name in wanted:
                a_KRI, _ = self.views(self.master_KP, site)
                a_KRI[k, : spec.lora.rank] = _initial_a(spec, site).to(a_KRI.device)
        self.now.scale_K[k] = spec.scale
        self.refresh()

    def clear(self, k: int) -> None:
        """Empty slot k: the bare base answers there."""
        self.master_KP[k].zero_()
        self.grad_KP[k].zero_()
        self.refresh()

    def refresh(self) -> None:
        """Bring the compute copies up to date with the masters."""
        if self.copy_KP is not self.master_KP:
            self.copy_KP.copy_(self.master_KP)

    def begin_pass(self, key_KS: Tensor | None) -> None:
        """Say which tokens come next; `key_KS` (int32) is needed if any lane has dropout."""
        rates = [spec.lora.dropout for spec in self.specs]
        self.now.dropout = None
        if key_KS is not None and any(rates):
            device = self.base.device
            scale_K = torch.tensor([1 / (1 - rate) for rate in rates], device=device, dtype=self.base.dtype)
            self.now.dropout = Dropout(key_KS, Dropout.thresholds(rates, device), scale_K)

    def adapter(self, k: int, flat_KP: Tensor | None = None) -> dict[str, Tensor]:
        """Lane k's tensors under PEFT's names, on the CPU: `….lora_A.weight` (rank, in), `…B…` (out, rank)."""
        flat_KP = self.master_KP if flat_KP is None else flat_KP
        rank, wanted, tensors = self.specs[k].lora.rank, set(self.specs[k].targets), {}
        for site in self.sites:
            if site.name in wanted:
                a_KRI, b_KOR = self.views(flat_KP, site)
                tensors[f"{PEFT_PREFIX}{site.name}.lora_A.weight"] = a_KRI[k, :rank].detach().cpu().clone()
                tensors[f"{PEFT_PREFIX}{site.name}.lora_B.weight"] = b_KOR[k, :, :rank].detach().cpu().clone()
        return tensors

    def load(self, k: int, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors under PEFT's names into slot k. Raises ModelError naming missing and unexpected keys."""
        rank, expected = self.specs[k].lora.rank, set(self.adapter(k))
        missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        if missing or extra:
            raise ModelError(
                f"adapter-keys: missing {missing or 'none'}, unexpected {extra or 'none'}",
                "Use an adapter that was made for these target layers.",
            )
        for site in self.sites:
            name = f"{PEFT_PREFIX}{site.name}.lora_A.weight"
            if name in tensors:
                a_KRI, b_KOR = self.views(self.master_KP, site)
                a_KRI[k, :rank] = tensors[name].to(a_KRI)
                b_KOR[k, :, :rank] = tensors[f"{PEFT_PREFIX}{site.name}.lora_B.weight"].to(b_KOR)
        self.refresh()


@contextmanager
def attached(base: Base, specs: Sequence[LaneSpec], *, checkpointed_layers: int = 0) -> Iterator[Slots]:
    """Slots for these lanes, in the base while the block runs; afterwards the base is as it was."""
    with torch.no_grad():
        slots = Slots(base, specs)
    slots.put_in(checkpointed_layers)
    try:
        yield slots
    finally:
        slots.take_out()


def _lay_out(base: Base, specs: Sequence[LaneSpec], rank: int) -> list[Site]:
    """Sites in the model's order. The A of layers under one parent lie together, so that those which read one tensor
    (query, key, value) can be read as one matrix."""
    wanted = {name for spec in specs for name in spec.targets}
    sizes = [(name, size) for name, size in linear_sizes(base).items() if name in wanted]
    sites, start = [], 0
    for _, group in groupby(sizes, key=lambda named: named[0].rpartition(".")[0]):
        members = list(group)
        b_start = start + rank * sum(inputs for _, (inputs, _) in members)
        for name, (inputs, outputs) in members:
            sites.append(Site(name, inputs, outputs, start, b_start))
            start, b_start = start + rank * inputs, b_start + rank * outputs
        start = b_start
    return sites


def _initial_a(spec: LaneSpec, site: Site) -> Tensor:
    """A's initial values as PEFT draws them (kaiming_uniform_, a=√5: uniform in ±1/√in), from seed and name."""
    digest = hashlib.blake2b(f"{spec.seed}/{site.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    bound = 1 / math.sqrt(site.in_features)
    return torch.empty(spec.lora.rank, site.in_features).uniform_(-bound, bound, generator=generator)


def peft_config(spec: LaneSpec) -> dict[str, Any]:
    """The lane as keyword arguments of `peft.LoraConfig`."""
    return {
        "r": spec.lora.rank, "lora_alpha": spec.lora.alpha, "lora_dropout": spec.lora.dropout,
        "target_modules": list(spec.targets), "use_rslora": spec.lora.rslora, "task_type": "CAUSAL_LM", "bias": "none",
    }  # fmt: skip
