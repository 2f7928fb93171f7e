"""`ModelShape`: what a model's config.json says about its sizes, so that a plan needs neither weights nor torch.

Exact for the decoder families listed in `FAMILIES`. Others have `known = False` where the sizes can be read but the
block is not one of these; they are planned by rehearsal (`crosstune.train.rehearse`) alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """How a decoder block differs from Llama's, and the defaults of transformers' config class."""

    tied: bool = False
    qkv_bias: bool = False
    fused: bool = False  # qkv_proj and gate_up_proj in place of five layers
    head_norms: bool = False  # RMSNorm over each query and key head
    norms: int = 2  # RMSNorms of width `hidden` in a block
    head_dim: int | None = None
    config_bias: bool = True  # obeys attention_bias and mlp_bias in the config


# Defaults read from transformers 5.24's configuration_*.py.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(config_bias=False),
    "granite": Family(),
    "smollm3": Family(tied=True),
    "qwen2": Family(qkv_bias=True, config_bias=False),
    "qwen3": Family(head_norms=True, head_dim=128),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(tied=True, head_dim=256, norms=4),
    "gemma3_text": Family(tied=True, head_dim=256, norms=4, head_norms=True),
    "phi3": Family(fused=True, config_bias=False),
}


FUSED_FAMILIES = ("llama", "mistral", "qwen2")


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer of a decoder block."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    reads: str = (
        "hidden"  # the tensor it reads: layers that read the same one share what is saved for the backward pass
    )

    @property
    def numel(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that decide memory. `linears` are those of one block; all blocks are alike."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    linears: tuple[Linear, ...]
    norms: int = 2
    head_norms: bool = False
    max_tokens: int = 0
    known: bool = True
    fusable: bool = False  # its blocks are replaced by fused ones on CUDA (model/block.py)
    capped: bool = False  # its logits are soft-capped

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the mapping in a transformers config.json. Raises `ModelError` naming the size that is missing."""
        config = _text_part(config)
        family_name = str(config.get("model_type", ""))
        family = FAMILIES.get(family_name)
        rule = family or Family()
        hidden, layers, heads = (
            _size(config, key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        intermediate, vocab = _size(config, "intermediate_size"), _size(config, "vocab_size")
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or rule.head_dim or hidden // heads)
        attention_bias = rule.config_bias and bool(config.get("attention_bias", False))
        mlp_bias = rule.config_bias and bool(config.get("mlp_bias", False))
        widths = (hidden, heads * head_dim, kv_heads * head_dim, intermediate)
        linears = _fused(*widths) if rule.fused else _plain(*widths)
        linears = tuple(replace(linear, bias=_has_bias(linear, rule, attention_bias, mlp_bias)) for linear in linears)
        return cls(
            family_name, hidden, layers, heads, kv_heads, head_dim, intermediate, vocab,
            tied=bool(config.get("tie_word_embeddings", rule.tied)), linears=linears, norms=rule.norms,
            head_norms=rule.head_norms, max_tokens=int(config.get("max_position_embeddings") or 0),
            known=family is not None,
            capped=bool(config.get("final_logit_softcapping")),
            fusable=family_name in FUSED_FAMILIES and str(config.get("hidden_act", "silu")) in ("silu", "swish"),
        )  # fmt: skip

    @classmethod
    def read(cls, folder: str | Path) -> ModelShape:
        """From `config.json` in a model folder (or the file itself)."""
        file = Path(folder)
        file = file / "config.json" if file.is_dir() else file
        try:
            return cls.from_config(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{file} can't be read: {error}", "Give the folder or hub id of a transformers model."
            ) from None

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def block_parameters(self) -> int:
        """Weights of the linear layers of all blocks, without biases: the part that is quantised."""
        return self.layers * sum(linear.numel for linear in self.linears)

    @property
    def small_parameters(self) -> int:
        """Norms and biases."""
        block = self.norms * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        block += sum(linear.outputs for linear in self.linears if linear.bias)
        return self.layers * block + self.hidden

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.head_parameters + self.block_parameters + self.small_parameters

    def targets(self, wanted: str | Sequence[str] = "all-linear") -> tuple[Linear, ...]:
        """The block's linear layers that get an adapter: all of them, or those named (as PEFT does: by suffix)."""
        if wanted == "all-linear":
            return self.linears
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        chosen = tuple(linear for linear in self.linears if any(_matches(linear.name, name) for name in names))
        if not chosen:
            raise ModelError(
                f"lora.targets {names} match none of the linear layers of {self.family or 'the model'}",
                f"Choose from {', '.join(linear.name for linear in self.linears)}, or write all-linear.",
            )
        return chosen

    def lane_parameters(self, targets: Sequence[Linear], rank: int) -> int:
        """Numbers in one lane's adapter: rank x (inputs + outputs) for each target of each block."""
        return self.layers * rank * sum(linear.inputs + linear.outputs for linear in targets)


def _matches(name: str, wanted: str) -> bool:
    return wanted.rsplit(".", 1)[-1] == name


def _plain(hidden: int, queries: int, keys: int, intermediate: int) -> tuple[Linear, ...]:
    return (
        Linear("q_proj", hidden, queries), Linear("k_proj", hidden, keys), Linear("v_proj", hidden, keys),
        Linear("o_proj", queries, hidden, reads="attention"),
        Linear("gate_proj", hidden, intermediate, reads="normed"),
        Linear("up_proj", hidden, intermediate, reads="normed"),
        Linear("down_proj", intermediate, hidden, reads="product"),
    )  # fmt: skip


def _fused(hidden: int, queries: int, keys: int, intermediate: int) -> tuple[Linear, ...]:
    return (
        Linear("qkv_proj", hidden, queries + 2 * keys),
        Linear("o_proj", queries, hidden, reads="attention"),
        Linear("gate_up_proj", hidden, 2 * intermediate, reads="normed"),
        Linear("down_proj", intermediate, hidden, reads="product"),
    )


def _has_bias(linear: Linear, rule: Family, attention_bias: bool, mlp_bias: bool) -> bool:
    if linear.name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
        return rule.qkv_bias or attention_bias
    return attention_bias if linear.name == "o_proj" else mlp_bias


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Multimodal configs keep the language model's sizes under text_config."""
    inner = config.get("text_config")
    return inner if "hidden_size" not in config and isinstance(inner, Mapping) else config


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"the model's config.json has {key}: {value!r}, where a whole number above 0 is needed",
            "Is it a decoder language model? Check the model folder, or name another model.",
        )
    return value
