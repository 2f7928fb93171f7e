"""Attention with repeated heads: transformers' own sdpa is the oracle."""

import pytest
import torch

from crosstune.model.attention import REPEATED, attention_name, register
from tests.tiny import make_tiny


def hidden(folder, name, ids, positions=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name, dtype=torch.float32).get_decoder()
    return model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


@pytest.mark.parametrize("packed", [False, True])
def test_values_are_those_of_transformers_sdpa(tmp_path, packed):
    folder = make_tiny(tmp_path / "tiny")
    register()
    ids = torch.arange(24).view(2, 12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2) if packed else None
    expected = hidden(folder, "sdpa", ids, positions)
    assert torch.allclose(hidden(folder, REPEATED, ids, positions), expected, atol=1e-6)


def test_flash_is_left_to_transformers(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert attention_name(torch.device("cpu"), torch.float32) == "sdpa"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert (attention_name(cuda, torch.bfloat16), attention_name(cuda, torch.float32)) == ("sdpa", REPEATED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert attention_name(cuda, torch.float16) == REPEATED
