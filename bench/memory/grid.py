"""The settings that are predicted and read: 84 cells of three models, every second one of them blind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from crosstune.memory.estimate import Settings, estimate
from crosstune.memory.gpus import find_gpu
from crosstune.memory.shape import ModelShape

MODELS: dict[str, dict[str, Any]] = {
    "1b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
           "tie_word_embeddings": True},
    "8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
           "tie_word_embeddings": False},
    # Qwen/Qwen2.5-1.5B's config.json: biases on query, key and value, 6 query heads a key head, a wide vocabulary
    "qwen2-1.5b": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                   "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                   "tie_word_embeddings": True},
    "tiny": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 384,
             "tie_word_embeddings": False},
}  # fmt: skip
QUANTIZATIONS = ("none", "int8", "nf4")
LANES, RANKS = (1, 5, 8), (8, 64)
ROWS = ((1, 128), (1, 512), (2, 256), (1, 2048), (2, 1024), (4, 2048), (1, 8192), (4, 128))  # rows a lane x tokens
SPENT = ((2, 128), (4, 128))  # recorded as CUDA graphs, over copies of a 4-bit base; int8 can't be recorded
MOST_TOKENS = 40960  # a pass: a step of an 8B shape stays below 8 s
ROOM = 120 << 30  # of an H200's 140 GiB: the reading is to be of a peak, not of a refusal


def grid(models: list[str], half: str) -> Iterator[tuple[str, Settings]]:
    """8 cells for each model and quantisation: every lane count, rank, length and share of checkpointed layers occurs;
    and two whose passes are recorded, over copies of the base where it has 4 bits.

    Odd cells are the blind half: nothing in the code was chosen after looking at them.
    """
    for group, (name, quantization) in enumerate((name, q) for name in models for q in QUANTIZATIONS):
        shape = ModelShape.from_config(MODELS[name])
        spent = SPENT if quantization != "int8" else ()
        for place, (rows, tokens) in enumerate((*ROWS, *spent)):
            if half != "all" and (place % 2 == 1) != (half == "blind"):
                continue
            lanes = LANES[(place + group) % 3]
            checkpointed = (0, shape.layers // 2, shape.layers)[(place // 3 + place + group) % 3]
            settings = Settings(
                lanes, rows, tokens, checkpointed, quantization, rank=RANKS[(place // 2 + group) % 2],
                targets=shape.linears, dropout=place == 7,
            )  # fmt: skip
            settings = fitting(shape, settings)
            if place >= len(ROWS):
                settings = replace(settings, recorded=settings.pass_tokens, copies=quantization == "nf4")
            yield name, settings


def fitting(shape: ModelShape, settings: Settings) -> Settings:
    """Fewer lanes, then more checkpointed layers, until the GPU holds the cell."""
    while settings.lanes > 1 and (
        settings.pass_tokens > MOST_TOKENS or estimate(shape, settings, find_gpu("h200")).peak_bytes > ROOM
    ):
        settings = replace(settings, lanes=LANES[LANES.index(settings.lanes) - 1])
    if estimate(shape, settings, find_gpu("h200")).peak_bytes > ROOM:
        settings = replace(settings, checkpointed=shape.layers)
    return settings


def named(name: str, settings: Settings) -> dict[str, Any]:
    """The cell's settings as plain values."""
    return {
        "model": name, "quantization": settings.quantization, "lanes": settings.lanes, "rows": settings.micro_batch,
        "tokens": settings.tokens, "checkpointed": settings.checkpointed, "rank": settings.rank,
        "dropout": settings.dropout, "recorded": settings.recorded > 0, "copies": settings.copies,
    }  # fmt: skip
