"""Attention with repeated heads: transformers' own sdpa is the oracle."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from crosstune.memory.precision import cpu_takes_groups
from crosstune.model import attention, base, repeatable
from crosstune.model.attention import (
    ON_CPU,
    ON_GPU,
    attention_as_taken,
    attention_name,
    cpu_attention,
    register,
    takes_groups,
)
from crosstune.model.base import adopt, load_base
from crosstune.recipe.sections import Model
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
    cuda = torch.device("cuda", 0)
    assert attention_name(cuda, torch.bfloat16) == attention_name(cuda, torch.float32) == ON_GPU
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert takes_groups(SimpleNamespace(device=cuda, dtype=torch.bfloat16))
    assert not takes_groups(SimpleNamespace(device=cuda, dtype=torch.float32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_groups(SimpleNamespace(device=cuda, dtype=torch.float16))


def test_a_cpus_flash_kernel_takes_groups_where_it_is_said_to(monkeypatch):
    query, key = torch.zeros(1, 2, 2, 8), torch.zeros(1, 1, 2, 8)
    kernel = torch._fused_sdp_choice(query, key, key, None, 0.0, True, enable_gqa=True)
    assert cpu_takes_groups() == (kernel == SDPBackend.FLASH_ATTENTION.value)
    for grouped, name in ((True, "sdpa"), (False, ON_CPU)):
        monkeypatch.setattr(attention, "cpu_takes_groups", lambda grouped=grouped: grouped)
        assert attention_name(torch.device("cpu"), torch.float32) == name
        assert takes_groups(query) == grouped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_whose_kernel_takes_no_groups_it_gets_none_and_nothing_else_changes(monkeypatch, dtype):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, :, :, :2] = torch.eye(6, 2, dtype=torch.bool)
    attend, seen = attention.scaled_dot_product_attention, []

    def watched(query, key, value, *args, **more):
        seen.append((query.shape[1], key.shape[1], value.shape[1]))
        return attend(query, key, value, *args, **more)

    for given in (None, mask):
        found = []
        for forward in (sdpa_attention_forward, cpu_attention):
            leaves = [x.to(dtype).requires_grad_() for x in heads(6, 6)]
            if forward is cpu_attention:
                monkeypatch.setattr(attention, "cpu_takes_groups", lambda: False)
                monkeypatch.setattr(attention, "scaled_dot_product_attention", watched)
                monkeypatch.setattr(repeatable, "scaled_dot_product_attention", watched)
            out = forward(module, *leaves, given)[0]
            out.float().square().sum().backward()
            found.append([out, *(leaf.grad for leaf in leaves)])
        for theirs, ours in zip(*found, strict=True):
            assert (theirs - ours).norm() <= torch.finfo(dtype).eps * 8 * theirs.norm()
    assert seen == [(4, 4, 4)] * 2


def small(kind):
    """A model whose code asks whether its attention is called sdpa."""
    from transformers import AutoConfig

    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 48,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 2,
    } if kind != "falcon" else {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}  # fmt: skip
    try:
        return AutoConfig.for_model(kind, **sizes)
    except ValueError:
        pytest.skip(f"this transformers has no {kind}")


@pytest.mark.parametrize("kind", ["falcon", "deepseek_v32"])
@pytest.mark.parametrize("passed_in", [False, True])
def test_a_model_that_asks_for_sdpa_by_its_name_keeps_it(tmp_path, monkeypatch, kind, passed_in):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(attention, "takes_groups", lambda query: True)
    monkeypatch.setattr(base, "attention_name", lambda device, dtype: register() or ON_GPU)
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(small(kind)).eval(), torch.arange(24).view(2, 12)
    expected = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    if passed_in:
        found = adopt(model, None)
    else:
        model.save_pretrained(tmp_path)
        found = load_base(Model(name=str(tmp_path)), None, device=torch.device("cpu"), precision="fp32")
    assert torch.allclose(found.hidden(ids), expected, atol=1e-6)


def heads(length, keys):
    torch.manual_seed(0)
    return [torch.randn(2, count, size, 8) for count, size in ((4, length), (2, keys), (2, keys))]


def both(query, key, value, mask, **more):
    """(ours, transformers' own)"""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    return [
        forward(module, query, key, value, mask, **more)[0] for forward in (attention_as_taken, sdpa_attention_forward)
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_what_a_model_adds_to_its_scores_is_added(monkeypatch, masked):
    monkeypatch.setattr(attention, "takes_groups", lambda query: True)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril() if masked else None
    ours, theirs = both(*heads(6, 6), mask, position_bias=torch.randn(1, 4, 6, 6))
    assert torch.equal(ours, theirs)


def test_what_sdpa_refuses_is_refused(monkeypatch):
    from transformers.integrations import sdpa_attention

    if "softcap" not in inspect.getsource(sdpa_attention):
        pytest.skip("this transformers refuses none")
    monkeypatch.setattr(attention, "takes_groups", lambda query: True)
    with pytest.raises(ValueError, match="softcap"):
        both(*heads(6, 6), None, softcap=50.0)


def test_one_token_more_repeats_no_cache(monkeypatch):
    monkeypatch.setattr(attention, "takes_groups", lambda query: True)
    monkeypatch.setattr(attention, "for_every_head", None)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., :4] = False
    ours, theirs = both(*heads(1, 9), mask)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("size", "value_size"), [(512, 512), (64, 32)])
def test_heads_that_the_flash_kernel_refuses_are_repeated(monkeypatch, size, value_size):
    monkeypatch.setattr(attention, "takes_groups", lambda query: True)
    seen = []
    monkeypatch.setattr(attention, "attend", lambda query, key, value, **_: seen.append(key.shape[1]) or query)
    query, key, value = torch.zeros(1, 4, 3, size), torch.zeros(1, 2, 3, size), torch.zeros(1, 2, 3, value_size)
    attention_as_taken(torch.nn.Module(), query, key, value, None, is_causal=True)
    assert seen == [4]
