"""GGUF files read back by transformers' own reader (and by llama.cpp) are the models they were made from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from crosstune.errors import ModelError, RunError
from crosstune.export import merge
from crosstune.export.gguf import Layout, rope_factors, write_gguf
from crosstune.recipe.sections import Lora
from tests.adapters import TARGETS, export
from tests.merging import logits, with_adapter
from tests.tiny import make_tiny


@pytest.mark.parametrize(("kind", "unit"), [("f32", 2.0**-24), ("f16", 2.0**-11), ("bf16", 2.0**-8), ("q8_0", 2.0**-7)])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_a_merged_model_comes_back_from_its_gguf_file(tmp_path, kind, unit, tie):
    base = make_tiny(tmp_path / "base", tie=tie)
    export(tmp_path / "adapter", base, Lora(rank=4, alpha=16), TARGETS)
    merge(tmp_path / "adapter", tmp_path / "merged")
    file = write_gguf(tmp_path / "merged", kind=kind)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    want = logits(with_adapter(base, tmp_path / "adapter"), base)
    assert (logits(model, base) - want).abs().max() <= max(20 * unit * want.abs().max(), 1e-4)


def test_the_tokenizer_comes_back_with_ids_template_and_unused_rows(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    merge(tmp_path / "adapter", tmp_path / "merged")
    file = write_gguf(tmp_path / "merged", tmp_path / "alone" / "model.gguf")
    saved, source = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name), AutoTokenizer.from_pretrained(tiny)
    turns = [
        {"role": "user", "content": "Which shelf holds the jar?"},
        {"role": "assistant", "content": "The left one."},
    ]
    text = source.apply_chat_template(turns, tokenize=False)
    assert saved.apply_chat_template(turns, tokenize=False) == text
    fields = gguf.GGUFReader(
        file
    ).fields  # ids: test_llama_cpp.py; transformers' own reader splits by other rules in 5.10
    names = source.convert_ids_to_tokens(list(range(369)))
    assert fields["tokenizer.ggml.tokens"].contents()[:369] == names
    merges = json.loads((tiny / "tokenizer.json").read_text())["model"]["merges"]
    assert fields["tokenizer.ggml.merges"].contents() == [
        " ".join(pair) if isinstance(pair, list) else pair for pair in merges
    ]
    types = fields["tokenizer.ggml.token_type"].contents()
    assert len(types) == 384 and types[369:] == [gguf.TokenType.UNUSED] * 15 and types[368] == gguf.TokenType.CONTROL
    assert fields["tokenizer.ggml.pre"].contents() == "llama-bpe"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is True


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapters_file_holds_the_same_change_of_each_weight(tmp_path, tiny, rslora):
    lora = Lora(rank=4, alpha=16, rslora=rslora)
    tensors = export(tmp_path / "adapter", tiny, lora, TARGETS)
    reader = gguf.GGUFReader(write_gguf(tmp_path / "adapter"))
    found = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    assert len(found) == len(tensors)
    alpha = reader.fields["adapter.lora.alpha"].contents()
    layout = Layout.of(AutoConfig.from_pretrained(tiny))
    for key, a in tensors.items():
        if not key.endswith("lora_A.weight"):
            continue
        name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        b = tensors[key.replace("lora_A", "lora_B")]
        scale = 16 / 4**0.5 if rslora else 16 / 4
        in_file = layout.name(name)
        got = alpha / 4 * found[f"{in_file}.lora_b"] @ found[f"{in_file}.lora_a"]  # as llama.cpp applies it
        assert torch.allclose(got, layout.permuted(name, scale * b @ a), atol=1e-5)


def test_stretched_rotary_frequencies_are_the_papers(tmp_path):
    config = AutoConfig.from_pretrained(make_tiny(tmp_path / "base"))
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    want = []
    for i in range(0, 16, 2):  # Llama 3.1's rule in plain words
        wave = 2 * torch.pi * 500000.0 ** (i / 16)
        if wave < 64 / 4:
            want.append(1.0)
        elif wave > 64 / 1:
            want.append(8.0)
        else:
            smooth = (64 / wave - 1) / (4 - 1)
            want.append(1 / ((1 - smooth) / 8 + smooth))
    assert torch.allclose(rope_factors(config), torch.tensor(want, dtype=torch.float32), rtol=1e-5)


def test_what_llama_cpp_cannot_hold_is_refused_with_the_way_out(tmp_path, tiny):
    with pytest.raises(ModelError, match="no GGUF type"):
        write_gguf(tiny, kind="q2")
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    merge(tmp_path / "adapter", tmp_path / "merged", quantize="nf4")
    with pytest.raises(ModelError, match="quantised"):
        write_gguf(tmp_path / "merged")
    config = (tiny / "config.json").read_text()
    other = make_tiny(tmp_path / "other")
    (other / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "gpt_neox"'))
    with pytest.raises(ModelError, match="gpt_neox") as caught:
        write_gguf(other)
    assert "convert_hf_to_gguf.py" in caught.value.fix
    assert not list(tmp_path.rglob("*.gguf")) and not list(tmp_path.rglob("*.part"))


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, tiny, monkeypatch):
    flushed, named = set(), []
    fsync, replace = os.fsync, Path.replace

    def flush(handle):
        fsync(handle)
        flushed.add(os.fstat(handle).st_ino)

    def rename(source, place):
        named.append((Path(place).name, Path(source).stat().st_ino in flushed))
        return replace(source, place)

    export(tmp_path / "adapter", tiny, Lora(rank=4))
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)  # Python 3.10 has it not from os
    write_gguf(tmp_path / "adapter")
    assert named == [("adapter.gguf", True)]


def test_a_disk_that_is_full_leaves_the_older_file_and_no_open_handle(tmp_path, tiny, monkeypatch):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    before = write_gguf(tmp_path / "adapter").read_bytes()
    writers = []

    def full(self, *args, **how):
        writers.append(self)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="No space left on device"):
        patch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
        write_gguf(tmp_path / "adapter", kind="f16")
    assert writers[0].fout is None
    assert [file.name for file in (tmp_path / "adapter").glob("*.gguf*")] == ["adapter.gguf"]
    assert not list((tmp_path / "adapter").glob(".*"))
    assert (tmp_path / "adapter" / "adapter.gguf").read_bytes() == before
