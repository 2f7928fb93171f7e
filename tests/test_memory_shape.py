"""Sizes read from config.json against the models that transformers builds from the same config."""

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from crosstune.errors import ModelError
from crosstune.memory.config import read_config
from crosstune.memory.shape import FAMILIES, ModelShape
from crosstune.recipe.sections import Model
from tests.tiny import make_tiny

OPTIONS = ({}, {"tie_word_embeddings": True}, {"attention_bias": True}, {"num_key_value_heads": 1, "head_dim": 32})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "defaults")
def test_parameters_equal_those_of_the_model_that_transformers_builds(family, options):
    config = AutoConfig.for_model(family, num_hidden_layers=2, pad_token_id=0, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.known
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    linears = {name.rsplit(".", 1)[-1]: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for linear in shape.linears:
        built = linears[linear.name]
        assert (linear.inputs, linear.outputs, linear.bias) == (
            built.in_features,
            built.out_features,
            built.bias is not None,
        )


def test_targets_are_named_as_in_peft():
    shape = ModelShape.read("tests/cases/llama3-8b")
    assert [linear.name for linear in shape.targets(["v_proj", "self_attn.q_proj"])] == ["q_proj", "v_proj"]
    assert shape.targets("all-linear") == shape.linears
    with pytest.raises(ModelError, match="query_proj"):
        shape.targets(["query_proj"])


def test_a_size_that_is_missing_is_named():
    with pytest.raises(ModelError, match="num_hidden_layers: None"):
        ModelShape.from_config({"model_type": "llama", "hidden_size": 64})


def test_a_multimodal_config_gives_its_language_model():
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    assert ModelShape.from_config({"model_type": "gemma3", "text_config": text}).hidden == 64


def test_an_unknown_family_is_said_to_be_unknown():
    config = {"model_type": "mystery", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    assert not ModelShape.from_config(config).known


def test_config_of_a_folder(tmp_path):
    make_tiny(tmp_path / "tiny")
    assert read_config(Model(name=str(tmp_path / "tiny")))["model_type"] == "llama"
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(Model(name=str(tmp_path)))


def gguf_header(values, tensors):
    """A GGUF header as the format's page describes it, written by hand."""

    def text(word):
        return struct.pack("<Q", len(word)) + word.encode()

    body = b""
    for key, value in values.items():
        body += text(key)
        if isinstance(value, str):
            body += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            body += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            body += struct.pack("<II", 4, value)
    for name in tensors:
        body += text(name) + struct.pack("<I", 2) + struct.pack("<QQ", 4, 4) + struct.pack("<IQ", 0, 0)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + body


@pytest.mark.parametrize("tied", [True, False])
def test_config_of_a_gguf_file(tmp_path, tied):
    values = {
        "general.architecture": "llama", "llama.embedding_length": 64, "llama.block_count": 2,
        "llama.feed_forward_length": 128, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.context_length": 512, "tokenizer.ggml.tokens": ["a", "b", "cd"],
    }  # fmt: skip
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_header(values, ["token_embd.weight"] + ["output.weight"] * (not tied)))
    shape = ModelShape.from_config(read_config(Model(name=str(file))))
    assert (shape.hidden, shape.layers, shape.kv_heads, shape.vocab, shape.tied) == (64, 2, 2, 3, tied)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough to hold a header"])
def test_a_damaged_gguf_file_is_refused(tmp_path, content):
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="GGUF"):
        read_config(Model(name=str(file)))


def test_case_m05_parameters_of_llama_3_8b():
    config = json.loads(Path("tests/cases/llama3-8b/config.json").read_text())
    shape = ModelShape.from_config(config)
    assert shape.parameters == 8_030_261_248
    assert shape.lane_parameters(shape.targets(["q_proj", "v_proj"]), 16) == 6_815_744
    assert shape.parameters - ModelShape.from_config({**config, "vocab_size": 32000}).parameters == 788_529_152
