"""Llama-3 shapes with random weights, made and quantised on the GPU layer by layer: never whole in 16 bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

SHAPES: dict[str, dict[str, Any]] = {
    # meta-llama/Llama-3.2-1B and Meta-Llama-3-8B, config.json
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "tie_word_embeddings": False},
}  # fmt: skip
TOKENIZER = Path(__file__).parent.parent / "tests" / "cases" / "tokenizer.json"


def random_model(shape: str, quantization: str, device: torch.device, *, vocab: int = 128256, seed: int = 0) -> Any:
    """A transformers Llama of this shape, frozen, bf16 on a GPU and fp32 on a CPU, quantised as asked."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=vocab,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        bos_token_id=360,
        eos_token_id=368,
    )
    config._attn_implementation = "sdpa"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    fill(model, quantization, device, seed=seed).generation_config = GenerationConfig(
        bos_token_id=360, eos_token_id=368
    )
    return model.eval().requires_grad_(False)


def fill(model: Any, quantization: str, device: torch.device, *, seed: int = 0) -> Any:
    """Give a model on meta random weights on the device, quantised as asked. Biases are zero."""
    draw, head, dtype = torch.Generator(device).manual_seed(seed), model.get_output_embeddings(), model.dtype
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        home = model.get_submodule(parent)
        if isinstance(module, nn.Linear) and module is not head:
            setattr(home, leaf, _linear(module, quantization, dtype, device, draw))
        elif isinstance(module, nn.Linear | nn.Embedding):
            if not (module is head and model.config.tie_word_embeddings):
                module.weight = nn.Parameter(_normal(module.weight.shape, dtype, device, draw), requires_grad=False)
        elif name.endswith("norm"):
            ones = torch.ones(module.weight.shape, dtype=dtype, device=device)
            module.weight = nn.Parameter(ones, requires_grad=False)
        elif name.endswith("rotary_emb"):
            setattr(home, leaf, type(module)(model.config).to(device))
    model.tie_weights()
    return model


def _normal(shape: torch.Size, dtype: torch.dtype, device: torch.device, draw: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=draw)


def _linear(
    module: nn.Linear, quantization: str, dtype: torch.dtype, device: torch.device, draw: torch.Generator
) -> nn.Module:
    made = _quantized(module, quantization, dtype, device, draw)
    if module.bias is not None:
        made.bias = nn.Parameter(torch.zeros(module.bias.shape, dtype=dtype, device=device), requires_grad=False)
    return made


def _quantized(
    module: nn.Linear, quantization: str, dtype: torch.dtype, device: torch.device, draw: torch.Generator
) -> nn.Module:
    weight = _normal(module.weight.shape, dtype, device, draw)
    if quantization == "none":
        module.weight = nn.Parameter(weight, requires_grad=False)
        return module
    import bitsandbytes as bnb

    sizes = (module.in_features, module.out_features)
    if quantization == "int8":
        eight = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
        eight.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False).to(device)
        return eight
    four = bnb.nn.Linear4bit(
        *sizes, bias=False, compute_dtype=dtype, compress_statistics=True, quant_type="nf4", device="meta"
    )
    four.weight = bnb.nn.Params4bit(
        weight.cpu() if device.type == "cpu" else weight,
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=True,
    )
    four.weight = four.weight._quantize(device) if device.type == "cuda" else four.weight.to(device)
    four.compute_type_is_set = True
    return four


def tokenizer() -> Any:
    """The tests' Llama-3-like tokenizer: 369 entries, enough for random models."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
        pad_token="<|finetune_right_pad_id|>", model_max_length=8192, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def text_rows(count: int, tokens: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Text rows of exactly `tokens` tokens with BOS and end: ' salt'-like words drawn from the vocabulary."""
    import random

    words, draw = [" salt", " tin", " zinc", " lamp", " jar", " tree", " stone", " grey"], random.Random(seed)
    tok = tokenizer()
    lengths = {word: len(tok.encode(word, add_special_tokens=False)) for word in words}
    rows = []
    for _ in range(count):
        parts: list[str] = []
        left = tokens - 2
        while left:
            word = draw.choice([w for w in words if lengths[w] <= left] or [" "])
            parts.append(word)
            left -= lengths.get(word, left)
        rows.append({"text": "".join(parts)})
    return rows
