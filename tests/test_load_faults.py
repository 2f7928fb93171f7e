"""Rows in that can't be read: every fault has its place, and nothing gives a traceback."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstune.data.load import Row, read_rows
from crosstune.errors import CrosstuneError, DataError, Finding, MissingExtra
from crosstune.recipe.sections import Data
from tests.loading import LOOSE, csv_text, faults, load, talk, write


@pytest.mark.parametrize(
    "option", [{"text": "txet"}, {"shape": "text", "text": "txet"}, {"prompt": "txet"}, {"completion": "txet"}]
)
def test_an_unknown_column_is_named_with_the_columns_found(option):
    with pytest.raises(DataError, match=r"no column 'txet'.*columns found: text, other") as caught:
        load([{"text": "a", "other": 1}], **option)
    assert "Did you mean 'text'?" in caught.value.fix


def test_a_file_without_a_known_shape_names_its_columns(tmp_path):
    with pytest.raises(DataError, match="no known shape; columns found: alpha, beta"):
        load(write(tmp_path / "a.csv", "alpha,beta\n1,2\n"))


def test_a_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path / "rows.jsonl", "{}")
    with pytest.raises(DataError, match="does not exist") as caught:
        load(tmp_path / "row.jsonl")
    assert "rows.jsonl" in caught.value.fix


@pytest.mark.parametrize("name", ["rows", "tests/rows", "./rows", "a/b/c", "rows.jsonl", "a/rows.csv"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(monkeypatch, name):
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="does not exist"):
        load(name)


def test_a_hub_id_that_the_hub_does_not_have_is_a_data_error(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def missing(*_: Any, **__: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("no such data set")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    with pytest.raises(DataError, match=r"no file here.*no such data set"):
        load("someone/rows")


def test_without_datasets_a_hub_id_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match="datasets"):
        load("someone/rows")


PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
BAD_FILES = {
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(50), "gzip"), "png": (PNG, "PNG"), "zip": (b"PK\x03\x04" + bytes(9), "zip"),
    "utf-16": ('{"text": "a"}'.encode("utf-16"), "UTF-16"), "utf-16-le": ('{"text": "a b c"}'.encode("utf-16-le"), "UTF-16LE"),
    "utf-32": ('{"text": "a"}'.encode("utf-32"), "UTF-32"), "zeros": (b'{"text": "\0\0\0"}', "binary"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_FILES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_other_files_are_named_for_what_they_are(tmp_path, kind, suffix):
    data, word = BAD_FILES[kind]
    with pytest.raises(DataError, match=word):
        load(write(tmp_path / f"a{suffix}", data))


def test_a_directory_is_refused_with_what_is_in_it(tmp_path):
    write(tmp_path / "rows.csv", "text\na\n")
    with pytest.raises(DataError, match="directory") as caught:
        load(tmp_path)
    assert "rows.csv" in caught.value.fix


@pytest.mark.parametrize("text", ["", "\n\n", "\ufeff"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json"])
def test_an_empty_file_is_an_error(tmp_path, text, suffix):
    assert ("empty-file", ()) in faults(load(write(tmp_path / f"a{suffix}", text)))


def test_a_csv_of_a_header_alone_is_empty(tmp_path):
    assert faults(load(write(tmp_path / "a.csv", "text\n"))) == [("empty-file", ())]


@pytest.mark.parametrize(
    ("text", "code", "rows"),
    [
        ('text,label\na,b\nc\nd,e,f\ng,h\n', "csv-cells", [2, 3]),
        ('text,label\n"a "b" c",x\nd,e\n', "csv-syntax", [1]),
        ('text,label\na,b\n"c,d\ne,f\n', "csv-syntax", [2]),
    ],
)  # fmt: skip
def test_csv_faults_have_their_line(tmp_path, text, code, rows):
    found = [f for f in load(write(tmp_path / "a.csv", text)).findings if f.severity == "error"]
    assert [(f.code, f.rows[0]) for f in found] == [(code, row) for row in rows]
    assert [f.where.line for f in found] == [row + 1 for row in rows]


def test_a_bad_byte_in_a_csv_is_named_and_the_other_rows_are_read(tmp_path):
    rows = load(write(tmp_path / "a.csv", b'text,n\n"a\nb\xe9",1\nc,2\n'))
    (finding,) = [f for f in rows.findings if f.severity == "error"]
    assert (finding.code, finding.rows, finding.where.line, finding.where.byte) == ("encoding", (1,), 3, 11)
    assert [r.text for r in rows.rows] == ["c"]


def test_semicolons_and_tabs_are_seen_in_the_header(tmp_path):
    for name, mark in (("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t")):
        rows = load(write(tmp_path / name, f"prompt{mark}completion\na, b{mark}c\n"))
        assert (rows.rows[0].prompt, rows.rows[0].completion) == ("a, b", "c")


def test_a_header_with_a_name_twice_is_refused(tmp_path):
    with pytest.raises(DataError, match="'text' is there twice"):
        load(write(tmp_path / "a.csv", "text,text\na,b\n"))


def test_a_long_cell_is_no_error(tmp_path):
    assert len(load(write(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n")).rows[0].text) == 200_000


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ('[{"text": "a"},\n {"text": "b" "c"}]', 2, 15),
        ('[{"text": "a"}\n {"text": "b"}]', 2, 2),
        ('[{"text": "a"},\n]', 1, 15),
        ('[{"text": "a"}', 1, 15),
        ('[{"text": "a"}] x', 1, 17),
    ],
)
def test_a_fault_in_a_json_array_has_line_and_column(tmp_path, text, line, column):
    rows = load(write(tmp_path / "a.json", text))
    (finding,) = [f for f in rows.findings if f.severity == "error"]
    assert (finding.code, finding.where.line, finding.where.column) == ("json-syntax", line, column)
    assert rows.rows[0].text == "a"


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}", '"text"', "5", "null", "[]"])
def test_odd_json_lines_are_findings(tmp_path, line):
    rows = load(write(tmp_path / "a.jsonl", '{"text": "a"}\n' + line + "\n"))
    assert [r.number for r in rows.rows] == [1] and len(faults(rows)) == 1 and faults(rows)[0][1] == (2,)


@LOOSE
@given(st.binary(max_size=300), st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt"]))
def test_any_bytes_give_rows_findings_or_a_clear_error(tmp_path, data, suffix):
    try:
        rows = load(write(tmp_path / f"a{suffix}", data))
    except CrosstuneError as error:
        assert error.problem and error.fix
    else:
        assert rows.rows or faults(rows)


def test_good_files_broken_at_random_never_give_a_traceback(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [
        {"messages": [{"role": "user", "content": f"Frage {i}?"}, {"role": "assistant", "content": "größer"}]}
        for i in range(9)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "good.parquet")
    good = {
        ".parquet": (tmp_path / "good.parquet").read_bytes(), ".jsonl": "\n".join(map(json.dumps, table)).encode(),
        ".json": json.dumps(table, ensure_ascii=False).encode(),
        ".csv": csv_text([{"prompt": "a, b", "completion": 'say "c"\n'}] * 5).encode(),
    }  # fmt: skip
    source = random.Random(0)
    for turn in range(400):
        suffix = source.choice(list(good))
        data = bytearray(good[suffix])
        for _ in range(source.randint(1, 4)):
            data[source.randrange(len(data))] = source.randrange(256)
        if turn % 3 == 0:
            del data[source.randrange(len(data)) :]
        try:
            load(write(tmp_path / f"a{suffix}", bytes(data)))
        except CrosstuneError as error:
            assert error.fix


@LOOSE
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(
                        ["messages", "role", "content", "from", "value", "text", "prompt", "completion", "instruction",
                         "output", "input", "history", "system", "tool_calls", "x"]), x, max_size=4), max_leaves=12))  # fmt: skip
def test_any_json_value_is_a_row_or_a_fault(value):
    items = list(read_rows([talk(("user", "a")), value], Data(path="x")))
    assert all(isinstance(item, Row | Finding) for item in items)
    row_two = [
        i
        for i in items
        if (isinstance(i, Row) and i.number == 2)
        or (isinstance(i, Finding) and i.rows == (2,) and i.severity == "error")
    ]
    assert len(row_two) == 1
