"""Ids and targets: equal to slow plain code and to TRL; control tokens, truncation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosstune.data.load import leave_out, load_rows
from crosstune.data.tokens import tokenize
from crosstune.recipe.sections import Data
from tests.encoding import (
    BOS_ID,
    CLOSE_ID,
    EOT_ID,
    OPEN_ID,
    agree,
    encode,
    plain_row,
    records_of,
    said,
)

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


def test_progress_tells_rows_done_and_all(cases, plain):
    seen: list[tuple[int, int]] = []
    rows = load_rows([{"text": f"row {i}"} for i in range(2500)], Data(path="x"))
    tokenize(rows, plain, Data(path="x"), cache=None, progress=lambda *counts: seen.append(counts), limit=64)
    assert seen == [(1000, 2500), (2000, 2500), (2500, 2500)]
