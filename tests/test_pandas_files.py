"""Files as pandas writes them when nothing is said, read as pandas reads them, or refused with the way to write rows."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from crosstune.data.load import load_rows
from crosstune.errors import DataError
from crosstune.recipe.sections import Data

FRAME = pd.DataFrame({"prompt": ["a b", "c, d", 'e "f"'], "completion": ["g", "h", "i"], "label": ["x", "y", "x"]})


def load(path):
    return load_rows(path, Data(path=str(path)))


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("index", [True, False])
def test_a_frames_csv_is_read_as_pandas_reads_it(tmp_path, mark, index):
    path = tmp_path / "rows.csv"
    FRAME.to_csv(path, sep=mark, index=index)
    rows, theirs = load(path), pd.read_csv(path, sep=mark, dtype=str)
    assert [[row.prompt, row.completion] for row in rows.rows] == theirs[["prompt", "completion"]].values.tolist()
    for column in set(theirs.columns) - {"prompt", "completion"}:
        assert rows.column(column, option="folds.by") == list(theirs[column])


def test_a_nameless_column_elsewhere_is_still_refused_when_there_are_two(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,,\na,b,c,d\n")
    with pytest.raises(DataError, match="has no name"):
        load(path)


@pytest.mark.parametrize("orient", ["columns", "list"])
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_frame_written_by_columns_is_refused_with_the_way_to_write_rows(tmp_path, orient, suffix):
    path = tmp_path / f"rows.{suffix}"
    path.write_text(FRAME.to_json() if orient == "columns" else json.dumps(FRAME.to_dict("list")))
    with pytest.raises(DataError, match="3 values are columns of 3 cells") as refused:
        load(path)
    assert "orient='records', lines=True" in refused.value.fix
    FRAME.to_json(path, orient="records", lines=True)
    assert len(load(path)) == 3


def test_rows_under_a_key_are_refused_with_the_key(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": "1", "data": FRAME.to_dict("records")}))
    with pytest.raises(DataError, match="its 3 rows lie under the key 'data'") as refused:
        load(path)
    assert "jq -c '.data[]'" in refused.value.fix


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tags": ["x", "y"]},
        {"prompt": "a", "completion": "b", "tags": ["x", "y"]},
        {"text": "a"},
    ],
)
def test_a_file_of_one_row_is_no_table(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert len(load(path)) == 1


def test_names_that_differ_in_capitals_are_told_with_the_options_that_take_them(tmp_path):
    path = tmp_path / "rows.csv"
    FRAME.rename(columns=str.capitalize).to_csv(path, index=False)
    with pytest.raises(DataError, match="no known shape") as refused:
        load(path)
    assert "data.prompt=Prompt data.completion=Completion" in refused.value.fix
    named = load_rows(path, Data(path=str(path), prompt="Prompt", completion="Completion"))
    assert [row.completion for row in named.rows] == list(FRAME["completion"])
