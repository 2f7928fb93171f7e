"""Answers of several sources side by side are those of each alone, streamed or not."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from crosstune.data.load import load_rows
from crosstune.errors import CrosstuneError, ModelError
from crosstune.export import generate, merge
from crosstune.export.answer import encode_questions
from crosstune.recipe.sections import Data, Lora
from crosstune.train.generate import Sampling
from tests.adapters import TARGETS, export, random_adapter

PROMPTS = ["Name one tree.", "Where is the kettle, and which shelf holds the jar?", "Name one metal."]
SHORT = Sampling(max_new_tokens=12)


@pytest.fixture
def sources(tiny, tmp_path) -> list[str]:
    """The base, two adapters on it and a merged model."""
    for number, name in enumerate(("one", "two")):
        lora = Lora(rank=4 * (number + 1), alpha=16)
        tensors = random_adapter(tiny, lora, TARGETS, seed=number)
        export(tmp_path / name, tiny, lora, TARGETS, tensors=tensors)
    merge(tmp_path / "one", tmp_path / "merged")
    return ["base", str(tmp_path / "one"), str(tmp_path / "two"), str(tmp_path / "merged")]


def by_transformers(tiny, adapter: str | None, ids: list[int]) -> list[int]:
    """What transformers' generate says, one prompt at a time, each model loaded alone."""
    model = AutoModelForCausalLM.from_pretrained(adapter if adapter and "merged" in adapter else tiny)
    if adapter and "merged" not in adapter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, adapter)
    out = model.generate(
        input_ids=torch.tensor([ids]), do_sample=False, max_new_tokens=12, eos_token_id=[361, 368], pad_token_id=364
    )
    return out[0, len(ids) :].tolist()


def test_each_answer_is_that_of_the_source_alone(tiny, sources):
    answers = list(generate(sources, PROMPTS, sampling=SHORT, device="cpu"))
    questions = encode_questions(PROMPTS, AutoTokenizer.from_pretrained(tiny))
    assert len(answers) == len(sources) * len(PROMPTS)
    for answer in answers:
        want = by_transformers(tiny, None if answer.source == "base" else answer.source, questions[answer.question])
        assert list(answer.ids) == want
        assert answer.stopped == (want[-1] in (361, 368))
    said = {source: [a.ids for a in answers if a.source == source] for source in sources}
    assert said[sources[1]] == said[sources[3]] != said[sources[2]]  # the merged model says what its adapter does


def test_the_pieces_of_a_stream_are_the_answer(sources):
    pieces: dict[tuple[str, int], str] = {}

    def note(source: str, question: int, text: str) -> None:
        pieces[source, question] = pieces.get((source, question), "") + text

    streamed = list(generate(sources, PROMPTS, sampling=SHORT, device="cpu", on_text=note))
    plain = list(generate(sources, PROMPTS, sampling=SHORT, device="cpu"))
    assert [(a.source, a.question, a.ids) for a in streamed] == sorted(
        [(a.source, a.question, a.ids) for a in plain], key=lambda a: (a[1], sources.index(a[0]))
    )
    assert all(pieces.get((a.source, a.question), "") == a.text for a in streamed)


def test_a_question_is_encoded_as_transformers_renders_it(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    want = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[0]}], add_generation_prompt=True, tokenize=False
    )
    assert encode_questions(PROMPTS[:1], tokenizer) == [tokenizer(want, add_special_tokens=False).input_ids]


def test_rows_are_asked_up_to_their_last_answer(tiny, cases):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = load_rows(str(cases / "chat8.jsonl"), Data(path="chat8.jsonl"))
    asked = [row.turns[0].content for row in rows.rows]
    assert encode_questions(rows, tokenizer) == encode_questions(asked, tokenizer)


def test_c03a_an_adapter_with_a_renamed_key_is_refused(sources):
    file = f"{sources[1]}/adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layer.1.q_proj.lora_A.weight"] = tensors.pop(
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    )
    save_file(tensors, file)
    with pytest.raises(ModelError, match="adapter-keys") as caught:
        list(generate(sources, PROMPTS, device="cpu"))
    assert caught.value.exit_code == 2


def test_sampling_repeats_with_its_seed(sources):
    hot = Sampling(max_new_tokens=12, temperature=1.5, seed=5)
    first, second = ([a.ids for a in generate(sources[:2], PROMPTS, sampling=hot, device="cpu")] for _ in range(2))
    assert first == second != [a.ids for a in generate(sources[:2], PROMPTS, sampling=SHORT, device="cpu")]


@pytest.mark.parametrize("wrong", [[], ["base"], ["nowhere/at-all/there"]])
def test_nothing_to_ask_is_refused(wrong):
    with pytest.raises(CrosstuneError):
        list(generate(wrong, PROMPTS, device="cpu"))
