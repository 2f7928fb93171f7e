"""Ids and targets: equal to slow plain code and to TRL; padding, truncation, cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstune.data.encode import Encoder
from crosstune.data.load import leave_out, load_rows
from crosstune.data.render import Span
from crosstune.data.rows import Rows
from crosstune.data.tokenizer import load_tokenizer, ready_tokenizer
from crosstune.data.tokens import Tokens, tokenize
from crosstune.errors import ModelError
from crosstune.sections import Data, Model
from tests.tiny import CASES, INSTRUCT, OPEN, TURN

BOS_ID, EOS_ID, PAD_ID, OPEN_ID, CLOSE_ID, EOT_ID = 360, 361, 364, 366, 367, 368


@pytest.fixture(scope="session")
def plain(tiny: Path):
    """The tiny tokenizer as AutoTokenizer gives it: the oracle's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def folder(tmp_path: Path, *, name: str = "model", **config: Any) -> str:
    """A model folder that holds a tokenizer only."""
    out = tmp_path / name
    out.mkdir()
    (out / "tokenizer.json").write_bytes((CASES / "tokenizer.json").read_bytes())
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
            "model_max_length": 8192, "chat_template": INSTRUCT}  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps({**base, **config}))
    return str(out)


def encode(source: Any, tokenizer: Any, *, cache: Path | None = None, **options: Any) -> Tokens:
    rows = source if isinstance(source, Rows) else load_rows(source, Data(path="x"))
    return tokenize(rows, tokenizer, Data(path="x", **options), cache=cache, limit=8192)


def said(tokens: Tokens) -> dict[str, Any]:
    return {finding.code: finding for finding in tokens.findings if finding.severity != "note"}


def plain_row(tokenizer: Any, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Ids and labels of one row from their definition, turn by turn, through no library but the tokenizer."""

    def part(text: str, learn: int) -> None:
        got = tokenizer.encode(text, add_special_tokens=False)
        ids.extend(got)
        labels.extend([learn] * len(got))

    ids, labels = [tokenizer.bos_token_id], [0]
    if "messages" not in record:
        part(record["prompt"], 0)
        part(record["completion"], 1)
        return [*ids, tokenizer.eos_token_id], [*labels, 1]
    for message in record["messages"]:
        for text in ("<|start_header_id|>", message["role"], "<|end_header_id|>", "\n\n"):
            part(text, 0)
        part(message["content"].strip(), int(message["role"] == "assistant"))
        part("<|eot_id|>", int(message["role"] == "assistant"))
    return ids, labels


def agree(tokens: Tokens, tokenizer: Any, records: list[dict[str, Any]]) -> None:
    for i, record in enumerate(records):
        ids, labels = plain_row(tokenizer, record)
        got, learn = tokens.row(i)
        assert got.tolist() == ids and learn.astype(int).tolist() == labels, record


def records_of(cases: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cases / f"{name}.jsonl").read_text(encoding="utf-8-sig").splitlines()]


# --- equal to slow plain code and to TRL ---------------------------------------------------------------------------

FIGURES = {  # file: tokens, targets of the rows
    "chat8": (191, [3, 5, 2, 3, 7, 7, 15, 5]), "T09-multiturn": (254, [6, 7, 30, 3, 2, 11]),
    "E02-ten": (263, [3, 4, 13, 5, 8, 8, 10, 10, 10, 12]), "D10-pack": (134, [3, 5, 2, 3, 7, 7]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FIGURES, "chat24", "D05-clean", "D05-bom-crlf", "E04-dupes", "M03-long-outlier"])
def test_cases_equal_slow_plain_code(cases, plain, name):  # T09 (a), E02, D05
    tokens = encode(cases / f"{name}.jsonl", plain)
    agree(tokens, plain, records_of(cases, name))
    if name in FIGURES:
        assert (len(tokens.ids), tokens.targets.tolist()) == FIGURES[name]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "<|" not in text)
TALK = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    min_size=1,
    max_size=5,
)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY
@given(TALK)
def test_any_conversation_equals_slow_plain_code(plain, turns):
    # The slow code encodes the line break before a turn apart; the template leaves it out only if nothing is there to trim.
    record = {"messages": [{**m, "content": m["content"].strip().strip("\x1c\x1d\x1e\x1f\x85") or "x"} for m in turns]}
    agree(encode([record], plain), plain, [record])


@MANY
@given(TEXT, TEXT)
def test_any_prompt_and_completion_equal_slow_plain_code(plain, prompt, completion):
    record = {"prompt": prompt, "completion": completion}
    agree(encode([record], plain), plain, [record])


def test_text_rows_equal_trl(tiny, tmp_path):
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    records = [
        {"text": text} for text in ("Name one metal.\nAnswer: zinc", "x", "a  b\n\n", "Ends.<|eot_id|>", "größer 🦊")
    ]
    config = trl.SFTConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, max_length=20, packing=False, bf16=False
    )
    trainer = trl.SFTTrainer(model=str(tiny), args=config, train_dataset=datasets.Dataset.from_list(records))
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(records))])
    tokens = encode(records, trainer.processing_class, max_tokens=20)
    for i in range(len(records)):
        ids, learn = tokens.row(i)
        labels = batch["labels"][i][: len(ids)]
        assert batch["input_ids"][i][: len(ids)].tolist() == ids.tolist()
        assert (batch["labels"][i][len(ids) :] == -100).all()
        assert (labels != -100).tolist()[1:] == learn.tolist()[1:], (
            "the first token is never predicted, whatever its label"
        )


def test_shapes_of_one_meaning_give_one_row_of_ids(cases, plain):  # D01
    tokens = encode(cases / "D01-mixed-shapes.jsonl", plain)
    assert tokens.numbers.tolist() == [1, 2, 3, 8, 9]
    asked = ["Name one metal.", "Name one tree.", "Name one stone.", "What colour is the roof?", "Where is the kettle?"]
    said = ["zinc", "larch", "slate", "grey", "On the left shelf."]
    agree(tokens, plain, [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in zip(asked, said, strict=True)
    ])  # fmt: skip


def test_answers_matched_on_characters_are_learned(cases, plain):  # T09 (b)
    records = records_of(cases, "T09-text")
    tokens = encode(cases / "T09-text.jsonl", plain, answer_after="Answer: ")
    for i, record in enumerate(records):
        ids, learn = tokens.row(i)
        assert plain.decode(ids[learn]) == record["text"].partition("Answer: ")[2] + "<|eot_id|>"
        assert plain.decode(ids[~learn]) == "<|begin_of_text|>" + record["text"].partition("Answer: ")[0] + "Answer: "


def test_an_answer_that_is_found_in_no_row_is_an_error(cases, plain):  # T09 (b)
    finding = said(encode(cases / "T09-text.jsonl", plain, answer_after="Response:"))["completion-mask-empty"]
    assert finding.severity == "error" and "6 of 6 rows" in finding.message and finding.rows == (1, 2, 3, 4, 5, 6)


# --- BOS, control tokens -------------------------------------------------------------------------------------------


def test_every_row_has_one_bos_at_its_start(cases, plain):  # T02
    texts = encode(cases / "T02-double-bos.jsonl", plain)
    for i in range(4):
        assert texts.row(i)[0].tolist().count(BOS_ID) == 1 and texts.row(i)[0][0] == BOS_ID
    for records in (
        records_of(cases, "chat8"),
        [{"prompt": "<|begin_of_text|>a", "completion": "b"}, {"prompt": "a", "completion": "b"}],
    ):
        tokens = encode(records, plain)
        for i in range(len(tokens)):
            assert np.flatnonzero(tokens.row(i)[0] == BOS_ID).tolist() == [0]


def test_a_tokenizer_that_adds_no_bos_gets_none_in_plain_text_and_the_templates_in_a_conversation(tmp_path, plain):
    tokenizer = load_tokenizer(Model(name=folder(tmp_path)))
    tokenizer.backend_tokenizer.post_processor = __import__("tokenizers").processors.ByteLevel()
    assert tokenizer("a")["input_ids"] == plain("a", add_special_tokens=False)["input_ids"]
    assert BOS_ID not in encode([{"text": "a"}], tokenizer).ids
    assert encode([{"messages": [{"role": "assistant", "content": "a"}]}], tokenizer).ids.tolist().count(BOS_ID) == 1


def test_kept_control_tokens_are_ordinary_characters(cases, plain):  # T06
    tokens = encode(cases / "T06-special-in-content.jsonl", plain, special_text="keep")
    records = records_of(cases, "T06-special-in-content")
    for i, record in enumerate(records):
        ids, learn = tokens.row(i)
        assert [(ids == n).sum() for n in (OPEN_ID, CLOSE_ID, EOT_ID)] == [2, 2, 2] and 365 not in ids
        start = np.flatnonzero(ids == CLOSE_ID)[0] + 1
        content = ids[start : np.flatnonzero(ids == EOT_ID)[0]]
        assert plain.decode(content) == "\n\n" + record["messages"][0]["content"]
        assert plain.decode(ids[learn]) == record["messages"][1]["content"] + "<|eot_id|>"
    refused = encode(cases / "T06-special-in-content.jsonl", plain)
    assert [(refused.row(1)[0] == n).sum() for n in (OPEN_ID, EOT_ID)] == [3, 3], (
        "rendered to a string they forge a turn"
    )


# --- padding and stop tokens ---------------------------------------------------------------------------------------


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


# --- truncation ----------------------------------------------------------------------------------------------------


def test_a_cut_leaves_no_stop_token_and_names_rows_that_lose_their_answer(cases, plain):  # D09
    tokens = encode(cases / "D09-long.jsonl", plain, max_tokens=64)
    gone, cut = said(tokens)["response-fully-truncated"], said(tokens)["response-truncated"]
    assert (gone.severity, gone.rows, cut.severity, cut.rows) == ("error", (2,), "warning", (4,))
    assert "0 of 10" in gone.message and "44 of 86" in cut.message
    assert tokens.row(3)[0][-1] != EOT_ID and len(tokens.row(3)[0]) == 64
    ids, labels = plain_row(plain, records_of(cases, "D09-long")[3])
    assert tokens.row(3)[0].tolist() == ids[:64] and tokens.row(3)[1].astype(int).tolist() == labels[:64]
    without = tokens.without(gone.rows)
    assert without.numbers.tolist() == [1, 3, 4, 5, 6] and without.targets.sum() == 61
    assert [without.row(i)[0].tolist() for i in range(5)] == [tokens.row(i)[0].tolist() for i in (0, 2, 3, 4, 5)]


def test_without_max_tokens_the_models_own_limit_holds_and_is_said(cases, plain):  # D09
    tokens = encode(cases / "D09-long.jsonl", plain)
    assert tokens.targets.sum() == 113 and tokens.max_tokens == 8192 and not said(tokens)
    (note,) = tokens.findings
    assert note.code == "max-tokens" and "8,192" in note.message and "269" in note.message


def test_rows_left_out_leave_rows_and_tokens_in_step(cases, plain):  # D09
    rows = load_rows(cases / "D09-long.jsonl", Data(path="x"))
    tokens = encode(rows, plain, max_tokens=64)
    findings, numbers = leave_out(tokens.findings)
    assert numbers == {2} and all(f.severity != "error" for f in findings)
    assert [row.number for row in rows.without(numbers).rows] == tokens.without(numbers).numbers.tolist()


def test_a_limit_beyond_the_models_own_is_warned_of(cases, plain):
    rows = load_rows(cases / "D09-long.jsonl", Data(path="x"))
    tokens = tokenize(rows, plain, Data(path="x", max_tokens=300), cache=None, limit=128)
    assert "max-tokens-over-limit" in said(tokens) and tokens.max_tokens == 300


def test_rows_that_cannot_be_rendered_stay_in_place_without_targets(plain):
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"text": "c"},
        {"messages": []},
    ]
    tokens = encode(records, plain, learn="assistant")
    assert tokens.numbers.tolist() == [1, 2, 3] and (tokens.targets > 0).tolist() == [True, False, False]
    assert {code: f.rows for code, f in said(tokens).items() if f.severity == "error"} == {
        "no-turns": (2,),
        "completion-mask-empty": (3,),
    }


def test_a_template_that_leaves_tool_calls_out_is_an_error_naming_the_rows(cases, plain):  # D03
    finding = said(encode(cases / "D03-tool-calls.jsonl", plain))["unsupported-field"]
    assert finding.severity == "error" and finding.rows == (1, 2) and "tool_calls" in finding.message


# --- templates that always open a turn, and the cache --------------------------------------------------------------


def test_a_trailing_header_is_cut_and_the_cache_knows_the_template(tmp_path, cases):  # T04
    genprompt = load_tokenizer(Model(name=folder(tmp_path, name="genprompt", chat_template=TURN + OPEN)))
    instruct = load_tokenizer(Model(name=folder(tmp_path, name="instruct")))
    cache = tmp_path / "cache"
    first = encode(cases / "chat8.jsonl", genprompt, cache=cache)
    assert said(first)["template-always-opens-turn"].severity == "warning"
    for i in range(8):
        ids, _ = first.row(i)
        assert ids[-1] == EOT_ID and (ids == OPEN_ID).sum() == 2
    assert first.targets.sum() == 47
    second, fresh = encode(cases / "chat8.jsonl", instruct, cache=cache), encode(cases / "chat8.jsonl", instruct)
    assert second.ids.tolist() == fresh.ids.tolist() and len(second.ids) == 191 and second.targets.sum() == 47
    assert first.fingerprint != second.fingerprint == fresh.fingerprint and not said(second)


def test_a_cached_run_encodes_nothing_and_gives_the_same(tmp_path, cases, plain, monkeypatch):
    cache = tmp_path / "deep" / "cache"
    first = encode(cases / "D09-long.jsonl", plain, cache=cache, max_tokens=64)
    monkeypatch.setattr(Encoder, "rows", lambda *_: pytest.fail("encoded again"))
    again = encode(cases / "D09-long.jsonl", plain, cache=cache, max_tokens=64)
    assert again.findings == first.findings and again.fingerprint == first.fingerprint
    for name in ("ids", "learn", "starts", "numbers"):
        one, two = first.__dict__[name], again.__dict__[name]
        assert one.dtype == two.dtype and one.tolist() == two.tolist()


@pytest.mark.parametrize(
    "change", [{"max_tokens": 63}, {"learn": "all"}, {"special_text": "keep"}, {"answer_after": "x"}, {"rows": 1}, {"eos": 1}]
)  # fmt: skip
def test_whatever_changes_ids_or_targets_changes_the_fingerprint(cases, tmp_path, change):
    rows = load_rows(cases / "D09-long.jsonl", Data(path="x"))
    tokenizer = load_tokenizer(Model(name=folder(tmp_path)))
    before = encode(rows, tokenizer, max_tokens=64).fingerprint
    if "rows" in change:
        after = encode(rows.without([1]), tokenizer, max_tokens=64)
    elif "eos" in change:
        tokenizer.eos_token = "<|end_of_text|>"
        after = encode(rows, tokenizer, max_tokens=64)
    else:
        after = encode(rows, tokenizer, **{"max_tokens": 64, **change})
    assert before != after.fingerprint


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-50],
        lambda b: b"",
        lambda b: b"PK" + b[5:],
        lambda b: b[: len(b) // 2] + bytes(40) + b[len(b) // 2 + 40 :],
    ],
)
def test_a_damaged_cache_is_made_anew(tmp_path, cases, plain, damage):
    first = encode(cases / "chat8.jsonl", plain, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert encode(cases / "chat8.jsonl", plain, cache=tmp_path).ids.tolist() == first.ids.tolist()
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "no temporary file is left"


def test_the_cache_holds_no_pickle(tmp_path, cases, plain):
    encode(cases / "chat8.jsonl", plain, cache=tmp_path)
    with np.load(next(tmp_path.iterdir()), allow_pickle=False) as stored:
        assert set(stored) == {"ids", "learn", "starts", "findings", "fingerprint"}
        assert all(stored[name].dtype != object for name in stored)


def test_progress_tells_rows_done_and_all(cases, plain):
    seen: list[tuple[int, int]] = []
    rows = load_rows([{"text": f"row {i}"} for i in range(2500)], Data(path="x"))
    tokenize(rows, plain, Data(path="x"), cache=None, progress=lambda *counts: seen.append(counts), limit=64)
    assert seen == [(1000, 2500), (2000, 2500), (2500, 2500)]


# --- tokenizers that put a blank before every text -----------------------------------------------------------------


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
