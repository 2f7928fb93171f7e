"""Rows in: every file format gives the same rows, every shape its turns, and the cases their findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstune.data.load import Row, read_rows
from crosstune.data.rows import content_key, normal_key
from crosstune.recipe.sections import Data
from tests.loading import LOOSE, content, csv_text, faults, load, talk, write

# --- the cases -----------------------------------------------------------------------------------------------------


def test_mixed_shapes_are_read_row_by_row_and_wrong_ones_named(cases):  # D01
    rows = load(cases / "D01-mixed-shapes.jsonl")
    assert faults(rows) == [("wrong-type", (4,)), ("wrong-type", (5,)), ("unknown-role", (6,)), ("wrong-type", (7,))]
    assert [f.where.field for f in rows.findings if f.severity == "error"] == [
        "messages[1].content", "messages[1].content", "conversations[1].from", "messages",
    ]  # fmt: skip
    assert [(r.number, [(t.role, t.content) for t in r.turns]) for r in rows.rows] == [
        (1, [("user", "Name one metal."), ("assistant", "zinc")]),
        (2, [("user", "Name one tree."), ("assistant", "larch")]),
        (3, [("user", "Name one stone."), ("assistant", "slate")]),
        (8, [("user", "What colour is the roof?"), ("assistant", "grey")]),
        (9, [("user", "Where is the kettle?"), ("assistant", "On the left shelf.")]),
    ]
    assert rows.rows[3].columns == {"id": "r8", "source": "made up"}
    assert not [f for f in rows.findings if f.severity == "warning"], "all become conversations: no other shape"


def test_words_and_digits_of_a_csv_stay_text(cases):  # D02
    words, codes = load(cases / "D02-words.csv"), load(cases / "D02-codes.csv")
    assert [r.completion for r in words.rows] == [
        "null", "NA", "None", "nan", 'He wrote "Mind\nthe step", then left.', "007", "both, please",
    ]  # fmt: skip
    assert [r.completion for r in codes.rows] == ["012", "007", "1e3"]
    assert [r.where.line for r in words.rows] == [2, 3, 4, 5, 6, 8, 9], "the fifth cell has a line break"
    assert not faults(words) and not faults(codes)


def test_tool_calls_keep_the_keys_they_have(cases, tmp_path):  # D03
    import pyarrow as pa
    import pyarrow.parquet as pq

    datasets = pytest.importorskip("datasets")
    plain = [json.loads(line) for line in (cases / "D03-tool-calls.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "rows.parquet")
    assert "null" in json.dumps(pq.read_table(tmp_path / "rows.parquet").to_pylist()), "Arrow does invent nulls"
    for source in (cases / "D03-tool-calls.jsonl", tmp_path / "rows.parquet", datasets.Dataset.from_list(plain), plain):
        rows = load(source)
        calls = [turn.extra["tool_calls"] for row in rows.rows for turn in row.turns if "tool_calls" in turn.extra]
        assert [call[0]["function"]["arguments"] for call in calls] == [{"tank": 4}, {"name": "B", "open": True}]
        assert [set(turn.extra) for row in rows.rows for turn in row.turns] == [set(), {"tool_calls"}, set(), set()] * 2


def test_nulls_of_json_are_kept_and_keys_keep_their_order(tmp_path):
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"z": null, "a": 18446744073709551617}]}], "id": 12345678901234567890123}'
    row = load(write(tmp_path / "a.jsonl", line)).rows[0]
    assert json.dumps(row.turns[1].extra["tool_calls"]) == '[{"z": null, "a": 18446744073709551617}]'
    assert row.turns[1].extra["content"] is None and row.turns[1].content == ""
    assert row.columns["id"] == 12345678901234567890123


def test_unknown_role_is_an_error_with_a_hint(cases):  # D04, row 8
    rows = load(cases / "D04-roles.jsonl")
    assert faults(rows) == [("unknown-role", (8,))]
    assert "Did you mean 'assistant'?" in next(f.fix for f in rows.findings if f.code == "unknown-role")
    assert [r.number for r in rows.rows] == [1, 2, 3, 4, 5, 6, 7], "disorder among roles is for lint to judge"


def test_bom_and_windows_lines_change_nothing(cases):  # D05
    clean, windows = load(cases / "D05-clean.jsonl"), load(cases / "D05-bom-crlf.jsonl")
    assert content(clean) == content(windows)
    assert {f.code for f in windows.findings} == {"bom", "crlf", "shape"} and not faults(windows)


def test_a_bad_byte_is_named_by_line_and_offset(cases):  # D05
    rows = load(cases / "D05-bad-byte.jsonl")
    (finding,) = [f for f in rows.findings if f.severity == "error"]
    assert (finding.code, finding.rows, finding.where.line, finding.where.byte) == ("encoding", (3,), 3, 307)
    assert [r.number for r in rows.rows] == [1, 2, 4]
    assert "\ufffd" not in repr(rows.rows)


def test_half_a_surrogate_pair_is_an_error_and_a_whole_one_a_fox(cases):  # D05
    rows = load(cases / "D05-surrogate.jsonl")
    assert faults(rows) == [("lone-surrogate", (2,))]
    assert [r.turns[1].content for r in rows.rows] == ["🦊", "🦊"]


def test_every_bad_json_line_has_line_and_column(cases):  # D06
    rows = load(cases / "D06-trailing-comma.jsonl")
    places = [(f.code, f.where.line, f.where.column) for f in rows.findings if f.severity == "error"]
    assert places == [("json-syntax", 2, 125), ("json-syntax", 4, 105), ("json-syntax", 5, 110)]
    assert [r.number for r in rows.rows] == [1, 3, 6]


def test_a_pretty_printed_file_gives_one_error(cases, tmp_path):  # D06
    for path in (cases / "D06-pretty.json", write(tmp_path / "a.jsonl", json.dumps(talk(("user", "a")), indent=1))):
        (finding,) = load(path).findings
        assert (finding.code, finding.where.line) == ("json-syntax", 1)
        assert "line 1 is not a complete object" in finding.message and "one object per line" in finding.message


def test_a_first_line_cut_short_is_one_bad_line_not_a_pretty_printed_file(tmp_path):
    good = json.dumps(talk(("user", "a"), ("assistant", "b")))
    rows = load(write(tmp_path / "a.jsonl", good[:30] + "\n" + good + "\n" + good[:40] + "\n" + good))
    assert faults(rows) == [("json-syntax", (1,)), ("json-syntax", (3,))] and [r.number for r in rows.rows] == [2, 4]


def test_missing_answers_are_errors_and_blank_ones_are_left_to_lint(cases):  # D07
    rows = load(cases / "D07-empty.jsonl")
    assert faults(rows) == [("missing-content", (4,)), ("missing-content", (5,))]
    assert [r.number for r in rows.rows] == [1, 2, 3, 6]
    skipping = load(cases / "D07-empty.jsonl", skip_bad_rows=True)
    assert not faults(skipping)
    assert [f.rows for f in skipping.findings if f.code == "missing-content"] == [(4,), (5,)]


# --- one row in every format ---------------------------------------------------------------------------------------

# CSV has no null, and neither Arrow nor a CSV cell holds half a surrogate; "\r" ends a line in some CSV writers.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), max_size=30)
TABLE = st.lists(st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT, "label": TEXT}), min_size=1, max_size=6)
TALK = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    min_size=1,
    max_size=4,
)


@LOOSE
@given(TABLE)
def test_every_format_gives_the_same_rows(tmp_path, table):
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = [
        (i, "prompt", "", r["prompt"], r["completion"], (), {"label": r["label"]}) for i, r in enumerate(table, 1)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", "".join(json.dumps(r) + "\n" for r in table))
    write(tmp_path / "b.jsonl", "\ufeff" + "".join(json.dumps(r, ensure_ascii=False) + "\r\n" for r in table))
    write(tmp_path / "a.json", json.dumps(table, indent=1))
    write(tmp_path / "a.csv", csv_text(table))
    for source in [*(tmp_path / n for n in ("a.jsonl", "b.jsonl", "a.json", "a.csv", "a.parquet")), table]:
        rows = load(source)
        assert content(rows) == expected, source
        assert not [f for f in rows.findings if f.severity != "note"]


@settings(max_examples=15, deadline=None)
@given(TABLE)
def test_frames_and_data_sets_give_the_same_rows(table):
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    expected = content(load(table))
    assert content(load(pandas.DataFrame(table))) == expected
    assert content(load(datasets.Dataset.from_list(table))) == expected
    assert content(load(datasets.Dataset.from_list(table).to_iterable_dataset())) == expected
    assert content(load(datasets.DatasetDict(train=datasets.Dataset.from_list(table)))) == expected


@LOOSE
@given(st.lists(TALK, min_size=1, max_size=5))
def test_conversations_survive_every_format_that_can_nest(tmp_path, talks):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [{"messages": turns, "n": i} for i, turns in enumerate(talks)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", "".join(json.dumps(r) + "\n" for r in table))
    write(tmp_path / "a.json", json.dumps(table))
    write(tmp_path / "a.csv", csv_text([{"messages": json.dumps(t), "n": str(i)} for i, t in enumerate(talks)]))
    expected = [[(m["role"], m["content"]) for m in turns] for turns in talks]
    for name in ("a.jsonl", "a.json", "a.parquet", "a.csv"):
        rows = load(tmp_path / name)
        assert [[(t.role, t.content) for t in r.turns] for r in rows.rows] == expected
        assert [str(r.columns["n"]) for r in rows.rows] == [str(r["n"]) for r in table]


# --- shapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, [("user", "Add.\n1 2"), ("assistant", "3")]),
        ({"instruction": "Hi", "output": "Yo", "history": [["a", "b"]], "system": "Be brief."},
         [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "Hi"), ("assistant", "Yo")]),
        ({"system": "S", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
         [("system", "S"), ("user", "a"), ("assistant", "b")]),
        ({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         [("user", "a"), ("assistant", "b")]),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
         [("user", "a"), ("assistant", "b")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
         [("user", "ab")]),
    ],
)  # fmt: skip
def test_known_shapes_become_turns(record, turns):
    rows = load([record])
    assert [(t.role, t.content) for t in rows.rows[0].turns] == turns and rows.shape == "messages"


def test_a_turn_with_weight_zero_and_the_turns_of_a_prompt_are_not_learned():
    rows = load([
        {"messages": [{"role": "assistant", "content": "a", "weight": 0}, {"role": "assistant", "content": "b", "weight": 1}]},
        {"prompt": [{"role": "assistant", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]},
    ])  # fmt: skip
    assert [[t.learn for t in r.turns] for r in rows.rows] == [[False, True], [False, True]]


def test_the_columns_that_hold_the_content_can_be_named(tmp_path):
    path = write(tmp_path / "a.csv", "q,a,body,kind\nx,y,z,k\n")
    assert load(path, prompt="q", completion="a").rows[0].columns == {"body": "z", "kind": "k"}
    assert load(path, text="body").rows[0].text == "z"
    assert load(path, prompt="q", completion="a").column("q", option="folds.by") == ["x"]


def test_rows_of_another_shape_than_most_are_read_and_said():
    rows = load([talk(("user", "a"), ("assistant", "b"))] * 3 + [{"text": "c"}])
    (finding,) = [f for f in rows.findings if f.code == "other-shape"]
    assert (finding.severity, finding.rows, rows.shape, rows.rows[3].text) == ("warning", (4,), "messages", "c")


def test_the_shape_is_said_once():
    (note,) = load([{"text": "a"}] * 3).findings
    assert (note.code, note.severity) == ("shape", "note") and "3 text" in note.message


# --- keys, speed, memory -------------------------------------------------------------------------------------------


def test_content_keys_tell_rows_apart_and_normal_keys_look_past_case_space_and_unicode_form(cases):  # E04
    rows = load(cases / "E04-dupes.jsonl").rows
    exact = [{r.number for r in rows if content_key(r) == content_key(one)} for one in rows]
    same = [{r.number for r in rows if normal_key(r) == normal_key(one)} for one in rows]
    assert {frozenset(s) for s in exact if len(s) > 1} == {frozenset({1, 9})}
    assert {frozenset(s) for s in same if len(s) > 1} == {frozenset({1, 9}), frozenset({3, 7, 11})}


def test_the_fingerprint_changes_with_one_character_of_content_label_or_number():
    one = {"text": "a", "label": "x"}
    prints = {load(r).fingerprint for r in ([one], [one, one], [{**one, "text": "b"}], [{**one, "label": "y"}])}
    assert len(prints) == 4 and load([one]).fingerprint in prints


def test_jsonl_streams_in_bounded_memory(tmp_path):
    line = json.dumps(talk(("user", "Where is the lamp?"), ("assistant", "On the right shelf."))) + "\n"
    path = write(tmp_path / "a.jsonl", line * 50_000)
    tracemalloc.start()
    rows = sum(isinstance(item, Row) for item in read_rows(path, Data(path="x")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 50_000 and peak < 2**20 < path.stat().st_size


def test_reading_loads_neither_torch_nor_pandas(tmp_path):
    code = f"import sys; from crosstune.data.load import load_rows; from crosstune.recipe.recipe import Data; " \
           f"load_rows({str(write(tmp_path / 'a.csv', 'text' + chr(10) + 'a' + chr(10)))!r}, Data(path='x')); " \
           f"sys.exit(bool({{'torch', 'transformers', 'pandas', 'datasets'}} & set(sys.modules)))"  # fmt: skip
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, env=os.environ).returncode == 0
    )
