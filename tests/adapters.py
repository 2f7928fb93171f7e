"""Random adapters for a model folder, under PEFT's names, and exported."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from crosstune.export import save_adapter
from crosstune.recipe.sections import Lora

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def target_shapes(base: Path, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Full name of each targeted linear layer → (out, in)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.split(".")[-1] in targets
    }


def target_modules(base: Path, targets: tuple[str, ...]) -> list[str]:
    return list(target_shapes(base, targets))


def random_adapter(
    base: Path, lora: Lora, targets: tuple[str, ...], *, seed: int = 0, spread: float = 0.1
) -> dict[str, torch.Tensor]:
    """A from N(0, 1/in), B from N(0, spread²): as strong as a long training would make it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out, width) in target_shapes(base, targets).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = (
            torch.randn(lora.rank, width, generator=generator) / width**0.5
        )
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, lora.rank, generator=generator) * spread
    return tensors


def export(
    folder: Path, base: Path, lora: Lora, targets: tuple[str, ...] = ("q_proj", "v_proj"), *, tensors=None, **changed
) -> dict[str, torch.Tensor]:
    tensors = tensors or random_adapter(base, lora, targets)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token_id = 364
    options = {
        "target_names": target_modules(base, targets),
        "base_name": str(base),
        "tokenizer": tokenizer,
        "stop_ids": (361, 368),
        "card": {"fold": 3, "rows": 12, "settings": {"rank": lora.rank}, "scores": {"loss": 1.25}},
    }
    save_adapter(folder, tensors, lora, **{**options, **changed})
    return tensors
