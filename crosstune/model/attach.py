"""lora.py put into base.py: where each lane's numbers lie, and lane k's tensors under PEFT's names.

All adapters of a wave are one flat fp32 tensor (shards.py; one a device where the base is spread over several); every
layer's A and B are views into it, and so are their gradients. So clipping, AdamW, the finite check and a checkpoint are
operations on rows of one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crosstune.errors import ModelError
from crosstune.model.base import Base
from crosstune.model.block import FUSED_ON, FusedBlock, kind_of
from crosstune.model.bundle import Bundle, BundledLinear
from crosstune.model.device import pinned_memory
from crosstune.model.frozen_int8 import keep_inputs_again, keep_no_inputs
from crosstune.model.fuse import fuse, swap
from crosstune.model.initial import draw_into, drawers
from crosstune.model.lanes import ALIGNED, Lanes, groups_products
from crosstune.model.lora import Adapters, LaneLinear, Pass
from crosstune.model.shards import Shard, Site, lay_out, put, whole
from crosstune.model.targets import linear_sizes
from crosstune.recipe.sections import Lora

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


class Slots:
    """The K places of a wave: flat tensors, the adapted layers, and what is shared while a pass runs.

    `master_KP`, `grad_KP`, `copy_KP` and `now` are those of the only shard; a spread base has one a device.
    """

    def __init__(self, base: Base, specs: Sequence[LaneSpec], among: Sequence[LaneSpec] = ()) -> None:
        """`among`: the lanes of the whole wave where these are a part of one: they decide on the layout."""
        self.base, self.specs = base, list(specs)
        self.num_lanes = len(specs)
        self.rank = max(spec.lora.rank for spec in among or specs)
        wanted = {name for spec in among or specs for name in spec.targets}
        sizes = [(name, size) for name, size in linear_sizes(base).items() if name in wanted]
        self.sites, self.spans = lay_out(sizes, self.rank, base.place_of)
        self.size = sum(span.stop - span.start for span in self.spans)
        scales = [spec.scale for spec in specs]
        self.shards = [
            Shard(base, device, scales, max((span.stop for span in self.spans if span.place == place), default=0))
            for place, device in enumerate(base.devices)
        ]
        self._replaced: list[tuple[nn.Module, str, nn.Module]] = []
        self._checkpointed: list[nn.Module] = []
        self._int8: list[nn.Module] = []
        self.reset(dict(enumerate(specs)))

    @property
    def _only(self) -> Shard:
        assert len(self.shards) == 1, "the base is spread over devices: there is no one tensor of all adapters"
        return self.shards[0]

    @property
    def master_KP(self) -> Tensor:
        """All adapters, fp32."""
        return self._only.master_KP

    @property
    def grad_KP(self) -> Tensor:
        """Their gradients, fp32."""
        return self._only.grad_KP

    @property
    def copy_KP(self) -> Tensor:
        """All adapters in the compute type."""
        return self._only.copy_KP

    @property
    def now(self) -> Pass:
        """What the adapted layers share while a pass runs."""
        return self._only.now

    def views(self, flat_KP: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """A (K, R, I) and B (K, O, R) of one layer, as views of a flat tensor of its shard."""
        end = site.a_start + self.rank * site.in_features
        a = flat_KP[:, site.a_start : end].view(len(flat_KP), self.rank, site.in_features)
        end = site.b_start + self.rank * site.out_features
        return a, flat_KP[:, site.b_start : end].view(len(flat_KP), site.out_features, self.rank)

    def put_in(self, checkpointed_layers: int) -> None:
        """Replace the target layers by LaneLinear, and let the first layers recompute their activations."""
        modules = dict(self.base.model.named_modules())
        for site in self.sites:
            shard = self.shards[site.place]
            a, b = (nn.Parameter(view) for view in self.views(shard.master_KP, site))
            adapters = Adapters(a, b, self.views(shard.copy_KP, site), self.views(shard.grad_KP, site))
            layer = LaneLinear(modules[site.name], site.name, shard.now, adapters)
            bundle = Bundle.of([layer], shard.now, self.base.dtype)
            layer.alone = None if bundle is None else partial(BundledLinear.apply, bundle, bundle.leaf)
            self._replace(site.name, layer)
        self._int8 = keep_no_inputs(self.base.model)
        if FUSED_ON[kind_of(self.base.device, self.base.dtype)]:
            fuse(self.base, lambda name: self.shards[self.base.place_of(name)].now, self._replace)
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

    def keep_weights(self, keep: bool) -> None:
        """Keep 16-bit copies of the 4-bit weights of fused blocks, or give them back."""
        for block in self.base.decoder_layers:
            if isinstance(block, FusedBlock):
                for bundle in block.parts.bundles:
                    bundle.keep_weights(keep)

    def is_recordable(self, *, flat: bool) -> bool:
        """Passes can be recorded as CUDA graphs: nothing in them asks the device for a value (int8 does).

        Flat ones only where the device, not the host, is told whose tokens are whose.
        """
        whole = self.base.fused is not None and self.base.spread is None
        told = not flat or groups_products(self.base.device, self.base.dtype)
        return self.base.device.type == "cuda" and whole and not self._int8 and told

    @property
    def takes_flat(self) -> bool:
        """Passes may lie flat, without padding (lanes.py): every adapted layer is a bundle's, ranks are aligned."""
        aligned = not groups_products(self.base.device, self.base.dtype) or self.rank % ALIGNED == 0
        return self.base.takes_flat and aligned and not isinstance(self.base.head, LaneLinear)

    def _replace(self, name: str, module: nn.Module) -> None:
        self._replaced.append(swap(self.base, name, module))
        if self.base.spread is not None:
            self.base.spread.follow(name, module)

    def take_out(self) -> None:
        """Leave the base exactly as it was."""
        layer: Any
        for parent, leaf, module in self._replaced:
            layer = parent.get_submodule(leaf)
            layer.alone = None  # it and its bundle hold one another: memory would wait for Python's cycle collector
            setattr(parent, leaf, module)
        self.base.fused = None
        keep_inputs_again(self._int8)
        self.recompute_first(0)
        self._replaced, self._int8 = [], []

    def reset(self, specs: Mapping[int, LaneSpec]) -> None:
        """Give slots to lanes: exactly zero but for A's initial values, whatever ran there before."""
        for k, spec in specs.items():
            self.specs[k] = spec
            for shard in self.shards:
                shard.clear(k)
                shard.now.scale_K[k] = spec.scale
        wanted = {k: set(spec.targets) for k, spec in specs.items()}

        def draw(site: Site) -> None:
            for k, spec in specs.items():
                if site.name in wanted[k]:
                    row_P, size = self.shards[site.place].master_KP[k], spec.lora.rank * site.in_features
                    draw_into(row_P[site.a_start : site.a_start + size], spec.seed, site)

        with drawers(self.base.devices) as pool:  # 21 million numbers for a lane of an 8B model: 0.15 s in one thread
            for _ in pool.map(draw, self.sites):
                pass
        self.refresh()

    def clear(self, k: int) -> None:
        """Empty slot k: the bare base answers there."""
        for shard in self.shards:
            shard.clear(k)
        self.refresh()

    def refresh(self) -> None:
        """Bring the compute copies up to date with the masters."""
        for shard in self.shards:
            shard.refresh()

    def zero_gradients(self) -> None:
        """Before a step."""
        for shard in self.shards:
            shard.grad_KP.zero_()

    def begin_pass(self, key_KS: Tensor | None, lanes: Lanes | None = None) -> None:
        """Say which tokens come next; `key_KS` (int32) is needed if any lane has dropout.

        `lanes`: whose the tokens are, if not the lanes' in equal blocks (where `takes_flat`).
        """
        rates = [spec.lora.dropout for spec in self.specs]
        for shard in self.shards:
            shard.begin_pass(key_KS, rates, lanes)

    def row(self, k: int) -> Tensor:
        """A copy of lane k's whole row: on its device, or on the CPU where there are several."""
        rows = [shard.master_KP[k] for shard in self.shards]
        return rows[0].clone() if len(rows) == 1 else whole(rows, self.spans)

    def put_row(self, k: int, row_P: Tensor) -> None:
        """Put lane k's whole row back."""
        put(row_P, [shard.master_KP[k] for shard in self.shards], self.spans)

    def adapter(self, k: int) -> dict[str, Tensor]:
        """Lane k's tensors under PEFT's names, on the CPU: `….lora_A.weight` (rank, in), `…B…` (out, rank)."""
        rank, wanted, tensors = self.specs[k].lora.rank, set(self.specs[k].targets), {}
        # Cut by NumPy: each of torch's views gives Python's lock away, up to 5 ms where another thread wants it. And as
        # each tensor is a storage of its own then, safetensors needn't look by more views whether two overlap.
        rows = [_fetch(shard.master_KP[k]).numpy() for shard in self.shards]  # one transfer each
        for site in self.sites:
            if site.name in wanted:
                a_P, b_P = rows[site.place][site.a_start :], rows[site.place][site.b_start :]
                a_RI = a_P[: rank * site.in_features].reshape(rank, -1)
                b_OR = b_P[: self.rank * site.out_features].reshape(-1, self.rank)[:, :rank]
                tensors[f"{PEFT_PREFIX}{site.name}.lora_A.weight"] = torch.from_numpy(a_RI)
                tensors[f"{PEFT_PREFIX}{site.name}.lora_B.weight"] = torch.from_numpy(np.ascontiguousarray(b_OR))
        return tensors

    def adapter_later(self, k: int) -> Callable[[], dict[str, Tensor]]:
        """`adapter(k)` as it is now, to be fetched by another thread while the device goes on with other work.

        Lane k's row must stay as it is until then.
        """
        if self.base.device.type != "cuda" or len(self.shards) > 1:
            tensors = self.adapter(k)
            return lambda: tensors
        now, device = torch.cuda.Event(), self.base.device
        now.record()

        def fetch() -> dict[str, Tensor]:
            with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
                stream.wait_event(now)
                return self.adapter(k)

        return fetch

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
                a_KRI, b_KOR = self.views(self.shards[site.place].master_KP, site)
                a_KRI[k, :rank] = tensors[name].to(a_KRI)
                b_KOR[k, :, :rank] = tensors[f"{PEFT_PREFIX}{site.name}.lora_B.weight"].to(b_KOR)
        self.refresh()


@contextmanager
def attached(
    base: Base, specs: Sequence[LaneSpec], *, checkpointed_layers: int = 0, among: Sequence[LaneSpec] = ()
) -> Iterator[Slots]:
    """Slots for these lanes, in the base while the block runs; afterwards the base is as it was."""
    with torch.no_grad():
        slots = Slots(base, specs, among)
    try:
        slots.put_in(checkpointed_layers)
        yield slots
    finally:
        slots.take_out()


def _fetch(row_P: Tensor) -> Tensor:
    """A copy on the CPU, through pinned memory from a GPU: other work's launches don't wait for the transfer."""
    row_P = row_P.detach()
    if row_P.device.type != "cuda":
        return row_P.to("cpu", copy=True)
    fetched_P = pinned_memory(row_P.shape)
    fetched_P.copy_(row_P, non_blocking=True)
    torch.cuda.current_stream(row_P.device).synchronize()
    return fetched_P
