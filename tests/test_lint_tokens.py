"""Faults that need a template, tokenizer or model made for them; and rows of an embedding read without loading the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.data.lint import lint, lint_rows
from crosstune.data.lint.embedding import find_embedding
from crosstune.data.load import load_rows
from crosstune.data.tokenizer import load_tokenizer
from crosstune.errors import ModelError
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data, Model
from tests.lintbed import found, lint_file, write_rows
from tests.tiny import CASES, INSTRUCT, make_tiny

CHAT = CASES / "chat8.jsonl"


def with_template(tiny: Path, template: str) -> Any:
    tokenizer = load_tokenizer(Model(name=str(tiny)))
    tokenizer.chat_template = template
    return tokenizer


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


# --- the template ----------------------------------------------------------------------------------------------------


def test_template_that_never_opens_a_turn(tiny: Path) -> None:
    never = INSTRUCT.partition("{% if add_generation_prompt %}")[0]
    assert set(found(lint(CHAT, model=with_template(tiny, never)))) == {"template-never-opens-turn"}


def test_template_that_ends_turns_with_nothing(tiny: Path) -> None:
    bare = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    assert "no-end-of-turn" in found(lint(CHAT, model=with_template(tiny, bare)), "warning")


def test_template_that_writes_the_date(tiny: Path) -> None:
    dated = "{{ strftime_now('%d %b %Y') }}" + INSTRUCT
    assert set(found(lint(CHAT, model=with_template(tiny, dated)))) == {"template-date"}


def test_template_that_opens_turns_otherwise_than_it_writes_them(tiny: Path) -> None:
    other = INSTRUCT.replace(
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        "{{ '<|start_header_id|>model<|end_header_id|>\\n\\n' }}",
    )
    assert other != INSTRUCT
    report = lint(CHAT, model=with_template(tiny, other))
    assert found(report) == {"generation-prompt-mismatch": tuple(range(1, 9))}


def test_rows_that_a_strict_template_refuses(tiny: Path, tmp_path: Path) -> None:
    strict = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + INSTRUCT
    )
    file = write_rows(
        tmp_path,
        talk(("user", "Name one metal."), ("assistant", "zinc")),
        talk(("user", "Name one tree."), ("user", "Any."), ("assistant", "larch")),
    )
    report = lint(file, model=with_template(tiny, strict))
    assert found(report, "error") == {"template-error": (2,)}
    assert "Roles must alternate" in report.errors[0].message


def test_template_that_rewrites_earlier_answers(tiny: Path, tmp_path: Path) -> None:
    hiding = INSTRUCT.replace(
        "(m['content'] | trim)", "(m['content'] if loop.last or m['role'] != 'assistant' else 'hidden')"
    )
    file = write_rows(
        tmp_path,
        talk(("user", "One?"), ("assistant", "zinc")),
        talk(("user", "One?"), ("assistant", "zinc"), ("user", "Two?"), ("assistant", "tin")),
    )
    assert found(lint(file, model=with_template(tiny, hiding)), "error") == {"template-not-prefix": (2,)}


def test_template_given_to_a_base_model(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "base", variant="notemplate")
    (tmp_path / "chat.jinja").write_text(INSTRUCT)
    model = Model(name=str(folder), chat_template=str(tmp_path / "chat.jinja"))
    assert set(found(lint(CHAT, model=model))) == {"template-on-base-model"}


def test_no_template_is_said_once_and_only_of_conversations(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "bare", variant="notemplate")
    report = lint_file(CHAT, folder)
    assert len([finding for finding in report.errors if finding.code == "no-template"]) == 1
    assert found(lint_file(CASES / "T09-text.jsonl", folder)) == {}


# --- the vocabulary --------------------------------------------------------------------------------------------------


def test_a_token_beyond_the_embedding(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "small", vocab=368)  # 369 entries: <|eot_id|> (368) has no row
    report = lint_file(CHAT, folder)
    assert "vocabulary-exceeds-embedding" in found(report, "error")
    assert "368" in report.errors[0].message
    unused = lint_file(CASES / "T09-text.jsonl", make_tiny(tmp_path / "base", variant="base", vocab=368))
    assert "vocabulary-exceeds-embedding" in found(unused, "note"), "no row uses the token"


def test_characters_that_the_tokenizer_does_not_know(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "one", "two", "three"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    file = write_rows(tmp_path, {"text": "one two three"}, {"text": "one zinc three"}, {"text": "two two"})
    report = lint(file, model=tokenizer)
    assert found(report, "warning") == {"unknown-tokens": (2,)}


def test_rows_longer_than_the_model_was_made_for(tiny: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path, {"text": "zinc " * 9000})
    assert "max-tokens-over-limit" in found(lint_file(file, tiny, {"max_tokens": 100_000}), "warning")


def test_prompt_and_completion_that_merge(tiny: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "Which jar?", "completion": " The small one."},
        {"prompt": "Which tree? ", "completion": "The larch."},
    ]
    report = lint_file(write_rows(tmp_path, *rows), tiny)
    assert found(report) == {"seam-merge": (2,)}


# --- the model's files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard", ["5GB", "50KB"])
def test_embedding_rows_equal_those_of_the_loaded_model(tmp_path: Path, dtype: str, shard: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny(tmp_path / "model", dtype=dtype, max_shard_size=shard)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    embedding = find_embedding(folder)
    assert embedding is not None and embedding.outputs is not None and embedding.num_rows == 384
    ids = [0, 7, 368, 383]
    for matrix, module in (
        (embedding.inputs, model.get_input_embeddings()),
        (embedding.outputs, model.get_output_embeddings()),
    ):
        np.testing.assert_array_equal(matrix.rows(ids), module.weight.detach().numpy()[ids])


def test_tied_embedding_has_no_matrix_of_its_own_at_the_output(tmp_path: Path) -> None:
    embedding = find_embedding(make_tiny(tmp_path / "tied", tie=True))
    assert embedding is not None and embedding.outputs is None


def test_rows_equal_to_one_another_are_untrained_too(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_tiny(tmp_path / "mean")
    tensors = load_file(folder / "model.safetensors")
    mean = tensors["model.embed_tokens.weight"].mean(0)
    for row in (366, 367):
        tensors["model.embed_tokens.weight"][row] = mean
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.is_tensor(mean)
    report = lint_file(CHAT, folder)
    assert "366 <|start_header_id|>, 367 <|end_header_id|>" in report.errors[0].message
    assert "368" not in report.errors[0].message


def test_embedding_rows_of_a_quantised_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    values[5] = 0
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    embedding = find_embedding(tmp_path / "model.gguf")
    assert embedding is not None and embedding.num_rows == 64
    np.testing.assert_allclose(embedding.inputs.rows([3, 63]), values[[3, 63]], atol=0.02)
    assert embedding.untrained([3, 5, 63]) == [5]


def test_a_damaged_weight_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="safetensors"):
        find_embedding(tmp_path)


def test_a_config_without_weights_is_enough_for_the_vocabulary(tiny: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    assert "vocabulary-below-embedding" in {finding.code for finding in lint_file(CHAT, tmp_path).findings}


def test_a_model_that_is_not_here_still_lets_the_rows_be_judged(tmp_path: Path) -> None:
    report = lint_file(CASES / "D07-empty.jsonl", tmp_path / "nowhere")
    assert found(report, "error").keys() == {"model-unread", "empty-response", "missing-content"}


def test_weights_that_are_not_here_are_a_note(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or five retries, 23 seconds
    model = Model(name="owner/not-on-this-machine", tokenizer=str(tiny))
    assert "embedding-unread" in found(lint(CHAT, model=model), "note")


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_fewer_than_ten_steps(tiny: Path) -> None:
    report = lint(Recipe.build({"model": str(tiny), "data": str(CHAT)}, ["train.epochs=1", "folds.k=2"]))
    assert found(report, "warning") == {"few-steps": ()}
    assert "1 optimizer step" in report.warnings[0].message


def test_groups_that_a_column_of_folds_tears_apart(tiny: Path, tmp_path: Path) -> None:
    rows = [
        talk(("user", f"Sample {i}?"), ("assistant", f"part {i}")) | {"well": "ab"[i // 4], "fold": i % 2}
        for i in range(8)
    ]
    file = write_rows(tmp_path, *rows)
    asked = ["folds.kind=column", "folds.by=fold", "folds.group=well", "train.batch_size=1"]
    report = lint(Recipe.build({"model": str(tiny), "data": str(file)}, asked))
    assert "group-across-folds" in found(report, "error")


def test_rows_in_memory_and_a_splitter_object(tiny: Path) -> None:
    from sklearn.model_selection import KFold

    recipe = Recipe.build({"model": str(tiny), "data": str(CHAT)}, ["train.batch_size=1"])
    rows = load_rows(CHAT, Data(path=str(CHAT)))
    assert found(lint_rows(rows, recipe, splitter=KFold(2))) == {}
    assert "split-refused" in found(lint_rows(rows, recipe, splitter=KFold(9)), "error")


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"rank": 64, "alpha": 16}, None),  # QLoRA
        ({"rank": 1, "alpha": 32}, None),  # LoRA Without Regret
        ({"rank": 8, "alpha": 32}, None),
        ({"rank": 256, "alpha": 512}, None),
        ({"rank": 64, "alpha": 16, "rslora": True}, None),
        ({"rank": 256, "alpha": 8}, "adapter-scale"),
        ({"rank": 4, "alpha": 400}, "adapter-scale"),
        ({"rank": 16, "alpha": 2, "rslora": True}, None),
        ({"rank": 64, "alpha": 0.5, "rslora": True}, "adapter-scale"),
        ({"dropout": 0.1}, None),
        ({"dropout": 0.0005}, "dropout-without-effect"),
    ],
)
def test_published_adapter_settings_are_left_alone(settings: dict[str, Any], code: str | None, tiny: Path) -> None:
    recipe = Recipe.build(
        {"model": str(tiny), "data": str(CHAT), "lora": settings}, ["train.batch_size=1", "folds.k=2"]
    )
    assert set(found(lint(recipe))) == ({code} if code else set())


@pytest.mark.parametrize(
    ("rate", "alpha", "told"),
    [(2e-4, 32, False), (1e-5, 16, False), (2e-3, 32, False), (5e-3, 16, False), (0.0, 16, False), (0.1, 16, True), (1e-7, 16, True), (9e-3, 512, True)],
)  # fmt: skip
def test_learning_rate_by_itself_and_times_the_scale(rate: float, alpha: float, told: bool, tiny: Path) -> None:
    tree = {"model": str(tiny), "data": str(CHAT), "lora": {"rank": 16, "alpha": alpha}, "train": {"batch_size": 1}}
    report = lint(Recipe.build(tree, [f"train.learning_rate={rate}", "folds.k=2"]))
    assert ("learning-rate" in found(report)) is told
