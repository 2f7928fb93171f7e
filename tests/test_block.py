"""The fused decoder block against transformers' own, in fp32: outputs and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from crosstune.data.batches import collate
from crosstune.memory.precision import cpu_takes_groups
from crosstune.model import block as fused
from crosstune.model.attach import LaneSpec, attached
from crosstune.model.base import adopt
from crosstune.model.block import FusedBlock, FusedNorm
from crosstune.model.lora import LaneLinear
from crosstune.model.targets import resolve_targets
from crosstune.recipe.sections import Lora
from crosstune.train.step import DeviceBatch, run_pass
from tests.lanes import random_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama without groups": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": None},
    "mistral with a window": {"sliding_window": 6},
    "qwen2": {},
}
LORAS: dict[str, list[dict[str, Any]]] = {
    "all": [{"rank": 4}, {"rank": 2, "alpha": 5}],
    "dropout": [{"rank": 4, "dropout": 0.3}, {"rank": 4}],
    "some": [{"rank": 4, "targets": ["q_proj", "v_proj"]}, {"rank": 3, "targets": ["down_proj"]}],
    "gate": [{"rank": 2, "targets": ["gate_proj"]}],
    "out": [{"rank": 2, "targets": ["o_proj", "up_proj"], "dropout": 0.2}],
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split()[0], **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def gradients(model: Any, loras: list[dict[str, Any]], monkeypatch, *, fuse: bool, layers: int = 0, pack: bool = False):
    """Losses, gradients and the gradient of the input embeddings' output; B away from zero."""
    monkeypatch.setitem(fused.FUSED_ON, "cpu", fuse)
    base = adopt(model, None)
    specs = [
        LaneSpec(lora := Lora(**given), resolve_targets(base, lora.targets), seed) for seed, given in enumerate(loras)
    ]
    rows = [(0,), (1,), (2,), (3,)] if not pack else [(0, 4), (1,), (2, 5), (3,)]
    with attached(base, specs, checkpointed_layers=layers) as slots:
        kinds = {type(module) for module in base.model.modules()}
        assert (FusedBlock in kinds) == (FusedNorm in kinds) == fuse and LaneLinear in kinds
        with torch.no_grad():
            slots.master_KP.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        batch = collate(
            random_tokens(longest=14), [rows[k % 2 :: 2] for k in range(len(specs))], weights_K=[0.1] * len(specs),
            dropout_K=[(3, k) for k in range(len(specs))],
        )  # fmt: skip
        losses = run_pass(slots, DeviceBatch.of(batch, base.device)).clone()
        names = [name for name, _ in base.model.named_modules()]
        return losses, {site.name: slots.views(slots.grad_KP, site) for site in slots.sites}, names


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_equal_those_of_transformers_block(family, lora, monkeypatch):
    model = model_of(family)
    losses, wanted, _ = gradients(model, LORAS[lora], monkeypatch, fuse=False)
    found_losses, found, _ = gradients(model, LORAS[lora], monkeypatch, fuse=True)
    torch.testing.assert_close(found_losses, losses, rtol=1e-6, atol=1e-7)
    for name, pair in wanted.items():
        for one, other in zip(found[name], pair, strict=True):
            assert torch.linalg.norm(one - other) <= 1e-5 * torch.linalg.norm(other), name


@pytest.mark.parametrize(("layers", "pack"), [(1, False), (2, False), (0, True), (2, True)])
def test_checkpointed_blocks_and_packed_rows_give_the_same_gradients(layers, pack, monkeypatch):
    model = model_of("llama")
    _, wanted, _ = gradients(model, LORAS["dropout"], monkeypatch, fuse=False, pack=pack)
    _, found, _ = gradients(model, LORAS["dropout"], monkeypatch, fuse=True, layers=layers, pack=pack)
    for name, pair in wanted.items():
        for one, other in zip(found[name], pair, strict=True):
            assert torch.linalg.norm(one - other) <= 1e-5 * torch.linalg.norm(other), name


def test_names_of_modules_stay_and_another_kind_of_block_is_left_alone(monkeypatch):
    model = model_of("llama")
    _, _, names = gradients(model, LORAS["all"], monkeypatch, fuse=True)
    assert {name.replace(".base", "") for name in names} == {name for name, _ in model.named_modules()}
    config = AutoConfig.for_model("qwen3", **SIZES, head_dim=8)  # norms each head before the rotation
    base = adopt(AutoModelForCausalLM.from_config(config), None)
    monkeypatch.setitem(fused.FUSED_ON, "cpu", True)
    with attached(base, [LaneSpec(Lora(), resolve_targets(base, "all-linear"), 0)]):
        assert not any(isinstance(module, FusedBlock | FusedNorm) for module in base.model.modules())


def test_a_block_keeps_what_its_page_says(monkeypatch):
    """Bytes that stay for the backward pass, counted by autograd's own hook, against the list in block.py."""
    monkeypatch.setitem(fused.FUSED_ON, "cpu", True)
    model = model_of("llama")
    base = adopt(model, None)
    lora = Lora(rank=4)
    with attached(base, [LaneSpec(lora, resolve_targets(base, "all-linear"), 0)]) as slots:
        slots.begin_pass(None)
        block, length = base.decoder_layers[0], 16
        own = {parameter.data_ptr() for parameter in model.parameters()} | {slots.copy_KP.untyped_storage().data_ptr()}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        hidden = torch.randn(1, length, 32, requires_grad=True)
        turn = base.decoder.rotary_emb(hidden, torch.arange(length)[None])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(hidden, position_embeddings=turn)
    h, q, k, f, heads, rank = 32, 32, 16, 48, 4, 4
    numbers = 2 * (h + 1) + (q + 2 * k) + q + heads + 2 * f + 7 * rank
    numbers += 0 if cpu_takes_groups() else 2 * q  # keys and values of every query head
    rotary = 2 * 8
    assert sum(kept.values()) == 4 * length * (numbers + rotary)
