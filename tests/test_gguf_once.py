"""A GGUF's header is parsed once for tokenizer, config and weights, and what is read is what transformers reads."""

from __future__ import annotations

import os
from importlib.metadata import version

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstune.data.gguf_once import forget_parsed, parsed_once
from crosstune.data.tokenizer import load_tokenizer
from crosstune.export.gguf import write_gguf
from crosstune.model.base import load_base, load_config
from crosstune.recipe.sections import Model
from tests.tiny import make_tiny


@pytest.fixture
def file(tmp_path):
    make_tiny(tmp_path / "base")
    return write_gguf(tmp_path / "base", tmp_path / "alone" / "model.gguf", kind="q8_0")


def test_tokenizer_config_and_weights_take_one_parse(file, monkeypatch):
    parsed = []

    class Counted(gguf.GGUFReader):
        def __init__(self, *args, **kwargs):
            parsed.append(1)
            super().__init__(*args, **kwargs)

    forget_parsed()
    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    model = Model(name=str(file))
    load_tokenizer(model)
    load_config(model)
    load_base(model, None, device=torch.device("cpu"), precision="fp32")
    assert len(parsed) <= 1, "transformers that reads headers itself needs none"
    assert gguf.GGUFReader is Counted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_weights_and_the_tokenizer_are_those_that_transformers_reads_by_itself(file, precision):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).state_dict()
    ours = load_base(Model(name=str(file)), None, device=torch.device("cpu"), precision=precision).model.state_dict()
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert load_tokenizer(Model(name=str(file))).get_vocab() == tokenizer.get_vocab()


def test_gguf_has_a_version_of_its_own_where_transformers_looks_for_it(monkeypatch):
    monkeypatch.delattr(gguf, "__version__", raising=False)
    with parsed_once():
        assert gguf.__version__ == version("gguf")


def test_a_file_that_was_written_again_is_parsed_again(file):
    forget_parsed()
    with parsed_once():
        first = gguf.GGUFReader(file)
        assert gguf.GGUFReader(str(file)) is first
        os.utime(file, ns=(1, 1))
        assert gguf.GGUFReader(file) is not first
    forget_parsed()
