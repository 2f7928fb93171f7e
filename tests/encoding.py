"""What the tests of tokens share: a tokenizer's folder, rows encoded, and slow plain code that does the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from crosstune.data.load import load_rows
from crosstune.data.rows import Rows
from crosstune.data.tokens import Tokens, tokenize
from crosstune.recipe.sections import Data
from tests.tiny import CASES, INSTRUCT

BOS_ID, EOS_ID, PAD_ID, OPEN_ID, CLOSE_ID, EOT_ID = 360, 361, 364, 366, 367, 368


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
