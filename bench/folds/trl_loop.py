"""TRL's SFTTrainer, a new one for each fold."""

from __future__ import annotations

import logging
import tempfile
import warnings
from typing import Any, ClassVar

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTConfig, SFTTrainer

from bench.folds.job import ALPHA, BATCH, RANK, TARGETS, Prepared
from bench.folds.machine import device
from bench.folds.peer import Counted, Peer
from bench.shapes import tokenizer
from crosstune.splits.splits import Fold

warnings.filterwarnings("ignore")
logging.getLogger("accelerate").setLevel(logging.ERROR)
disable_progress_bars()


class TimedTrainer(SFTTrainer):
    """SFTTrainer on rows in the order that is given, which notes how many tokens each evaluated loss is a mean of."""

    grouped_lengths: list[int] | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self.grouped_lengths is None:
            return SequentialSampler(self.train_dataset)
        draw = torch.Generator().manual_seed(0)
        return LengthGroupedSampler(BATCH, lengths=self.grouped_lengths, generator=draw)

    def evaluate(self, *args: Any, **words: Any) -> dict[str, float]:
        self.scored: list[tuple[torch.Tensor, torch.Tensor]] = []
        return super().evaluate(*args, **words)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **words: Any) -> Any:
        count = (inputs["labels"][:, 1:] != -100).sum()  # the first token of a row is predicted from nothing
        found = super().prediction_step(model, inputs, *args, **words)
        self.scored.append((found[0].detach(), count))
        return found


class TrlPeer(Peer):
    """One SFTTrainer a fold; adapters by its own `peft_config`."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids", "labels")

    def ready(self, prepared: Prepared, fold: Fold) -> None:
        """Datasets of ids and labels."""
        self.learning_rate, self.tokenizer = prepared.job.learning_rate, tokenizer()
        order, held = prepared.order(fold), prepared.held_out(fold)
        self.longest = int(prepared.tokens.lengths.max())
        self.lengths = [int(prepared.tokens.lengths[row]) for row in order]
        self.train_set, self.held_out = (
            Dataset.from_list([{name: prepared.row(row)[name] for name in self.columns} for row in rows])
            for rows in (order, held)
        )

    def set_up(self) -> None:
        """The trainer puts the adapter on."""
        self.trainer = TimedTrainer(
            model=self.model, args=self.config(), train_dataset=self.train_set, eval_dataset=self.held_out,
            processing_class=self.tokenizer, peft_config=lora_config(),
        )  # fmt: skip
        self.look_on()

    def look_on(self) -> None:
        """Take the order and count the tokens; `adapted` is the trainer's model."""
        if self.style.grouped:
            self.trainer.grouped_lengths = self.lengths
        self.trainer.remove_callback(PrinterCallback)
        collate = self.trainer.data_collator

        def counting(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            batch = collate(rows)
            seen: Counted = self.train_tokens if self.trainer.model.training else self.evaluate_tokens
            seen.add(batch["input_ids"].numel(), sum(len(row["input_ids"]) for row in rows))
            return batch

        self.trainer.data_collator = counting
        self.adapted = self.trainer.model

    def config(self) -> SFTConfig:
        """Everything off that isn't training."""
        style, cuda = self.style, device().type == "cuda"
        words: dict[str, Any] = {"use_liger_kernel": True} if style.liger else {}
        return SFTConfig(
            output_dir=tempfile.gettempdir(), per_device_train_batch_size=style.micro_batch,
            gradient_accumulation_steps=style.accumulation, per_device_eval_batch_size=style.evaluation_batch,
            gradient_checkpointing=style.checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
            num_train_epochs=1, learning_rate=self.learning_rate, lr_scheduler_type="cosine", warmup_steps=0,
            weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=cuda, use_cpu=not cuda,
            padding_free=style.padding_free, packing=False, logging_strategy="no", save_strategy="no",
            eval_strategy="no", report_to="none", disable_tqdm=True, dataloader_num_workers=0, seed=0, **words,
            **self.lengths_and_data(),
        )  # fmt: skip

    def lengths_and_data(self) -> dict[str, Any]:
        """Rows are ready: nothing to cut, nothing to prepare."""
        return {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}

    def train(self) -> None:
        """One epoch."""
        self.trainer.train()

    def evaluate(self) -> float:
        """Its evaluate(), and the token mean of what that computed."""
        self.trainer.evaluate()
        losses, counts = (torch.stack(each).double().cpu() for each in zip(*self.trainer.scored, strict=True))
        return float((losses * counts).sum() / counts.sum())

    def take_off(self) -> None:
        """The adapter, and what the trainer left on the base."""
        trainer = self.trainer
        trainer.optimizer = trainer.lr_scheduler = None
        base = trainer.model.unload()
        base.disable_input_require_grads()
        base.gradient_checkpointing_disable()
        # TRL's fused head wraps forward anew each time, and PEFT leaves its configuration
        for name in ("forward", "peft_config"):
            base.__dict__.pop(name, None)
        trainer.model = trainer.model_wrapped = self.adapted = self.trainer = None
        self.model = base


def lora_config() -> LoraConfig:
    """The adapter, in PEFT's words."""
    return LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", target_modules=list(TARGETS)
    )
