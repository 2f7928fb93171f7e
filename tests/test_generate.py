"""Generation of K lanes together against PEFT's `generate`, token by token; labels against a slow loop."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from crosstune.data.load import load_rows
from crosstune.data.questions import Choices, make_choices, question, read_labels, with_examples
from crosstune.data.tokens import tokenize
from crosstune.errors import DataError, DeviceError
from crosstune.model.attach import LaneSpec, attached
from crosstune.model.targets import resolve_targets
from crosstune.recipe.sections import Data, Lora
from crosstune.train.choice import score_labels
from crosstune.train.generate import Prompt, Sampling, begin, choose_tokens, generate_lanes
from tests.adapters import random_adapter
from tests.lanes import fp32_base

LANES = (Lora(rank=4, alpha=8), Lora(rank=2, alpha=16), Lora(rank=8, alpha=4, targets=("q_proj", "v_proj")))
STOPS = (368,)


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


@pytest.fixture(scope="module")
def lanes(tiny, base):
    """(spec, tensors) of three lanes, strong enough that their answers differ."""
    found = []
    for seed, lora in enumerate(LANES):
        targets = resolve_targets(base, lora.targets)
        short = tuple({name.rpartition(".")[2] for name in targets})
        tensors = random_adapter(tiny, lora, short, seed=seed, spread=0.3)
        found.append((LaneSpec(lora, targets, seed), tensors))
    return found


def prompts(count, seed):
    rng = np.random.default_rng(seed)
    return [Prompt(i, i + 1, rng.integers(0, 360, rng.integers(3, 25)).astype(np.int32)) for i in range(count)]


def put_on(base, lanes, slots):
    for k, (_, tensors) in enumerate(lanes):
        slots.load(k, tensors)
    return begin(slots)


def peft_of(tiny, spec, tensors):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    config = LoraConfig(r=spec.lora.rank, lora_alpha=spec.lora.alpha, target_modules=list(spec.targets))
    peft = get_peft_model(model, config)
    loaded = peft.load_state_dict(
        {name.replace(".weight", ".default.weight"): t for name, t in tensors.items()}, strict=False
    )
    assert not loaded.unexpected_keys
    return peft.eval()


def their_answer(model, prompt, *, stops=STOPS, new=24):
    out = model.generate(
        input_ids=torch.tensor(prompt.ids[None]).long(), attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long),
        max_new_tokens=new, do_sample=False, eos_token_id=list(stops), pad_token_id=364,
    )[0, len(prompt.ids) :].tolist()  # fmt: skip
    return tuple(out[:-1]) if out[-1] in stops else tuple(out)


def test_lanes_together_equal_each_adapter_in_pefts_generate(tiny, base, lanes):
    asked = [prompts(7, 0), prompts(5, 1), prompts(7, 2)]
    # Stop tokens that random models do hit: a tenth of the vocabulary.
    stops = tuple(range(0, 384, 10))
    with attached(base, [spec for spec, _ in lanes], checkpointed_layers=2) as slots:
        ours = generate_lanes(put_on(base, lanes, slots), asked, Sampling(24), pad_id=364, stop_ids=stops)
        assert all(layer.training for layer in base.decoder_layers), "layers recompute again after generating"
    stopped = 0
    for (spec, tensors), prompts_k, answers in zip(lanes, asked, ours, strict=True):
        model = peft_of(tiny, spec, tensors)
        assert [answer.row for answer in answers] == [prompt.row for prompt in prompts_k]
        for prompt, answer in zip(prompts_k, answers, strict=True):
            assert answer.ids == their_answer(model, prompt, stops=stops)
            assert answer.stopped == (len(answer.ids) < 24)
            stopped += answer.stopped
    assert 5 < stopped < 19
    assert ours[0][0].ids != ours[2][0].ids


def test_an_answer_does_not_depend_on_the_rows_beside_it(base, lanes, monkeypatch):
    import crosstune.train.generate as module

    asked = [prompts(6, 3)] * 3
    sampling = Sampling(12, temperature=0.8, top_p=0.9, seed=5)
    with attached(base, [spec for spec, _ in lanes]) as slots:
        put_on(base, lanes, slots)
        together = generate_lanes(base, asked, sampling, pad_id=364, stop_ids=STOPS)
        monkeypatch.setitem(module.POSITIONS_A_BATCH, "cpu", 1)
        one_by_one = generate_lanes(base, asked, sampling, pad_id=364, stop_ids=STOPS)
    assert together == one_by_one


def test_memory_that_runs_out_halves_the_rows_answered_at_once(base, lanes, monkeypatch):
    import crosstune.train.choice as choice_module
    import crosstune.train.generate as module

    asked, sampling = [prompts(7, 3), prompts(4, 5), prompts(5, 6)], Sampling(8)
    real, most, ticks = module.fill_cache, [2], []

    def limited(base, batch_K, pad_id):
        if max(len(batch) for batch in batch_K) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return real(base, batch_K, pad_id)

    labels = Choices(("a", "b"), np.zeros(7, np.int64), tuple(((5,), (6, 7)) for _ in range(7)))
    with attached(base, [spec for spec, _ in lanes]) as slots:
        put_on(base, lanes, slots)
        whole = generate_lanes(base, asked, sampling, pad_id=364, stop_ids=STOPS)
        chosen = score_labels(base, asked, labels, pad_id=364)
        for place in (module, choice_module):
            monkeypatch.setattr(place, "fill_cache", limited)
        cut = generate_lanes(base, asked, sampling, pad_id=364, stop_ids=STOPS, tick=ticks.append)
        chosen_cut = score_labels(base, asked, labels, pad_id=364)
        assert (cut, sum(ticks)) == (whole, 16)
        for one, other in zip(chosen, chosen_cut, strict=True):
            np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, rtol=1e-5)
        most[0] = 0
        with pytest.raises(DeviceError, match="while 3 lanes answer one row each") as error:
            generate_lanes(base, asked, sampling, pad_id=364, stop_ids=STOPS)
    assert "evaluate.max_new_tokens" in error.value.fix


def test_the_bare_base_answers_as_transformers_does(tiny, base):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    asked = prompts(4, 4)
    ours = generate_lanes(base, [asked], Sampling(16), pad_id=364, stop_ids=STOPS)[0]
    assert [answer.ids for answer in ours] == [their_answer(model, prompt, new=16) for prompt in asked]


def test_draws_follow_the_distribution_that_transformers_would_draw_from():
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 2
    sampling = Sampling(1, temperature=0.7, top_p=0.8)
    warped = TopPLogitsWarper(0.8)(None, TemperatureLogitsWarper(0.7)(None, logits.clone()))
    expected = torch.softmax(warped, -1)[0]
    draws = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    found = choose_tokens(logits.expand(20_000, -1), sampling, draws)
    assert torch.bincount(found, minlength=12) / 20_000 == pytest.approx(expected, abs=2e-4)
    edge = choose_tokens(logits.expand(2, -1), sampling, torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64))
    assert all(expected[token] > 0 for token in edge)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    file = tmp_path_factory.mktemp("rows") / "reviews.jsonl"
    texts = ["a dull film", "what a joy", "never again, and never with friends", "fine"]
    rows = [
        {"prompt": f"Review: {text}\nVerdict:", "completion": f" {word}", "kind": word}
        for text, word in zip(texts, ["bad", "good", "bad", "so-so"], strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def slow_scores(model, prompt, label):
    """Feed prompt and label, add up log p of the label's tokens."""
    ids = torch.tensor([*prompt, *label])[None].long()
    with torch.no_grad():
        log_p = torch.log_softmax(model(input_ids=ids).logits.double(), -1)[0]
    return sum(float(log_p[len(prompt) - 1 + i, token]) for i, token in enumerate(label))


def test_labels_equal_a_slow_loop_that_feeds_each(tiny, base, lanes, reviews):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    data = Data(path=str(reviews))
    rows = load_rows(reviews, data)
    tokens = tokenize(rows, tokenizer, data, cache=None, limit=512)
    choices = make_choices(rows, tokenizer, data, ["good", "bad", "so-so"])
    assert choices.right.tolist() == [1, 0, 1, 2]
    asked = [Prompt(i, i + 1, question(tokens, i).prompt) for i in range(4)]
    with attached(base, [spec for spec, _ in lanes], checkpointed_layers=1) as slots:
        ours = score_labels(put_on(base, lanes, slots), [asked, asked[:2], asked[1:]], choices, pad_id=364)
    for (spec, tensors), scores in zip(lanes, ours, strict=True):
        model = peft_of(tiny, spec, tensors)
        for row, found in zip(scores.rows, scores.log_likelihood, strict=True):
            slow = [slow_scores(model, asked[row].ids, label) for label in choices.ids[row]]
            assert found == pytest.approx(slow, rel=1e-5)
    assert len({len(ids) for ids in choices.ids[0]}) > 1, "labels of different lengths"
    plain, by_token = ours[0].chances(by_token=False), ours[0].chances(by_token=True)
    assert plain.sum(1) == pytest.approx(np.ones(4)) and not np.allclose(plain, by_token)
    mean = ours[0].log_likelihood[0] / ours[0].tokens[0]
    assert by_token[0] == pytest.approx(np.exp(mean) / np.exp(mean).sum())


def test_the_right_label_is_exactly_what_training_learns(tiny, reviews):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    data = Data(path=str(reviews))
    rows = load_rows(reviews, data)
    tokens = tokenize(rows, tokenizer, data, cache=None, limit=512)
    choices = make_choices(rows, tokenizer, data, "kind")
    assert choices.names == ("bad", "good", "so-so")
    for i in range(4):
        ids, learn = tokens.row(i)
        assert choices.ids[i][choices.right[i]].tolist() == ids[learn].tolist()
        assert tokenizer.decode(question(tokens, i).answer) == rows.rows[i].completion


def test_last_turn_is_the_question_and_few_shot_goes_before(tiny, cases):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    data = Data(path=str(cases / "T09-multiturn.jsonl"))
    rows = load_rows(data.path, data)
    tokens = tokenize(rows, tokenizer, data, cache=None, limit=4096)
    row = rows.rows[0]
    asked = question(tokens, 0)
    turns = [{"role": turn.role, "content": turn.content} for turn in row.turns[:-1]]
    assert asked.prompt.tolist() == tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(asked.answer) == row.turns[-1].content
    variant = replace(rows, rows=(with_examples(row, [rows.rows[1]]),))
    shown = tokenize(variant, tokenizer, data, cache=None, limit=4096)
    before = [{"role": turn.role, "content": turn.content} for turn in rows.rows[1].turns if turn.role != "system"]
    turns, rest = (turns[:1], turns[1:]) if turns[0]["role"] == "system" else ([], turns)
    wanted = tokenizer.apply_chat_template([*turns, *before, *rest], add_generation_prompt=True)["input_ids"]
    assert question(shown, 0).prompt.tolist() == wanted
    assert shown.targets[0] == tokens.targets[0], "examples are read, not learned"


def test_labels_that_make_no_choice_are_refused(reviews):
    rows = load_rows(reviews, Data(path=str(reviews)))
    with pytest.raises(DataError, match="two labels or more"):
        read_labels(rows, ["good"])
    with pytest.raises(DataError, match="no column 'knd'"):
        read_labels(rows, "knd")
