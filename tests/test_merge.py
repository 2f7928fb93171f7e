"""A merged model is base + adapter, whatever the base looks like."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GemmaConfig, GenerationConfig

import crosstune.export.changes
import crosstune.export.merger
import crosstune.export.quantize
from crosstune.errors import ModelError, RunError
from crosstune.export import merge
from crosstune.export.verify import EncodedRow
from crosstune.export.weights import weights_checksums
from crosstune.recipe.sections import Lora
from tests.adapters import TARGETS, export, random_adapter
from tests.merging import assert_same_function, digest, flip_bit, logits, refused, with_adapter
from tests.tiny import make_tiny


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


def full_disk(*args, **how):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_gguf_base_is_dequantised_and_said(tmp_path, tiny, monkeypatch):
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
    with monkeypatch.context() as patch:
        patch.setattr(crosstune.export.quantize, "save_torch_state_dict", full_disk)
        refused(tmp_path, "No space left on device", RunError)
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
