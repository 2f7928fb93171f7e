"""Fold adapters together: their average as one adapter, exactly (of rank sum) or factored again to a lower rank.

The average of K changes of a weight, (1/K) Σ s_k B_k A_k, is one product of the stacked matrices. A lower rank keeps
its largest singular values, and the share that is lost is said. Each row was trained on by all folds but one, so no row
of the run can score the average: only an outer fold can, or rows from elsewhere. Who has such rows passes `score`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from crosstune.errors import ModelError
from crosstune.export.adapter import WEIGHTS, save_adapter
from crosstune.export.changes import LowRank
from crosstune.export.companions import has_tokenizer, load_saved_tokenizer, stop_ids_in
from crosstune.export.folder import refuse_sources
from crosstune.export.saved import (
    SavedAdapter,
    adapter_config,
    model_config,
    read_adapter,
    read_facts,
    recorded_checksums,
)
from crosstune.model.base import hub_arguments
from crosstune.recipe.sections import Lora, Model

Adapter = tuple[Lora, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Score:
    """Loss on rows that none of the adapters has seen: of the average, of the untuned base, of each adapter alone."""

    rows_of: str
    rows: int
    loss: float
    base_loss: float
    alone: tuple[float, ...]

    def words(self) -> str:
        """One line for a person."""
        single = sum(self.alone) / len(self.alone)
        return (
            f"loss {self.loss:.4f} on {self.rows} rows of {self.rows_of} that none of them saw "
            f"(each alone {single:.4f} on average, untuned base {self.base_loss:.4f})"
        )


ScoreOf = Callable[[Sequence[str], Sequence[Adapter]], Score]  # layers; the average, then each adapter


@dataclass(frozen=True)
class Averaged:
    """An average as it was written."""

    folder: Path
    rank: int
    adapters: int
    lost: float  # share of the average's size (Frobenius norm) that the rank leaves out, over all layers; 0.0: exact
    worst: tuple[str, float]  # the layer that lost the largest share
    score: Score | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values: what `crosstune average --json` prints."""
        return {**asdict(self), "folder": str(self.folder)}

    def words(self) -> str:
        """One line for a person."""
        name, share = self.worst
        exact = "exactly" if self.lost < 1e-6 else f"less {self.lost:.2%} of its size (most in {name}: {share:.2%})"
        scored = (
            "no score: each row of the run was trained on by some of them" if self.score is None else self.score.words()
        )
        return f"{self.folder}: the average of {self.adapters} adapters, {exact}, rank {self.rank}\n{scored}"


def average_adapters(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    rank: int | None = None,
    base: str | None = None,
    score: ScoreOf | None = None,
) -> Averaged:
    """Write the average of PEFT adapters of one base to `out`.

    rank  None: the sum of the ranks, exact. Otherwise the best approximation of that rank, by singular values
    base  hub id, folder or .gguf; default: the one that the first adapter names
    score  scores layers and adapters on rows that are new to all of them; None where there are no such rows

    Scores aren't carried over: no row of the run is new to all of these adapters.
    """
    places = [Path(folder).expanduser() for folder in folders]
    if len(places) < 2:
        raise ModelError(
            f"an average needs two adapters or more ({len(places)} given)", "Name the folders of the folds."
        )
    refuse_sources(Path(out), places)
    name = base or adapter_config(places[0]).base_model_name_or_path or ""
    config = model_config(hub_arguments(Model(name=name)))
    adapters = [read_adapter(place, config) for place in places]
    _refuse_unlike(adapters)
    sizes: dict[str, tuple[float, float]] = {}  # layer → (squared norm lost, squared norm)
    tensors: dict[str, Tensor] = {}
    full = sum(adapter.config.r for adapter in adapters)
    kept = full if rank is None else min(rank, full)
    for layer in adapters[0].changes:
        a, b, sizes[layer] = _average([_low_rank(adapter, layer) for adapter in adapters], kept)
        key = f"base_model.model.{layer.removesuffix('.weight')}"
        tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    lora = Lora(rank=kept, alpha=float(kept))  # scale 1: the scales are in the matrices
    layers = [layer.removesuffix(".weight") for layer in adapters[0].changes]
    found = None if score is None else score(layers, [(lora, tensors), *map(_as_trained, adapters)])
    save_adapter(
        out,
        tensors,
        lora,
        target_names=layers,
        base_name=name,
        tokenizer=load_saved_tokenizer(places[0]) if has_tokenizer(places[0]) else None,
        stop_ids=sorted({token for place in places for token in stop_ids_in(place)}),
        card=_card(places, kept, full, sizes, found),
        base_files=recorded_checksums(places[0]),
    )
    return Averaged(Path(out), kept, len(places), _share(sizes.values()), _worst(sizes), found)


def _as_trained(adapter: SavedAdapter) -> Adapter:
    config = adapter.config
    lora = Lora(rank=config.r, alpha=float(config.lora_alpha), rslora=bool(config.use_rslora))
    return lora, load_file(adapter.folder / WEIGHTS)


def _average(parts: Sequence[LowRank], rank: int) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """A (rank, in), B (out, rank), and (squared norm lost, squared norm) of one layer's average. In float64."""
    a_RI = torch.cat([part.a_RI.double() for part in parts])
    b_OR = torch.cat([part.b_OR.double() * part.scale / len(parts) for part in parts], dim=1)
    if rank >= a_RI.shape[0]:
        return a_RI.float(), b_OR.float(), (0.0, float((a_RI @ a_RI.T @ b_OR.T @ b_OR).trace()))
    # B A = Q_b (R_b R_aᵀ) Q_aᵀ: the singular values are those of the small matrix in the middle, ΣR × ΣR
    q_b, r_b = torch.linalg.qr(b_OR)
    q_a, r_a = torch.linalg.qr(a_RI.T)
    u, sizes, v = torch.linalg.svd(r_b @ r_a.T)
    root = sizes[:rank].sqrt()
    a, b = root[:, None] * (v[:rank] @ q_a.T), (q_b @ u[:, :rank]) * root
    missing = rank - len(root)  # a layer narrower than the rank: the rest stays zero
    a, b = torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))
    return a.float(), b.float(), (float((sizes[rank:] ** 2).sum()), float((sizes**2).sum()))


def _share(sizes: Iterable[tuple[float, float]]) -> float:
    pairs = list(sizes)
    whole = sum(size for _, size in pairs)
    return math.sqrt(sum(lost for lost, _ in pairs) / whole) if whole else 0.0


def _worst(sizes: Mapping[str, tuple[float, float]]) -> tuple[str, float]:
    shares = {layer.removesuffix(".weight"): _share([pair]) for layer, pair in sizes.items()}
    layer = max(shares, key=lambda name: shares[name])
    return layer, shares[layer]


def _low_rank(adapter: SavedAdapter, layer: str) -> LowRank:
    change = adapter.changes[layer]
    assert isinstance(change, LowRank)
    return change


def _refuse_unlike(adapters: Sequence[SavedAdapter]) -> None:
    for adapter in adapters:
        for layer, change in adapter.changes.items():
            if not isinstance(change, LowRank) or change.magnitude_O is not None or change.is_transposed:
                raise ModelError(
                    f"{adapter.folder} changes {layer} otherwise than by a low-rank matrix, which has no average here",
                    "Average adapters of plain LoRA on linear layers.",
                )
        if set(adapter.changes) != set(adapters[0].changes):
            odd = sorted(set(adapter.changes) ^ set(adapters[0].changes))
            raise ModelError(
                f"{adapter.folder} and {adapters[0].folder} adapt different layers ({odd[0]})",
                "Average the folds of one trial.",
            )


def _card(
    places: Sequence[Path], kept: int, full: int, sizes: Mapping[str, tuple[float, float]], score: Score | None
) -> dict[str, Any]:
    lost = _share(sizes.values())
    return {
        "title": f"Average of {len(places)} LoRA adapters",
        "adapters": len(places),
        "rank": kept,
        "rank of the exact average": full,
        "share lost by the rank": lost,
        "score": "none: each row of the run was trained on by some of these adapters"
        if score is None
        else score.words(),
        "quantization": read_facts(places[0]).get("quantization", "none"),
    }
