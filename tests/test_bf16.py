"""Training in bf16 learns what training in fp32 learns: the first steps of an adapter aren't rounded away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crosstune.model import block
from crosstune.model.base import adopt
from crosstune.model.targets import resolve_targets
from crosstune.recipe.sections import Evaluate, Lora, Train
from crosstune.train.evaluate import score_base
from crosstune.train.lane import LaneJob
from tests.lanes import PlanOf, run, tokens_of

ROWS, HELD_OUT = 40, tuple(range(0, 40, 5))


def deep_model(dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights, as large as a real model's, in so many layers that the residual is 10 times what a layer adds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=20, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model.to(dtype).eval()


def learnt(dtype: torch.dtype) -> float:
    """How much ten steps lower the loss on rows that weren't seen."""
    base, draw = adopt(deep_model(dtype), None), np.random.default_rng(1)
    rows = [(draw.integers(0, 20, 32) + 100).tolist() for _ in range(ROWS)]
    tokens = tokens_of(rows, [[False] + [True] * 31] * ROWS)
    train = Train(epochs=2, batch_size=8, learning_rate=2e-4, warmup=0)
    seen = tuple(row for row in range(ROWS) if row not in HELD_OUT)
    lora = Lora(rank=8, alpha=16, dropout=0.0)
    job = LaneJob(0, 0, lora, train, Evaluate(), seen, HELD_OUT, resolve_targets(base, "all-linear"))
    return score_base(base, tokens, HELD_OUT).loss - run(base, [job], tokens, PlanOf(micro_batch=8)).lane(0).scores.loss


@pytest.mark.parametrize("fused", [True, False])
def test_ten_steps_in_bf16_learn_as_much_as_in_fp32(fused, monkeypatch):
    for kind in ("cpu", "cpu bf16"):
        monkeypatch.setitem(block.FUSED_ON, kind, fused)
    wanted = learnt(torch.float32)
    assert wanted > 0.02
    assert learnt(torch.bfloat16) == pytest.approx(wanted, rel=0.08)
