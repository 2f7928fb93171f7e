"""A merged model is base + adapter, whatever the base looks like; whatever is damaged is refused, and leaves nothing."""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, GenerationConfig

import crosstune.export.changes
import crosstune.export.merger
from crosstune.errors import CrosstuneError, ModelError, RunError
from crosstune.export import merge
from crosstune.export.folder import CHECKSUMS
from crosstune.export.verify import EncodedRow, encode_prompts
from crosstune.export.weights import weights_checksums
from crosstune.sections import Lora
from tests.adapters import TARGETS, random_adapter
from tests.test_export import export
from tests.tiny import make_tiny

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def logits(model: torch.nn.Module, base: Path) -> torch.Tensor:
    """Over eight prompts, one after the other."""
    rows = encode_prompts(AutoTokenizer.from_pretrained(base))
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row.ids])).logits[0] for row in rows])


def with_adapter(base: Path, adapter: Path) -> torch.nn.Module:
    """PEFT's word on what base + adapter says, in fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)


def assert_same_function(base: Path, adapter: Path, merged: Path, dtype: str = "float32") -> None:
    want = logits(with_adapter(base, adapter), base)
    got = logits(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32), base)
    # An error of one unit in the last place per matrix, 20 matrices, none of them cancelling, is never reached.
    assert (want - got).abs().max() <= max(20 * UNIT[dtype] * want.abs().max(), 1e-5)


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), TARGETS, (*TARGETS, "lm_head")], ids=["qv", "all", "head"])
def test_merged_equals_base_and_adapter_over_shards_ties_and_targets(tmp_path, dtype, tie, targets):
    base = make_tiny(tmp_path / "base", tie=tie, layers=8, dtype=dtype, max_shard_size="100KB")
    before = digest(base)
    export(tmp_path / "adapter", base, Lora(rank=4, alpha=8, rslora=True), targets)
    report = merge(tmp_path / "adapter", tmp_path / "merged")
    assert_same_function(base, tmp_path / "adapter", tmp_path / "merged", dtype)
    assert digest(base) == before  # I03: the base is as it was
    assert len(report.files) > 5 and report.dtype == dtype
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (base, tmp_path / "merged")
    ]
    if tie and "lm_head" in targets:  # the head differs from the embedding now
        assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
        assert any("one matrix" in note for note in report.notes)
    else:
        assert abs(sizes[0] - sizes[1]) < 2000  # headers only: no doubling through another dtype


@pytest.mark.parametrize("targets", [TARGETS, (*TARGETS, "lm_head")], ids=["all", "head"])
def test_a_tied_base_may_be_stored_under_the_heads_name(tmp_path, targets):
    base = make_tiny(tmp_path / "base", tie=True)
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    export(tmp_path / "adapter", base, Lora(rank=4, alpha=8), targets)
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert_same_function(base, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5}},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
        {"trainable_token_indices": [361, 369]},
        {"bias": "lora_only"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_that_peft_wrote_merge_as_peft_says(tmp_path, options, tie):
    base = make_tiny(tmp_path / "base", tie=tie, attention_bias="bias" in options)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    )
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    if "bias" in options and not any(key.endswith(".bias") for key in saved):
        refused(tmp_path, "holds no biases")  # PEFT 0.18 trains them and leaves them out
        return
    merge(tmp_path / "adapter", tmp_path / "merged")
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), base)
    assert torch.allclose(got, logits(model, base), atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"target_modules": ["q_proj", "embed_tokens"]}, {"modules_to_save": ["lm_head"]}], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_embeddings_that_are_tied_by_the_architecture_and_not_by_the_config_are_untied_too(tmp_path, tiny, options):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    base = tmp_path / "base"
    config = GemmaConfig(vocab_size=384, hidden_size=64, intermediate_size=96, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(base)
    fields = json.loads((base / "config.json").read_text())
    fields.pop("tie_word_embeddings", None)  # as in older folders of Gemma's
    (base / "config.json").write_text(json.dumps(fields))
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **options}),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is False
    assert torch.allclose(logits(merged, base), logits(model, base), atol=1e-4)


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.filterwarnings("ignore")
def test_a_resized_vocabulary_comes_with_its_rows(tmp_path, tie):
    base = make_tiny(tmp_path / "base", tie=tie)
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<|new{i}|>" for i in range(20)])
    model.resize_token_embeddings(400, mean_resizing=False)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.vocab_size == 400
    assert torch.allclose(logits(merged, base), logits(model, base), atol=1e-4)


def test_g03_a_token_that_fits_without_resizing_is_kept_and_trained_rows_travel(tmp_path, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["<|qty|>"])
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", trainable_token_indices=[369])
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config)
    with torch.no_grad():
        model.get_input_embeddings().token_adapter.trainable_tokens_delta["default"] += 0.5
    model.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[360, 369, 12, 369]])
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-5)
        assert not torch.allclose(merged(ids).logits, AutoModelForCausalLM.from_pretrained(tiny)(ids).logits, atol=1e-2)
    saved = AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert saved("<|qty|>", add_special_tokens=False).input_ids == [369]
    assert merged.config.vocab_size == merged.get_input_embeddings().weight.shape[0] == 384


def test_g03_the_merged_folder_has_all_that_is_needed_to_answer(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    merge(tmp_path / "adapter", tmp_path / "merged")
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert {
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "README.md",
        "SHA256SUMS",
        "Modelfile",
    } <= names
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == 384
    turns = [{"role": "user", "content": "Name one tree."}]
    texts = [
        AutoTokenizer.from_pretrained(f).apply_chat_template(turns, tokenize=False) for f in (tiny, tmp_path / "merged")
    ]
    assert texts[0] == texts[1]
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "| fold | 3 |" in card and "mean difference of a logit" in card and str(tmp_path) not in card


def test_t03_merged_stops_at_the_templates_and_the_tokenizers_token(tmp_path):
    base = make_tiny(tmp_path / "base", "base")  # eos 361, turns end in 368
    export(tmp_path / "adapter", base, Lora(rank=4), stop_ids=(368,))
    merge(tmp_path / "adapter", tmp_path / "merged")
    for folder in ("adapter", "merged"):
        assert GenerationConfig.from_pretrained(tmp_path / folder).eos_token_id == [361, 368]
    modelfile = (tmp_path / "merged" / "Modelfile").read_text()
    assert 'PARAMETER stop "<|eot_id|>"' in modelfile and 'PARAMETER stop "<|end_of_text|>"' in modelfile


def test_g01_at_most_one_shard_of_tensors_is_alive_while_merging(tmp_path, monkeypatch):
    base = make_tiny(tmp_path / "base", layers=8, max_shard_size="100KB")
    export(tmp_path / "adapter", base, Lora(rank=4), TARGETS)
    live_bytes, shard_bytes = [], max(file.stat().st_size for file in base.glob("*.safetensors"))
    write = crosstune.export.merger.write_tensors

    def spy(file, tensors):
        gc.collect()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and t.device.type == "cpu"
        }
        live_bytes.append(sum(storages.values()))
        write(file, tensors)

    gc.collect()
    before = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if isinstance(t, torch.Tensor) and t.device.type == "cpu"
    }
    adapter_bytes = sum(t.nbytes for t in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values())
    monkeypatch.setattr(crosstune.export.merger, "write_tensors", spy)
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert max(live_bytes) - sum(before.values()) <= shard_bytes + adapter_bytes
    assert not torch.cuda.is_initialized()


def test_held_out_loss_before_and_after_is_that_of_transformers(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4, alpha=16))
    ids = torch.randint(0, 360, (20,), generator=torch.Generator().manual_seed(0))
    rows = [EncodedRow(tuple(ids.tolist()), (False,) * 5 + (True,) * 15)]
    labels = ids.clone()
    labels[:5] = -100
    found = merge(tmp_path / "adapter", tmp_path / "merged", rows=rows).verification
    with torch.no_grad():
        want = float(with_adapter(tiny, tmp_path / "adapter")(ids[None], labels=labels[None]).loss)
    assert found.loss_adapter == pytest.approx(want, rel=1e-5)
    assert found.loss_merged == pytest.approx(want, rel=1e-5)
    assert found.rows == 1 and found.positions == 20


def refused(tmp_path: Path, match: str, kind: type[CrosstuneError] = ModelError, **options) -> CrosstuneError:
    with pytest.raises(kind, match=match) as caught:
        merge(tmp_path / "adapter", tmp_path / "merged", **options)
    assert caught.value.exit_code == 2 and caught.value.fix
    assert not [path.name for path in tmp_path.iterdir() if "merged" in path.name], "something was left behind"
    return caught.value


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


def flip_bit(file: Path, place: float = 0.9) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 0x10
    file.write_bytes(data)


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


def test_equal_merges_have_equal_bytes(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    for name in ("one", "two"):
        merge(tmp_path / "adapter", tmp_path / name)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_checksums_are_those_of_sha256sum(tmp_path, tiny):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    merge(tmp_path / "adapter", tmp_path / "merged")
    lines = (tmp_path / "merged" / "SHA256SUMS").read_text().splitlines()
    sums = digest(tmp_path / "merged")
    assert {line.partition("  ")[2]: line.partition("  ")[0] for line in lines} == {
        n: s for n, s in sums.items() if n != "SHA256SUMS"
    }


def test_an_adapter_lost_in_rounding_is_said(tmp_path):
    base = make_tiny(tmp_path / "base", dtype="bfloat16")
    export(tmp_path / "adapter", base, Lora(rank=4, alpha=0.01))
    report = merge(tmp_path / "adapter", tmp_path / "merged")
    assert any("part of it is lost" in note for note in report.notes)
    assert not merge(tmp_path / "adapter", tmp_path / "fp32", dtype="fp32").notes


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_merge_is_verified_again_and_opens(tmp_path, tiny, kind):
    pytest.importorskip("bitsandbytes")
    export(tmp_path / "adapter", tiny, Lora(rank=4, alpha=32))
    report = merge(tmp_path / "adapter", tmp_path / "merged", quantize=kind)
    assert report.verification.merged.mean_logit < 1e-5 < report.quantized.merged.mean_logit
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype() == {"nf4": "U8", "int8": "I8"}[kind]
    got = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tiny)
    want = logits(with_adapter(tiny, tmp_path / "adapter"), tiny)
    assert (got - want).abs().mean() == pytest.approx(report.quantized.merged.mean_logit, rel=1e-3)
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == [361, 368]


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


def test_a_gguf_base_is_dequantised_and_said(tmp_path, tiny):
    pytest.importorskip("gguf")
    from crosstune.export.gguf import write_gguf

    file = write_gguf(tiny, tmp_path / "base.gguf", kind="q8_0")
    export(
        tmp_path / "adapter",
        tiny,
        Lora(rank=4, alpha=16),
        TARGETS,
        base_name=str(file),
        base_files=weights_checksums(str(file)),
    )
    report = merge(tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    assert "base.gguf was dequantised" in report.notes[0]
    base = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    want = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"), tiny)
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tiny), want, atol=1e-4)
    flip_bit(file)
    with pytest.raises(ModelError, match="is not the file that the adapter was trained on"):
        merge(tmp_path / "adapter", tmp_path / "other")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    """The demo's model in bf16 and several shards."""
    from crosstune.demo_model import find_model
    from crosstune.export.quantize import write_plain
    from crosstune.progress import Quiet

    folder = tmp_path_factory.mktemp("smollm2") / "base"
    write_plain(Path(find_model(Quiet())), folder, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder.parent / "shards", max_shard_size="60MB")
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder.parent / "shards")
    return folder.parent / "shards"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "rslora"),
    [(("q_proj", "v_proj"), False), (TARGETS, True), ((*TARGETS, "lm_head"), False)],
    ids=["qv", "rs", "head"],
)
def test_a_real_model_merges_within_the_noise_of_bf16(smollm2, tmp_path, targets, rslora):
    lora = Lora(rank=8, alpha=16, rslora=rslora)
    export(tmp_path / "adapter", smollm2, lora, targets, tensors=random_adapter(smollm2, lora, targets, spread=0.02))
    report = merge(tmp_path / "adapter", tmp_path / "merged")
    found = report.verification
    assert len(report.files) > 3 and found.merged.mean_logit < found.expected_noise
    assert found.merged.mean_logit < 0.2 * found.adapter_effect.mean_logit
    assert found.merged.same_next_token > 0.9
    print(report.words())
