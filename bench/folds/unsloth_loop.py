"""Unsloth's FastLanguageModel with its patched SFTTrainer. It loads from a folder only, so the base is written first.

One adapter is put on once and reset for each fold.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from unsloth import FastLanguageModel

from bench.folds.job import ALPHA, RANK, TARGETS
from bench.folds.trl_loop import TimedTrainer, TrlPeer

WRITE = """
import sys
from pathlib import Path
from bench.folds.machine import write_base
folder, shape, quantization, vocab = sys.argv[1:]
write_base(Path(folder), shape, quantization, int(vocab))
"""


def load_unsloth(folder: Path, shape: str, quantization: str, vocab: int, *, longest: int, checkpointing: bool) -> Any:
    """The base from a folder that another process writes, with an adapter on it."""
    import torch

    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, "-c", WRITE, str(folder), shape, quantization, str(vocab)], check=True)
    base, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=longest, dtype=torch.bfloat16, load_in_4bit=quantization == "nf4",
        local_files_only=True,
    )  # fmt: skip
    found = sum(type(module).__name__ == "Linear4bit" for module in base.modules())
    # Unsloth falls back to 16 bit where it can't use bitsandbytes
    assert quantization != "nf4" or found == len(TARGETS) * base.config.num_hidden_layers, found
    return FastLanguageModel.get_peft_model(
        base, r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", target_modules=list(TARGETS), random_state=0,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip


class UnslothPeer(TrlPeer):
    """As with TRL, but that the adapter stays on and gets each fold's initial values."""

    columns: ClassVar[tuple[str, ...]] = ("input_ids",)  # its own collator makes the labels

    def lengths_and_data(self) -> dict[str, Any]:
        """Its own preparation of rows that are token ids, which wants a length."""
        return {"max_length": self.longest}

    def set_up(self) -> None:
        """A trainer on the adapted model."""
        for weight in self.model.parameters():
            weight.grad = None
        self.trainer = TimedTrainer(
            model=self.model, args=self.config(), train_dataset=self.train_set, eval_dataset=self.held_out,
            processing_class=self.tokenizer,
        )  # fmt: skip
        self.look_on()

    def take_off(self) -> None:
        """The trainer only."""
        self.trainer.optimizer = self.trainer.lr_scheduler = self.trainer.model = self.trainer.model_wrapped = None
        self.adapted = self.trainer = None
