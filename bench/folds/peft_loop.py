"""A plain loop with PEFT and PyTorch: padded batches, the model's own loss, fused AdamW, clipping, a cosine."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from peft import LoraConfig, get_peft_model

from bench.folds.job import ALPHA, BATCH, RANK, TARGETS, Prepared
from bench.folds.machine import device
from bench.folds.peer import Counted, Peer, to_device
from crosstune.splits.splits import Fold

Batch = dict[str, torch.Tensor]


class PeftPeer(Peer):
    """`get_peft_model` a fold; adapters fp32, products in bf16 by autocast."""

    def ready(self, prepared: Prepared, fold: Fold) -> None:
        """Padded batches in pinned memory."""
        self.learning_rate = prepared.job.learning_rate
        self.batches = self._batches(prepared, prepared.order(fold), BATCH, self.train_tokens)
        self.held_out = self._batches(
            prepared, prepared.held_out(fold), self.style.evaluation_batch, self.evaluate_tokens
        )

    def _batches(self, prepared: Prepared, rows: list[int], size: int, counted: Counted) -> list[Batch]:
        found = []
        for start in range(0, len(rows), size):
            chosen = [prepared.row(row) for row in rows[start : start + size]]
            width = max(len(row["input_ids"]) for row in chosen)
            ids = torch.full((len(chosen), width), prepared.tokens.pad_id)
            labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
            for place, row in enumerate(chosen):
                length = len(row["input_ids"])
                ids[place, :length], labels[place, :length] = (
                    torch.tensor(row["input_ids"]),
                    torch.tensor(row["labels"]),
                )
                mask[place, :length] = 1
            batch = {"input_ids": ids, "labels": labels}
            if not mask.all():  # without one, attention takes its causal kernel
                batch["attention_mask"] = mask
            counted.add(ids.numel(), int(mask.sum()))
            cuda = device().type == "cuda"
            found.append({name: tensor.pin_memory() if cuda else tensor for name, tensor in batch.items()})
        return found

    def set_up(self) -> None:
        """Adapter and optimizer."""
        lora = LoraConfig(
            r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", target_modules=list(TARGETS)
        )
        self.adapted = get_peft_model(self.model, lora)
        self.weights = [weight for weight in self.adapted.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=self.learning_rate, weight_decay=0.0, fused=True)
        total = len(self.batches)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total))
        )

    def _bf16(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if device().type == "cuda" else nullcontext()

    def train(self) -> None:
        """One epoch."""
        self.adapted.train()
        for batch in self.batches:
            with self._bf16():
                loss = self.adapted(**to_device(batch, device())).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Token mean."""
        self.adapted.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=device()), 0
        for batch in self.held_out:
            targets = int((batch["labels"][:, 1:] != -100).sum())
            with self._bf16():
                total += self.adapted(**to_device(batch, device())).loss.double() * targets
            count += targets
        return float(total / count)

    def take_off(self) -> None:
        """The adapter."""
        self.model = self.adapted.unload()
        self.model.__dict__.pop("peft_config", None)
        self.adapted = self.optimizer = self.schedule = self.weights = None
