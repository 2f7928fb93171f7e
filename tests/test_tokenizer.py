"""The tokenizer as it is made ready: padding, stop tokens, template; and those that put a blank before every text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosstune.data.encode import Encoder
from crosstune.data.render import Span
from crosstune.data.tokenizer import load_tokenizer, ready_tokenizer
from crosstune.errors import ModelError
from crosstune.recipe.sections import Model
from tests.encoding import (
    BOS_ID,
    EOS_ID,
    EOT_ID,
    PAD_ID,
    encode,
    folder,
)


def test_a_tokenizer_that_adds_no_bos_gets_none_in_plain_text_and_the_templates_in_a_conversation(tmp_path, plain):
    tokenizer = load_tokenizer(Model(name=folder(tmp_path)))
    tokenizer.backend_tokenizer.post_processor = __import__("tokenizers").processors.ByteLevel()
    assert tokenizer("a")["input_ids"] == plain("a", add_special_tokens=False)["input_ids"]
    assert BOS_ID not in encode([{"text": "a"}], tokenizer).ids
    assert encode([{"messages": [{"role": "assistant", "content": "a"}]}], tokenizer).ids.tolist().count(BOS_ID) == 1


def test_padding_is_chosen_so_that_it_stops_nothing_and_adds_nothing(tmp_path, cases):  # T01
    ready = ready_tokenizer(Model(name=folder(tmp_path)))
    assert (ready.pad_id, ready.tokenizer.pad_token_id, ready.stop_ids) == (PAD_ID, PAD_ID, (EOT_ID,))
    assert len(ready.tokenizer) == 369
    assert [(f.code, f.severity) for f in ready.findings] == [("pad-chosen", "note")]
    tokens = encode(cases / "chat8.jsonl", ready.tokenizer)
    assert tokens.ids[tokens.learn].tolist().count(EOT_ID) == 8 and tokens.targets.sum() == 47
    assert tokens.pad_id == PAD_ID


def test_padding_that_is_asked_for_is_taken_and_warned_of_if_it_stops(tmp_path, cases):  # T01
    asked = ready_tokenizer(Model(name=folder(tmp_path), pad_token="<|eot_id|>"))
    assert asked.pad_id == EOT_ID and [(f.code, f.severity) for f in asked.findings] == [
        ("pad-is-stop-token", "warning")
    ]
    tokens = encode(cases / "chat8.jsonl", asked.tokenizer)
    assert tokens.ids[tokens.learn].tolist().count(EOT_ID) == 8 and tokens.targets.sum() == 47
    harmless = ready_tokenizer(Model(name=folder(tmp_path, name="b"), pad_token="<|reserved_special_token_28|>"))
    assert harmless.pad_id == 365 and not harmless.findings


def test_a_tokenizer_that_pads_with_its_stop_token_gets_another(tmp_path):
    ready = ready_tokenizer(Model(name=folder(tmp_path, pad_token="<|eot_id|>")))
    assert ready.pad_id == PAD_ID and [(f.code, f.severity) for f in ready.findings] == [("pad-chosen", "note")]
    assert "<|eot_id|> (368), ends texts" in ready.findings[0].message
    own = ready_tokenizer(Model(name=folder(tmp_path, name="b", pad_token="<|reserved_special_token_28|>")))
    assert own.pad_id == 365 and not own.findings


def test_a_tokenizer_that_was_passed_in_is_not_changed(plain):
    ready = ready_tokenizer(Model(name="in-memory"), plain)
    assert ready.pad_id == PAD_ID and plain.pad_token is None


def test_a_padding_token_that_is_not_there_is_refused_with_near_ones(tmp_path):
    with pytest.raises(ModelError, match="not in the vocabulary") as caught:
        load_tokenizer(Model(name=folder(tmp_path), pad_token="<|finetune_pad_id|>"))
    assert "<|finetune_right_pad_id|>" in caught.value.fix


def test_stop_tokens_are_those_of_tokenizer_template_and_generation_config(tmp_path):
    name = folder(tmp_path, eos_token="<|end_of_text|>")
    assert ready_tokenizer(Model(name=name)).stop_ids == (EOS_ID, EOT_ID)
    (Path(name) / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, 365]}))
    assert ready_tokenizer(Model(name=name)).stop_ids == (EOS_ID, 365, EOT_ID)


@pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all", "nothing.gguf", "a/b/c/d"])
def test_a_missing_model_is_refused_without_asking_the_hub(name):
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(Model(name=name))


@pytest.mark.parametrize("text", ["", "{", "{}", '{"model": 5}'])
def test_a_damaged_tokenizer_is_a_model_error(tmp_path, text):
    name = folder(tmp_path)
    (Path(name) / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="can't be loaded"):
        load_tokenizer(Model(name=name))


def test_a_template_file_replaces_the_tokenizers_own(tmp_path, plain):
    (tmp_path / "t.jinja").write_text(
        "{{ messages[0].content }}{% for m in messages[1:] %}{{ m.content + eos_token }}{% endfor %}"
    )
    tokenizer = load_tokenizer(Model(name=folder(tmp_path), chat_template=str(tmp_path / "t.jinja")))
    tokens = encode(
        [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], tokenizer
    )
    assert plain.decode(tokens.ids) == "ab<|eot_id|>" and tokens.learn.tolist() == [False, True, True]
    with pytest.raises(ModelError, match="can't be read"):
        load_tokenizer(Model(name=folder(tmp_path, name="b"), chat_template="nothing.jinja"))


@pytest.fixture(scope="session", params=["metaspace", "normalizer"])
def sentencepiece(request):
    """A small tokenizer in SentencePiece's manner: a blank is a letter, and one is put before every text."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    model.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always", split=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    model.train_from_iterator(["Name one metal. zinc Where is the lamp? On the right shelf."] * 9, trainer)
    if request.param == "normalizer":  # as Llama 2's own: the blank is put before every stretch between control tokens
        blank = tokenizers.normalizers
        model.normalizer = blank.Sequence([blank.Prepend("▁"), blank.Replace(" ", "▁")])
        model.pre_tokenizer = None
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    "parts", [("Name one", " metal."), ("Where is", " the lamp?", " On the right shelf."), ("Name", "\none")]
)
def test_spans_inside_a_row_get_no_blank_of_their_own(sentencepiece, parts):
    ((ids, _),) = Encoder(sentencepiece).rows([[Span("<s>", False), *(Span(part, True) for part in parts)]])
    assert ids == sentencepiece("".join(parts))["input_ids"]


def test_a_word_is_continued_without_a_blank(sentencepiece):
    ((ids, _),) = Encoder(sentencepiece).rows([[Span("<s>", False), Span("met", False), Span("al", True)]])
    assert sentencepiece.decode(ids, skip_special_tokens=True).strip() == "metal"


def test_prompt_and_completion_of_such_a_tokenizer_read_as_one_text(sentencepiece):
    tokens = encode([{"prompt": "Name one metal.", "completion": " zinc"}], sentencepiece)
    assert tokens.ids.tolist() == [*sentencepiece("Name one metal. zinc")["input_ids"], sentencepiece.eos_token_id]
    assert sentencepiece.decode(tokens.ids[tokens.learn]).strip() in ("zinc</s>", "zinc </s>")
