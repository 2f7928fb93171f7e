"""A clean data set in the making, which a break changes at a place that its random generator chooses."""

from __future__ import annotations

import builtins
import csv
import inspect
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

SHAPES = ("messages", "sharegpt", "alpaca", "prompt", "text", "csv")
Row = dict[str, Any]


def real_rows() -> list[tuple[str, str]]:
    """Question and answer: what Python's built-ins say of themselves."""
    rows = []
    for name, member in sorted(vars(builtins).items()):
        doc = inspect.getdoc(member) if callable(member) else None
        if doc and not name.startswith("_"):
            answer = re.sub(r"\s+", " ", doc.split("\n\n")[0]).strip()
            rows.append((f"What is {name} in Python?", f"{name}: {answer[:120].strip()}"))
    return rows


REAL = real_rows()


@dataclass
class Bed:
    """A clean data set of one shape, and what a break says of it."""

    shape: str
    rng: Random
    rows: list[Row] = field(default_factory=list)
    lines: list[bytes] | None = None  # set by breaks of the bytes
    content: bytes | None = None  # set by breaks of the whole file
    options: dict[str, Any] = field(default_factory=dict)  # of the data section
    overrides: list[str] = field(default_factory=list)  # of the recipe: lint it in place of the file
    needs_tokenizer: bool = False

    def __post_init__(self) -> None:
        chosen = self.rng.sample(REAL, 24)
        self.rows = [self.make(question, answer) for question, answer in chosen]

    def make(self, question: str, answer: str) -> Row:
        """A row of this bed's shape."""
        if self.shape == "messages":
            return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        if self.shape == "sharegpt":
            return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
        if self.shape == "alpaca":
            return {"instruction": question, "input": "", "output": answer}
        if self.shape == "text":
            return {"text": f"Question: {question}\nAnswer: {answer}"}
        keys = ("question", "answer") if self.shape == "csv" else ("prompt", "completion")
        return dict(zip(keys, (question, answer), strict=True))

    @property
    def suffix(self) -> str:
        return ".csv" if self.shape == "csv" else ".jsonl"

    def bytes(self) -> bytes:
        """The file."""
        if self.content is not None:
            return self.content
        return b"".join(self.lines if self.lines is not None else self.as_lines())

    def as_lines(self) -> list[bytes]:
        """One line a row; for CSV the header is the first."""
        if self.shape != "csv":
            return [(json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass") for row in self.rows]
        lines = []
        for cells in (list(self.rows[0]), *(list(row.values()) for row in self.rows)):
            out = io.StringIO()
            csv.writer(out, lineterminator="\n").writerow(cells)
            lines.append(out.getvalue().encode())
        return lines

    # --- places in it --------------------------------------------------------------------------------------------

    def pick(self) -> int:
        """A row, counted from 1."""
        return self.rng.randrange(len(self.rows)) + 1

    def answer(self, row: int, value: Any = ..., *, question: bool = False) -> Any:
        """The answer (or question) of a row; with `value` it is set."""
        record, at = self.rows[row - 1], 0 if question else -1
        if self.shape in ("messages", "sharegpt"):
            record = record["messages" if self.shape == "messages" else "conversations"][at]
            key = "content" if self.shape == "messages" else "value"
        else:
            pair = {
                "alpaca": ("instruction", "output"),
                "prompt": ("prompt", "completion"),
                "csv": ("question", "answer"),
            }
            key = pair[self.shape][at] if self.shape != "text" else "text"
        if value is not ...:
            record[key] = value
        return record[key]

    def insert(self, row: int, piece: str) -> None:
        """Put `piece` between two words of the question or answer."""
        question = self.rng.random() < 0.4
        words = self.answer(row, question=question).split(" ")
        words.insert(self.rng.randrange(len(words) + 1), piece)
        self.answer(row, " ".join(words), question=question)

    def add(self, record: Row) -> int:
        """Put one more row somewhere; its number."""
        at = self.rng.randrange(len(self.rows) + 1)
        self.rows.insert(at, record)
        return at + 1


Expected = tuple[str, tuple[int, ...]]
Break = Callable[[Bed], Expected]
BREAKS: dict[str, tuple[Break, tuple[str, ...]]] = {}
JSON = tuple(shape for shape in SHAPES if shape != "csv")
TURNS = ("messages", "sharegpt")
ASKED = tuple(shape for shape in SHAPES if shape != "text")


def breaks(*shapes: str) -> Callable[[Break], Break]:
    """Register a break for these shapes."""

    def register(function: Break) -> Break:
        BREAKS[function.__name__] = (function, shapes)
        return function

    return register


def turn_of(bed: Bed, speaker: str, text: str) -> Row:
    if bed.shape == "messages":
        return {"role": speaker, "content": text}
    return {"from": {"user": "human", "assistant": "gpt"}.get(speaker, speaker), "value": text}


def turns_of(bed: Bed, row: int) -> list[Row]:
    return next(iter(bed.rows[row - 1].values()))
