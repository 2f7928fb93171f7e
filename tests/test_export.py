"""An exported adapter opens in PEFT with equal logits, says all it must, and gives the same bytes each time."""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from crosstune.errors import RunError
from crosstune.export.serve import go_template, serve_commands, write_modelfile
from crosstune.export.turns import plain_turns
from crosstune.recipe.sections import Lora
from tests.adapters import TARGETS, export, target_modules

I02 = re.compile(r"^base_model\.model\.model\.layers\.[01]\.self_attn\.[qv]_proj\.lora_[AB]\.weight$")


def logits_by_hand(base: Path, tensors: dict[str, torch.Tensor], scale: float, ids: torch.Tensor) -> torch.Tensor:
    """W + scale·B·A written into a fresh base, in plain words."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for key, a in tensors.items():
            if key.endswith("lora_A.weight"):
                b = tensors[key.replace("lora_A", "lora_B")]
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                model.get_submodule(name).weight += scale * (b @ a)
        return model(ids).logits


def test_its_files_can_be_read_by_whoever_can_read_any_other_file(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    (tmp_path / "any").touch()
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}
    assert set(modes.values()) == {(tmp_path / "any").stat().st_mode}, modes


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), TARGETS, (*TARGETS, "lm_head")])
def test_peft_loads_it_without_a_warning_and_with_equal_logits(tiny, tmp_path, rslora, targets):
    lora = Lora(rank=4, alpha=12, rslora=rslora)
    tensors = export(tmp_path / "adapter", tiny, lora, targets)
    ids = torch.randint(0, 360, (2, 17), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error", UserWarning
        )  # PEFT's word for missing keys; its own deprecations are FutureWarning
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), tmp_path / "adapter"
        )
    scale = 12 / 4**0.5 if rslora else 12 / 4
    with torch.no_grad():
        got = model(ids).logits
    assert torch.allclose(got, logits_by_hand(tiny, tensors, scale, ids), atol=1e-4)


def test_i02_eight_keys_under_pefts_names(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 8 and all(I02.match(key) for key in saved)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_g03a_seven_thousand_bytes_of_adapter_and_no_embedding(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    # q: (4, 64) + (64, 4); v: (4, 64) + (32, 4); two layers; 4 bytes a number
    assert sum(tensor.nbytes for tensor in saved.values()) == 2 * 4 * (4 * 64 + 64 * 4 + 4 * 64 + 32 * 4)
    assert all(".lora_" in key for key in saved)


def test_the_same_values_give_the_same_bytes_over_an_older_folder(tiny, tmp_path):
    for folder in ("one", "two", "two"):
        export(tmp_path / folder, tiny, Lora(rank=4), TARGETS)
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_t03_all_stop_tokens_template_and_padding_are_saved(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    config = GenerationConfig.from_pretrained(tmp_path / "adapter")
    assert config.eos_token_id == [361, 368]
    assert config.pad_token_id == 364
    saved, source = AutoTokenizer.from_pretrained(tmp_path / "adapter"), AutoTokenizer.from_pretrained(tiny)
    turns = [{"role": "user", "content": "Name one tree."}, {"role": "assistant", "content": "larch"}]
    assert saved.apply_chat_template(turns, tokenize=False) == source.apply_chat_template(turns, tokenize=False)
    assert saved.pad_token_id == 364 and len(saved) == len(source)


def test_the_card_has_the_facts_and_no_path(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "| fold | 3 |" in card and "| loss | 1.25 |" in card and "| rank | 4 |" in card
    assert str(tiny.parent) not in card and str(Path.home()) not in card


def test_a_failed_write_leaves_the_old_folder_and_nothing_else(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4))
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(AssertionError, match="no target name"):
        export(tmp_path / "adapter", tiny, Lora(rank=4), target_names=["q_proj"])

    class Broken:
        eos_token_id = bos_token_id = pad_token_id = None

        def save_pretrained(self, folder):
            raise OSError("disk full")

    with pytest.raises(RunError, match="disk full"):
        export(tmp_path / "adapter", tiny, Lora(rank=4), tokenizer=Broken())
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_a_rename_that_fails_leaves_the_old_folder_in_its_place(tiny, tmp_path, monkeypatch):
    export(tmp_path / "a", tiny, Lora(rank=4))
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    replace = Path.replace

    def over_quota(self, place):
        if place == tmp_path / "a" and not self.name.endswith(".old"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return replace(self, place)

    with monkeypatch.context() as patch, pytest.raises(RunError, match="Disk quota exceeded"):
        patch.setattr(Path, "replace", over_quota)
        export(tmp_path / "a", tiny, Lora(rank=2))
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    assert [place.name for place in tmp_path.iterdir()] == ["a"]


def test_the_config_is_pefts_own_with_the_exact_modules(tiny, tmp_path):
    export(tmp_path / "adapter", tiny, Lora(rank=4, alpha=8, dropout=0.1, rslora=True))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(target_modules(tiny, ("q_proj", "v_proj")))
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["use_rslora"]) == (4, 8, 0.1, True)
    assert config["task_type"] == "CAUSAL_LM" and config["inference_mode"] is True


CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALKS = [
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
]


def go_rendered(template: str, talk: list[dict[str, str]]) -> str:
    """Ollama's template, by hand: the one loop and the one chain of ifs that are written."""
    head, _, rest = template.partition("{{ range .Messages }}")
    body, _, tail = rest.rpartition("{{ end }}{{ end }}")
    parts = re.split(r"\{\{ (?:else )?if eq \.Role \"(\w+)\" \}\}", body)[1:]
    by_role = dict(zip(parts[::2], parts[1::2], strict=True))
    return head + "".join(by_role[turn["role"]].replace("{{ .Content }}", turn["content"]) for turn in talk) + tail


@pytest.mark.parametrize("template", [None, CHATML], ids=["llama3", "chatml"])
def test_ollamas_template_says_what_the_chat_template_says(tiny, template):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template or tokenizer.chat_template
    turns = plain_turns(tokenizer)
    for talk in TALKS:
        want = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        with_system = (
            [{"role": "system", "content": turns.system}, *talk] if turns.system and talk[0]["role"] == "user" else talk
        )
        assert turns.start + go_rendered(go_template(turns), with_system) == want
    assert turns.system == ("Be brief." if template else "")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",  # says how many
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | upper }}{% endfor %}",  # changes the content
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m['content'] }}{% endfor %}",
        "",
    ],
)
def test_a_template_that_does_more_is_left_to_ollama(tiny, tmp_path, template):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = template
    assert plain_turns(tokenizer) is None
    write_modelfile(tmp_path, tokenizer, [361, 368], source={"FROM": "."})
    text = (tmp_path / "Modelfile").read_text()
    assert "TEMPLATE" not in text and 'PARAMETER stop "<|eot_id|>"' in text


def test_served_under_vllms_own_ranks():
    for rank, said in ((1, 8), (8, 8), (9, 16), (64, 64), (500, 512)):
        assert f"--max-lora-rank {said} " in serve_commands("f", kind="adapter", base_name="b", rank=rank)["vllm"]


def test_secrets_and_paths_stay_out_of_the_card(tiny, tmp_path):
    token = "hf_" + "a1B2" * 9
    export(
        tmp_path / "adapter",
        tiny,
        Lora(rank=4),
        card={"data": "/home/me/rows.jsonl", "settings": {"also": ["../me/rows"]}, "note": f"read with {token}"},
    )
    for file in ("README.md", "crosstune.json"):
        text = (tmp_path / "adapter" / file).read_text()
        assert token not in text
        assert "/home/me" not in text and "../me" not in text and "rows.jsonl" in text
        assert str(tiny.parent) not in text and tiny.name in text
