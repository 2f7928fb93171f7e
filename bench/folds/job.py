"""What every contestant trains: the same token ids, folds, order of rows and initial adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.shapes import SHAPES, text_rows, tokenizer
from crosstune.data.batches import lane_seed, unit_order
from crosstune.data.tokens import Tokens
from crosstune.inputs import judge, read_asked_rows
from crosstune.model.attach import PEFT_PREFIX
from crosstune.model.initial import initial_a
from crosstune.model.shards import Site
from crosstune.progress import Quiet
from crosstune.recipe.asked import gather
from crosstune.splits.splits import Fold, split_rows

RANK, ALPHA, BATCH = 16, 32, 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTHS = Path(__file__).parent / "lengths.json"


@dataclass(frozen=True)
class Job:
    """One cross-validation: `tokens` of every row, or 0 for the mixed lengths of lengths.json."""

    tokens: int
    rows: int = 50
    folds: int = 5
    learning_rate: float = 1e-4

    @property
    def name(self) -> str:
        """For lines and tables."""
        return str(self.tokens) if self.tokens else "mixed"

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        if self.tokens:
            return [self.tokens] * self.rows
        found: list[int] = json.loads(LENGTHS.read_text())["tokens"]
        return [found[i % len(found)] for i in range(self.rows)]

    def settings(self) -> dict[str, Any]:
        """Keywords of `crosstune.cross_validate`."""
        return {
            "data": list(_texts(tuple(self.lengths()))),
            "folds": {"kind": "kfold", "k": self.folds, "duplicates": "ignore"},
            "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0},
            "train": {"epochs": 1, "batch_size": BATCH, "learning_rate": self.learning_rate, "warmup": 0},
        }  # fmt: skip

    def flops(self, shape: str, vocab: int) -> int:
        """4 a training token and base parameter (no weight gradients), 2 a held-out token."""
        each, train = sum(self.lengths()), (self.folds - 1) * sum(self.lengths())
        return base_parameters(shape, vocab) * (4 * train + 2 * each)


@cache
def _texts(lengths: tuple[int, ...]) -> list[dict[str, str]]:
    if len(set(lengths)) == 1:
        return text_rows(len(lengths), lengths[0])
    return [text_rows(1, length, seed=i)[0] for i, length in enumerate(lengths)]


@dataclass(frozen=True)
class Prepared:
    """A job as token ids: folds, and each fold's training rows in the order in which its lane takes them."""

    job: Job
    tokens: Tokens
    folds: list[Fold]

    def order(self, fold: Fold) -> list[int]:
        """Training rows, as lane `fold` draws them."""
        return [fold.train[i] for i in unit_order(lane_seed(0, fold.index), 0, len(fold.train))]

    def held_out(self, fold: Fold) -> list[int]:
        """Held-out rows, longest first: batches of like lengths."""
        return sorted(fold.held_out, key=lambda row: -int(self.tokens.lengths[row]))

    def row(self, row: int) -> dict[str, list[int]]:
        """Ids and labels, -100 where nothing is learnt."""
        ids, learn = self.tokens.row(row)
        return {
            "input_ids": ids.tolist(),
            "labels": [int(i) if known else -100 for i, known in zip(ids, learn, strict=True)],
        }

    def steps(self, fold: Fold) -> int:
        """Optimizer steps of one epoch."""
        return math.ceil(len(fold.train) / BATCH)

    def digest(self) -> str:
        """Of ids, targets, folds and order: the same for contestants that were given the same."""
        import hashlib

        orders = [[self.order(fold), sorted(fold.held_out)] for fold in self.folds]
        return hashlib.sha256(
            self.tokens.ids.tobytes() + self.tokens.learn.tobytes() + json.dumps(orders).encode()
        ).hexdigest()[:16]


def prepare(job: Job, model: Any) -> Prepared:
    """Rows judged, encoded and split by crosstune's own code, as `cross_validate` does it."""
    given = job.settings()
    asked = gather(
        None, data=given["data"], model=model, tokenizer=tokenizer(), lora=given["lora"], folds=given["folds"],
        sections={"train": given["train"]},
    )  # fmt: skip
    inputs = judge(asked, read_asked_rows(asked, Quiet()), Quiet())
    return Prepared(job, inputs.tokens, split_rows(inputs.rows, asked.recipe.folds))


@torch.no_grad()
def set_adapter(model: nn.Module, fold: int) -> None:
    """The initial adapter of a fold's lane, into a PEFT model: A as crosstune draws it, B zero."""
    seed = lane_seed(0, fold)
    for name, weight in model.named_parameters():
        site, lora, _ = name.removeprefix(PEFT_PREFIX).partition(".lora_")
        if lora and ".lora_A." in name:
            weight.copy_(initial_a(seed, Site(site, weight.shape[1], 0, 0, 0), RANK))
        elif lora:
            weight.zero_()


def base_parameters(shape: str, vocab: int) -> int:
    """Parameters that take part in products: linear layers and the head."""
    return sum(inputs * outputs for inputs, outputs in _linears(shape, vocab))


def _linears(shape: str, vocab: int) -> Iterator[tuple[int, int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], vocab_size=vocab))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield module.in_features, module.out_features
