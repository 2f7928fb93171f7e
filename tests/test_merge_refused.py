"""What is damaged or doesn't fit is refused before a merged model is put in place, and leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import crosstune.export.changes
import crosstune.export.merger
from crosstune.errors import RunError
from crosstune.export import merge
from crosstune.export.folder import CHECKSUMS
from crosstune.export.weights import weights_checksums
from crosstune.recipe.sections import Lora
from tests.adapters import export
from tests.merging import assert_same_function, flip_bit, refused
from tests.tiny import make_tiny


def test_c03a_a_renamed_key_is_named_missing_and_unexpected(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    old = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    tensors[old.replace("layers.1", "layer.1")] = tensors.pop(old)
    save_file(tensors, file)
    error = refused(tmp_path, "adapter-keys")
    assert f"missing: {old}" in error.problem and f"unexpected: {old.replace('layers.1', 'layer.1')}" in error.problem
    del tensors[old.replace("layers.1", "layer.1")]
    save_file(tensors, file)
    assert f"missing: {old}" in refused(tmp_path, "adapter-keys").problem


def test_a_flipped_bit_in_the_adapter_is_refused(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    flip_bit(tmp_path / "adapter" / "adapter_model.safetensors")
    refused(tmp_path, "differs from its checksum")


def test_a_flipped_bit_in_a_shard_of_the_base_is_refused(tmp_path):
    base = make_tiny(tmp_path / "base", layers=4, max_shard_size="100KB")
    export(tmp_path / "adapter", base, Lora(rank=4), base_files=weights_checksums(str(base)))
    merge(tmp_path / "adapter", tmp_path / "whole")
    shard = sorted(base.glob("model-*.safetensors"))[1]
    flip_bit(shard)
    assert shard.name in refused(tmp_path, "is not the file that the adapter was trained on").problem


def test_a_flipped_bit_in_a_merged_shard_is_noticed_before_it_is_put_in_place(tmp_path, tiny, monkeypatch):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    write = crosstune.export.merger.write_tensors

    def damaging(file, tensors):
        write(file, tensors)
        flip_bit(file)

    monkeypatch.setattr(crosstune.export.merger, "write_tensors", damaging)
    refused(tmp_path, "reads back otherwise")


def test_a_wrong_merge_is_refused_by_the_answers(tmp_path, tiny, monkeypatch):
    export(tmp_path / "adapter", tiny, Lora(rank=4, alpha=8))
    right = crosstune.export.changes.LowRank.merged
    monkeypatch.setattr(crosstune.export.changes.LowRank, "merged", lambda self, w: 0.5 * (right(self, w) + w.float()))
    refused(tmp_path, "is not base \\+ adapter")


def test_a_truncated_base_and_an_absent_one_are_refused(tmp_path, tiny):
    base = make_tiny(tmp_path / "base")
    export(tmp_path / "adapter", base, Lora(rank=4))
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(tmp_path, "model.safetensors is damaged")
    file.unlink()
    refused(tmp_path, "holds no safetensors")
    refused(tmp_path, "no file", base="nowhere.gguf")


def test_a_base_of_another_shape_is_refused(tmp_path, tiny):
    export(tmp_path / "adapter", make_tiny(tmp_path / "base", layers=4), Lora(rank=4))
    refused(tmp_path, "doesn't fit its base", base=str(tiny))


def test_a_place_with_other_files_is_refused_and_left_alone(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(RunError, match="didn't write"):
        merge(tmp_path / "adapter", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "text"
    for _ in range(2):  # its own folder it replaces
        merge(tmp_path / "adapter", tmp_path / "merged")


def test_g01b_a_four_bit_base_is_refused_unless_asked_for_and_then_measured(tmp_path, tiny):
    bnb = pytest.importorskip("transformers").BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    pytest.importorskip("bitsandbytes")
    AutoModelForCausalLM.from_pretrained(tiny, quantization_config=bnb, device_map={"": "cpu"}).save_pretrained(
        tmp_path / "nf4"
    )
    export(tmp_path / "adapter", tiny, Lora(rank=4, alpha=32))
    error = refused(tmp_path, "stored in nf4", base=str(tmp_path / "nf4"))
    assert "16-bit" in error.fix
    report = merge(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "nf4"), into_quantized=True)
    assert any(note.startswith("warning: merged into weights that were rounded to nf4") for note in report.notes)
    assert 0 < report.verification.merged.mean_logit < 0.01
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@pytest.mark.parametrize("place", ["base", "base/..", "adapter"])
def test_a_place_that_holds_the_base_or_the_adapter_is_refused(tmp_path, tiny, place):
    """A merged folder, which may be replaced, may be the base of the next adapter."""
    export(tmp_path / "first", tiny, Lora(rank=4))
    merge(tmp_path / "first", tmp_path / "home" / "base")
    export(tmp_path / "home" / "adapter", tmp_path / "home" / "base", Lora(rank=4))
    (tmp_path / "home" / CHECKSUMS).touch()  # as if all of it were ours to replace
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match="which it is made from, would be lost"):
        merge(tmp_path / "home" / "adapter", tmp_path / "home" / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_merge_that_is_terminated_leaves_nothing_behind(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    code = """
import os, signal, sys, time
from crosstune.cli import main
from crosstune.export import merge
def terminated(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
sys.modules[merge.__module__].write_companions = terminated
sys.exit(main(["merge", sys.argv[1], "--out", sys.argv[2]]))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "adapter"), str(tmp_path / "merged")]
    done = subprocess.run(command, capture_output=True, cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 143, done.stderr
    assert [place.name for place in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ['{"eos_tok', "[]", ""], ids=["cut", "a list", "empty"])
def test_a_damaged_file_of_the_base_is_named(tmp_path, name, text):
    base = make_tiny(tmp_path / "base")
    export(tmp_path / "adapter", base, Lora(rank=4))
    (base / name).write_text(text)
    assert name in refused(tmp_path, "can't be read|holds no JSON object").problem


def test_an_index_that_names_no_tensor_is_refused(tmp_path):
    base = make_tiny(tmp_path / "base")
    export(tmp_path / "adapter", base, Lora(rank=4))
    (base / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "names no tensor")


def test_a_link_to_another_disk_stays_a_link_and_its_folder_is_replaced_there(tmp_path, tiny):
    export(tmp_path / "here" / "adapter", tiny, Lora(rank=4))
    (tmp_path / "disk").mkdir()
    link = tmp_path / "here" / "merged"
    link.symlink_to(tmp_path / "disk" / "merged")
    for rank in (4, 2):  # to a place that isn't there yet, then over what is
        export(tmp_path / "here" / "adapter", tiny, Lora(rank=rank))
        merge(tmp_path / "here" / "adapter", link)
        assert link.is_symlink()
        assert sorted(place.name for place in link.parent.iterdir()) == ["adapter", "merged"]
        assert [place.name for place in (tmp_path / "disk").iterdir()] == ["merged"]
        assert_same_function(tiny, tmp_path / "here" / "adapter", tmp_path / "disk" / "merged")
