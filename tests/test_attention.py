"""Attention with repeated heads: transformers' own sdpa is the oracle."""

import pytest
import torch

from crosstune.model import attention
from crosstune.model.attention import ON_GPU, attention_name, register, takes_groups
from tests.tiny import make_tiny


def hidden(folder, name, ids, positions=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, dtype=torch.float32).get_decoder()
    return model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_values_are_those_of_transformers_sdpa(tmp_path, monkeypatch, packed, grouped):
    monkeypatch.setattr(attention, "takes_groups", lambda query: grouped)
    folder = make_tiny(tmp_path / "tiny")
    register()
    ids = torch.arange(24).view(2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2) if packed else None
    expected = hidden(folder, "sdpa", ids, positions)
    assert torch.allclose(hidden(folder, ON_GPU, ids, positions), expected, atol=1e-6)


def test_gpus_share_one_attention_and_only_the_flash_kernel_takes_groups(monkeypatch):
    cuda, query = torch.device("cuda", 0), torch.zeros(1, dtype=torch.bfloat16)
    assert attention_name(torch.device("cpu"), torch.float32) == "sdpa"
    assert attention_name(cuda, torch.bfloat16) == attention_name(cuda, torch.float32) == ON_GPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert takes_groups(query)
    assert not takes_groups(query.float())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_groups(query.half())
