"""The cache of tokens: what is in it, what makes another one, and what a damaged one does."""

from __future__ import annotations

import numpy as np
import pytest

from crosstune.data.encode import Encoder
from crosstune.data.load import load_rows
from crosstune.data.tokenizer import load_tokenizer
from crosstune.recipe.sections import Data, Model
from tests.encoding import (
    EOT_ID,
    OPEN_ID,
    encode,
    folder,
    said,
)
from tests.tiny import OPEN, TURN


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
