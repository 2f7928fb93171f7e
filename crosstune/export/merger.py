"""Base + adapter → one model, planned without memory and written shard by shard in the base's own dtype.

No more than one shard is in memory. Knows nothing of whether the result is right: verify.py does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from crosstune.errors import ModelError
from crosstune.export.changes import Replaced, Rows
from crosstune.export.saved import SavedAdapter
from crosstune.export.weights import FLOATS, INDEX, STORED, BaseWeights, find_weights, refuse_unmergeable, write_tensors
from crosstune.progress import Progress, stage

MOST_SHARD_BYTES = 5_000_000_000  # transformers' own default for a shard


@dataclass(frozen=True)
class Merger:
    """The merged tensors, none of them in memory: what each is made from, its shape and its dtype."""

    weights: BaseWeights
    adapter: SavedAdapter
    sources: Mapping[str, str]  # merged tensor → the base's tensor
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    is_tied: bool

    @property
    def unties(self) -> bool:
        """Whether input and output embeddings are one matrix in the base and two here."""
        return self.adapter.is_tied and not self.is_tied

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(self.shapes[name]).numel() * dtype.itemsize for name, dtype in self.dtypes.items())

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def num_matrices(self) -> int:
        """Weight matrices, the embedding included: what rounding acts on."""
        return sum(len(shape) == 2 for shape in self.shapes.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the numbers have."""
        sizes: dict[torch.dtype, int] = {}
        for name, dtype in self.dtypes.items():
            sizes[dtype] = sizes.get(dtype, 0) + torch.Size(self.shapes[name]).numel()
        return max(sizes, key=lambda dtype: sizes[dtype])

    def tensor(self, name: str) -> Tensor:
        """The merged tensor: base + change in fp32, rounded once to its dtype."""
        weight = self.weights.read(self.sources[name])
        change = self.adapter.changes.get(_model_name(name, self.adapter))
        if change is None:
            return weight.to(self.dtypes[name])
        merged = change.merged(weight)
        if not bool(torch.isfinite(merged).all()):
            raise ModelError(
                f"{name} is not finite after merging", "The base or the adapter is damaged: fetch it again."
            )
        return merged.to(self.dtypes[name])


def plan_merge(weights: BaseWeights, adapter: SavedAdapter, dtype: torch.dtype | None = None) -> Merger:
    """Which tensors the merged model has. A change to one of two tied embeddings alone unties them."""
    files = {_model_name(name, adapter): name for name in weights.files}
    head, embedding = adapter.output_embedding, adapter.input_embedding
    is_tied = adapter.is_tied and not _unties(adapter)
    sources = dict(files)  # name in the model → tensor of the base
    if adapter.is_tied:
        shared = files.get(embedding) or files[head]  # safetensors keeps one of the two names, and it may be either
        sources.pop(head, None)
        sources[embedding] = shared
        if not is_tied:
            sources[head] = shared
    absent = sorted(set(adapter.changes) - set(sources) - ({head} if is_tied else set()))
    if absent:
        raise ModelError(
            f"the base's files hold no {absent[0]} ({len(absent)} of the changed weights are missing there)",
            "This architecture is stored under other names than the model's; use PEFT's merge_and_unload for it.",
        )
    refuse_unmergeable(weights, [sources[name] for name in adapter.changes if name in sources])
    written = {files.get(name, name): (name, source) for name, source in sources.items()}
    shapes, dtypes = {}, {}
    for out, (name, source) in written.items():
        change = adapter.changes.get(name)
        shapes[out] = weights.shapes[source] if change is None else change.shape(weights.shapes[source])
        stored = STORED[weights.dtypes[source]]
        dtypes[out] = dtype if dtype is not None and weights.dtypes[source] in FLOATS else stored
    return Merger(weights, adapter, {out: source for out, (_, source) in written.items()}, shapes, dtypes, is_tied)


def write_shards(merger: Merger, folder: Path, progress: Progress) -> list[str]:
    """Write the merged tensors into `folder`, one shard after another, with an index if there are several."""
    most = min(MOST_SHARD_BYTES, merger.weights.largest_file_bytes())
    empty = {
        name: torch.empty(shape, dtype=merger.dtypes[name], device="meta") for name, shape in merger.shapes.items()
    }
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=most)
    with stage(progress, "merge", total=len(plan.filename_to_tensors)):
        for file, names in plan.filename_to_tensors.items():
            write_tensors(folder / file, {name: merger.tensor(name) for name in names})
            progress.advance()
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return list(plan.filename_to_tensors)


def wrong_tensors(merger: Merger, folder: Path) -> list[str]:
    """Merged tensors in `folder` that aren't bit for bit what they should be: each is read back and merged again."""
    written = find_weights(str(folder))
    wrong = sorted(set(merger.sources) ^ set(written.files))
    for name in sorted(set(merger.sources) & set(written.files)):
        if not torch.equal(written.read(name), merger.tensor(name)):
            wrong.append(name)
    return wrong


def _unties(adapter: SavedAdapter) -> bool:
    """Whether the two embeddings of a tied base differ after the change, so that one matrix can't serve as both."""
    embedding = adapter.changes.get(adapter.input_embedding)
    head = adapter.changes.get(adapter.output_embedding)
    if isinstance(embedding, Replaced) and isinstance(head, Replaced):
        return not torch.equal(embedding.tensor, head.tensor)
    if head is None and isinstance(embedding, Rows):
        return False  # token rows trained on a tied embedding act on the head too: PEFT ties the two
    if head is None and isinstance(embedding, Replaced):
        return bool(adapter.config.modules_to_save)  # a trained copy acts on the input alone; a resized one is for both
    return embedding is not None or head is not None


def _model_name(name: str, adapter: SavedAdapter) -> str:
    """A tensor's name in the model, where the file leaves the model's prefix out (GPT-2 on the hub)."""
    known = (name, f"{adapter.prefix}.{name}")
    return next((candidate for candidate in known if candidate in adapter.names), name)
