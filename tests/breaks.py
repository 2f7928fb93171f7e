"""Ways to break a clean data set, each with the finding that must come of it: `(code, rows)`.

A `Bed` is a clean file in the making: rows of one shape as mappings, then lines, then bytes. A break changes it at a place
that its random generator chooses. Nothing here looks at how lint works.
"""

from __future__ import annotations

import builtins
import csv
import inspect
import io
import json
import re
import string
import unicodedata
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


# --- bytes and syntax ------------------------------------------------------------------------------------------------


@breaks(*SHAPES)
def bad_byte(bed: Bed) -> Expected:
    row = bed.pick()
    bed.lines = bed.as_lines()
    at = row - 1 + (bed.shape == "csv")
    line = bed.lines[at]
    spots = [m.start() for m in re.finditer(rb"[a-z]", line) if m.start() > len(line) // 2]
    spot = bed.rng.choice(spots)
    bed.lines[at] = line[:spot] + bytes([bed.rng.choice([0xE9, 0xFF, 0xC0, 0x80, 0xF5])]) + line[spot + 1 :]
    return "encoding", (row,)


@breaks(*JSON)
def half_a_pair(bed: Bed) -> Expected:
    row = bed.pick()
    bed.insert(row, chr(bed.rng.randrange(0xD800, 0xE000)))
    bed.lines = [(json.dumps(record) + "\n").encode() for record in bed.rows]
    return "lone-surrogate", (row,)


@breaks(*JSON)
def comma_after_the_object(bed: Bed) -> Expected:
    row = bed.pick()
    bed.lines = bed.as_lines()
    bed.lines[row - 1] = bed.lines[row - 1].rstrip() + bed.rng.choice([b",\n", b" , \n"])
    return "json-syntax", (row,)


@breaks(*JSON)
def cut_line(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1  # a cut first line makes the file look pretty-printed: another break
    bed.lines = bed.as_lines()
    line = bed.lines[row - 1].rstrip()
    bed.lines[row - 1] = line[: bed.rng.randrange(1, len(line))] + b"\n"
    return "json-syntax", (row,)


@breaks(*JSON)
def quote_not_escaped(bed: Bed) -> Expected:
    row = bed.pick()
    bed.insert(row, "@@")
    bed.lines = bed.as_lines()
    bed.lines[row - 1] = bed.lines[row - 1].replace(b"@@", b'a "quoted" word')
    return "json-syntax", (row,)


@breaks(*JSON)
def two_objects_on_a_line(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1
    bed.lines = bed.as_lines()
    bed.lines[row - 1] = bed.lines[row - 1].rstrip() + b" " + bed.lines[row - 1]
    return "json-syntax", (row,)


@breaks(*JSON)
def python_in_place_of_json(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1
    bed.lines = bed.as_lines()
    bed.lines[row - 1] = (repr(bed.rows[row - 1]) + "\n").encode()
    return "json-syntax", (row,)


@breaks(*JSON)
def pretty_printed(bed: Bed) -> Expected:
    bed.content = "\n".join(json.dumps(row, indent=bed.rng.choice([1, 2, 4])) for row in bed.rows).encode()
    return "json-syntax", (1,)


@breaks("csv")
def quote_never_closed(bed: Bed) -> Expected:
    row = bed.pick()
    bed.lines = bed.as_lines()
    question, _, answer = bed.lines[row].rstrip().partition(b"?,")
    bed.lines[row] = question + b'?,"' + answer.strip(b'"').replace(b'"', b"") + b"\n"
    for later in range(row + 1, len(bed.lines)):
        bed.lines[later] = bed.lines[later].replace(b'"', b"")
    return "csv-syntax", (row,)


@breaks("csv")
def cell_too_many(bed: Bed) -> Expected:
    row = bed.pick()
    bed.lines = bed.as_lines()
    bed.lines[row] = bed.lines[row].rstrip() + b"," * bed.rng.randrange(1, 4) + b"more\n"
    return "csv-cells", (row,)


@breaks("csv")
def cell_missing(bed: Bed) -> Expected:
    row = bed.pick()
    bed.lines = bed.as_lines()
    bed.lines[row] = bed.lines[row].split(b"?,")[0] + b"?\n"
    return "csv-cells", (row,)


@breaks("csv")
def word_for_missing(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, bed.rng.choice(["null", "NA", "None", "nan", "NaN", "N/A", "NULL"]))
    return "words-kept", (row,)


@breaks("csv")
def digits(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, bed.rng.choice(["007", "1e3", "00", "12345678901234567890", "0123", "5E10"]))
    return "digits-kept", (row,)


@breaks(*JSON)
def big_integer(bed: Bed) -> Expected:
    row = bed.pick()
    for record in bed.rows:
        record["id"] = bed.rng.randrange(1000)
    bed.rows[row - 1]["id"] = 2**53 + bed.rng.randrange(1, 2**70)
    return "big-integer", (row,)


@breaks(*SHAPES)
def byte_order_mark(bed: Bed) -> Expected:
    bed.content = b"\xef\xbb\xbf" + bed.bytes()
    return "bom", ()


@breaks(*SHAPES)
def windows_line_ends(bed: Bed) -> Expected:
    bed.content = bed.bytes().replace(b"\n", b"\r\n")
    return "crlf", ()


@breaks(*SHAPES)
def nothing_in_it(bed: Bed) -> Expected:
    head = bed.as_lines()[0] if bed.shape == "csv" else b""
    bed.content = head + bed.rng.choice([b"", b"\n", b"\n\n \n" if not head else b"\n"])
    return "empty-file", ()


# --- rows ------------------------------------------------------------------------------------------------------------


@breaks(*JSON)
def value_of_another_type(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, bed.rng.choice([42, 4.5, True, ["a", "b"], {"a": 1}, [], {}]))
    return "wrong-type", (row,)


@breaks(*JSON)
def null(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, None)
    return "missing-content", (row,)


@breaks("messages", "sharegpt")
def key_missing(bed: Bed) -> Expected:
    row = bed.pick()
    turn = next(iter(bed.rows[row - 1].values()))[bed.rng.randrange(2)]
    del turn["content" if bed.shape == "messages" else "value"]
    return "missing-content", (row,)


@breaks("messages", "sharegpt")
def unknown_speaker(bed: Bed) -> Expected:
    row = bed.pick()
    turn = next(iter(bed.rows[row - 1].values()))[bed.rng.randrange(2)]
    turn["role" if bed.shape == "messages" else "from"] = bed.rng.choice(
        ["bot", "Assistant ", "USER", "", "narrator", "ai"]
    )
    return "unknown-role", (row,)


@breaks("messages", "sharegpt")
def conversation_as_a_string(bed: Bed) -> Expected:
    row = bed.pick()
    record = bed.rows[row - 1]
    name = next(iter(record))
    record[name] = json.dumps(record[name])
    return "wrong-type", (row,)


@breaks("messages", "sharegpt")
def no_turns(bed: Bed) -> Expected:
    row = bed.pick()
    record = bed.rows[row - 1]
    record[next(iter(record))] = []
    return "empty-conversation", (row,)


@breaks(*JSON)
def row_that_is_no_object(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1
    bed.lines = bed.as_lines()
    bed.lines[row - 1] = bed.rng.choice([b"[1, 2]\n", b"7\n", b'"text"\n', b"null\n", b"true\n"])
    return "wrong-type", (row,)


@breaks(*JSON)
def row_of_no_known_shape(bed: Bed) -> Expected:
    row = bed.pick()
    bed.rows[row - 1] = {"words": "zinc", "more": 1}
    return "unknown-shape", (row,)


@breaks("messages", "sharegpt", "alpaca", "prompt")
def row_of_another_shape(bed: Bed) -> Expected:
    return "other-shape", (bed.add({"text": "Plain words about nothing in particular."}),)


@breaks("text")
def conversation_among_texts(bed: Bed) -> Expected:
    turns = [{"role": "user", "content": "Name one metal."}, {"role": "assistant", "content": "zinc"}]
    return "other-shape", (bed.add({"messages": turns}),)


@breaks(*SHAPES)
def blank_answer(bed: Bed) -> Expected:
    row = bed.pick()
    blanks = ["", " ", "\n\n", "\t \n", "\u00a0", "\u3000 "]
    bed.answer(row, bed.rng.choice(blanks))
    return "empty-response", (row,)


@breaks("messages", "sharegpt", "prompt", "csv", "alpaca")
def blank_question(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(row, bed.rng.choice(["", "  ", "\n"]), question=True)
    return "empty-prompt", (row,)


def _turn(bed: Bed, speaker: str, text: str) -> Row:
    if bed.shape == "messages":
        return {"role": speaker, "content": text}
    return {"from": {"user": "human", "assistant": "gpt"}.get(speaker, speaker), "value": text}


def _turns(bed: Bed, row: int) -> list[Row]:
    return next(iter(bed.rows[row - 1].values()))


@breaks(*TURNS)
def question_twice(bed: Bed) -> Expected:
    row = bed.pick()
    _turns(bed, row).insert(0, _turn(bed, "user", "One thing first."))
    return "consecutive-roles", (row,)


@breaks(*TURNS)
def answer_twice(bed: Bed) -> Expected:
    row = bed.pick()
    _turns(bed, row).append(_turn(bed, "assistant", "And one thing more."))
    return "consecutive-roles", (row,)


@breaks(*TURNS)
def assistant_begins(bed: Bed) -> Expected:
    row = bed.pick()
    _turns(bed, row).insert(0, _turn(bed, "assistant", "Hello."))
    return "assistant-first", (row,)


@breaks(*TURNS)
def system_turn_late(bed: Bed) -> Expected:
    row = bed.pick()
    _turns(bed, row).insert(bed.rng.choice([1, 2]), _turn(bed, "system", "Be brief."))
    return "late-system", (row,)


@breaks(*TURNS)
def ends_with_the_user(bed: Bed) -> Expected:
    row = bed.pick()
    _turns(bed, row).append(_turn(bed, "user", "Thanks."))
    return "ends-without-assistant", (row,)


@breaks(*TURNS)
def nobody_answers(bed: Bed) -> Expected:
    row = bed.pick()
    del _turns(bed, row)[-1]
    return "no-assistant-turn", (row,)


# --- text ------------------------------------------------------------------------------------------------------------

TOKENS = {
    "AKIA": (string.ascii_uppercase + string.digits, 16), "ghp_": (string.ascii_letters + string.digits, 36),
    "glpat-": (string.ascii_letters + string.digits, 20), "xoxb-": (string.digits + string.ascii_letters, 40),
    "sk-": (string.ascii_letters + string.digits, 48), "sk-proj-": (string.ascii_letters + string.digits + "_-", 60),
    "sk-ant-": (string.ascii_letters + string.digits + "_-", 80), "AIza": (string.ascii_letters + string.digits, 35),
    "hf_": (string.ascii_letters, 34), "sk_live_": (string.ascii_letters + string.digits, 24),
    "npm_": (string.ascii_letters + string.digits, 36),
    "-----BEGIN RSA PRIVATE KEY-----\n": (string.ascii_letters + string.digits + "+/", 64),
}  # fmt: skip


@breaks(*SHAPES)
def key_in_the_text(bed: Bed) -> Expected:
    row = bed.pick()
    start = bed.rng.choice(list(TOKENS))
    alphabet, length = TOKENS[start]
    bed.insert(row, start + "".join(bed.rng.choices(alphabet, k=length)))
    return "secret", (row,)


@breaks(*SHAPES)
def address_in_the_text(bed: Bed) -> Expected:
    row = bed.pick()
    name = "".join(bed.rng.choices(string.ascii_lowercase, k=6))
    domain = bed.rng.choice(["millpost.org", "mail.weir.co.uk", "lamp-works.de", "shelf.io", "quarry.com"])
    bed.insert(
        row, bed.rng.choice(["{}.lind@{}", "{}@{}", "{}+list@{}", "<{}@{}>", "({}@{})", "{}@{}."]).format(name, domain)
    )
    return "email-address", (row,)


@breaks(*SHAPES)
def wrongly_decoded(bed: Bed) -> Expected:
    row = bed.pick()
    word = bed.rng.choice(["café", "naïve", "Zürich", "señor", "it’s", "“so”", "déjà", "größer", "ångström"])
    bed.insert(row, word.encode().decode("cp1252", "replace").replace("\ufffd", "\u009d"))
    return "mojibake", (row,)


@breaks(*SHAPES)
def lost_character(bed: Bed) -> Expected:
    row = bed.pick()
    bed.insert(row, "caf\ufffd")
    return "replacement-character", (row,)


@breaks(*SHAPES)
def control_character(bed: Bed) -> Expected:
    row = bed.pick()
    codes = [1, 2, 7, 8, 14, 26, 31, 127, 0x85 + 1, 0x9F] + ([0] if bed.shape != "csv" else [])
    bed.insert(row, "zi" + chr(bed.rng.choice(codes)) + "nc")
    return "control-character", (row,)


@breaks(*JSON)
def conversation_inside_the_text(bed: Bed) -> Expected:
    row = bed.pick()
    turns = [{"role": "user", "content": "Name one metal."}, {"role": "assistant", "content": "zinc"}]
    bed.answer(row, json.dumps(bed.rng.choice([turns, {"messages": turns}, turns[1]])))
    return "nested-json", (row,)


@breaks(*SHAPES)
def another_language(bed: Bed) -> Expected:
    row = bed.pick()
    texts = ["На левой полке стоит чайник.", "水壺在左邊的架子上。", "Ο βραστήρας είναι στο αριστερό ράφι."]
    text = bed.rng.choice(texts)
    bed.answer(row, text)
    if bed.shape != "text":
        bed.answer(row, text[:6] + "?", question=True)
    return "language-mix", (row,)


# --- rows against rows -----------------------------------------------------------------------------------------------


def _copy(record: Row) -> Row:
    return json.loads(json.dumps(record))


def _repeat(bed: Bed, change: Callable[[str], str]) -> Expected:
    row = bed.pick()
    other = _copy(bed.rows[row - 1])
    at = bed.add(other)
    row += at <= row
    for question in (False, True):
        bed.answer(at, change(bed.answer(at, question=question)), question=question)
    return "duplicate-rows", tuple(sorted((row, at)))


@breaks(*SHAPES)
def same_row_again(bed: Bed) -> Expected:
    return _repeat(bed, lambda text: text)


@breaks(*SHAPES)
def same_row_in_another_form(bed: Bed) -> Expected:
    change = bed.rng.choice(
        [str.upper, str.swapcase, lambda text: f"  {text} ".replace(" ", "  "), lambda text: text + "\n"]
    )
    return _repeat(bed, change)


@breaks(*SHAPES)
def same_row_decomposed(bed: Bed) -> Expected:
    row = bed.pick()
    bed.insert(row, "Zürich café")
    other = _copy(bed.rows[row - 1])
    at = bed.add(other)
    row += at <= row
    for question in (False, True):
        bed.answer(at, unicodedata.normalize("NFD", bed.answer(at, question=question)), question=question)
    return "duplicate-rows", tuple(sorted((row, at)))


@breaks(*SHAPES)
def nearly_the_same_row(bed: Bed) -> Expected:
    text = " ".join(answer for _, answer in bed.rng.sample(REAL, 24))
    words = text.split()
    row = bed.pick()
    bed.answer(row, text)
    at = bed.add(_copy(bed.rows[row - 1]))
    row += at <= row
    words[bed.rng.randrange(len(words))] = "otherwise"
    bed.answer(at, " ".join(words))
    return "near-duplicates", tuple(sorted((row, at)))


@breaks(*ASKED)
def two_labels_for_one_question(bed: Bed) -> Expected:
    for row in range(1, len(bed.rows) + 1):
        bed.answer(row, bed.rng.choice(["good", "bad"]))
    row = bed.pick()
    other = _copy(bed.rows[row - 1])
    at = bed.add(other)
    row += at <= row
    bed.answer(at, "good" if bed.answer(at) == "bad" else "bad")
    return "conflicting-answers", tuple(sorted((row, at)))


@breaks(*SHAPES)
def far_longer_row(bed: Bed) -> Expected:
    row = bed.pick()
    bed.answer(
        row, " ".join(f"shelf {i} holds jar {i * bed.rng.randrange(2, 9)}" for i in range(bed.rng.randrange(600, 2000)))
    )
    return "length-outlier", (row,)


@breaks(*JSON)
def rare_class(bed: Bed) -> Expected:
    row = bed.pick()
    name = bed.rng.choice(["label", "class", "category", "intent"])
    for number, record in enumerate(bed.rows, 1):
        record[name] = "scrap" if number == row else "fits"
    return "label-imbalance", (row,)


# --- tokens ----------------------------------------------------------------------------------------------------------


@breaks(*SHAPES)
def control_token_in_the_text(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    tokens = [
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|reserved_special_token_28|>",
        "<|finetune_right_pad_id|>",
    ]
    bed.insert(row, bed.rng.choice(["{}", "word{}", "{}word"]).format(bed.rng.choice(tokens)))
    return "special-token-in-content", (row,)


@breaks("text", "prompt", "csv")
def text_that_brings_its_bos(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    question = bed.shape != "text"
    bed.answer(row, "<|begin_of_text|>" + bed.answer(row, question=question), question=question)
    return "double-bos", (row,)


FOREIGN = (
    "[INST] {} [/INST] {}", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n{} [/INST] {} </s>",
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>", "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n{}",
    "<|user|>\n{}<|end|>\n<|assistant|>\n{}<|end|>", "<｜User｜>{}<｜Assistant｜>{}", "<|start|>user<|message|>{}<|end|><|start|>assistant<|message|>{}",
    "### Instruction:\n{}\n\n### Response:\n{}",
)  # fmt: skip


@breaks(*SHAPES)
def format_of_another_model(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    bed.answer(row, bed.rng.choice(FOREIGN).format("Name one tree.", "larch"))
    return "foreign-template", (row,)


@breaks("text")
def answer_that_is_not_marked(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    bed.options["answer_after"] = bed.rng.choice(["Answer: ", "Answer:"])
    row = bed.pick()
    bed.answer(row, bed.answer(row).replace("Answer:", bed.rng.choice(["Reply:", "answer:", "Answer :"])))
    return "completion-mask-empty", (row,)


@breaks(*SHAPES)
def answer_cut(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    bed.options["max_tokens"] = 400
    row = bed.pick()
    bed.answer(row, "zinc and tin " * bed.rng.randrange(300, 500))
    return "response-truncated", (row,)


@breaks(*ASKED)
def answer_gone(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    bed.options["max_tokens"] = 400
    row = bed.pick()
    bed.answer(row, "zinc and tin " * bed.rng.randrange(300, 500), question=True)
    return "response-fully-truncated", (row,)


@breaks("prompt", "csv")
def blank_at_the_seam(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    bed.answer(row, bed.answer(row, question=True) + " ", question=True)
    bed.answer(row, "The small jar.")  # " The" is one token of the tiny tokenizer
    return "seam-merge", (row,)


@breaks("messages")
def tool_call_that_the_template_drops(bed: Bed) -> Expected:
    bed.needs_tokenizer = True
    row = bed.pick()
    call = {"type": "function", "function": {"name": "depth", "arguments": {"tank": bed.rng.randrange(9)}}}
    _turns(bed, row)[-1]["tool_calls"] = [call]
    return "unsupported-field", (row,)


# --- folds and settings ----------------------------------------------------------------------------------------------


@breaks(*JSON)
def class_too_small(bed: Bed) -> Expected:
    rare = bed.rng.sample(range(1, len(bed.rows) + 1), bed.rng.randrange(1, 5))
    for number, record in enumerate(bed.rows, 1):
        record["sort"] = "scrap" if number in rare else "fits"
    bed.overrides = ["folds.kind=stratified", "folds.by=sort", "folds.k=5"]
    return "class-smaller-than-k", tuple(sorted(rare))


@breaks(*JSON)
def groups_too_few(bed: Bed) -> Expected:
    for record in bed.rows:
        record["well"] = bed.rng.choice("abc")
    bed.overrides = ["folds.kind=group", "folds.group=well", "folds.k=5"]
    return "too-few-groups", ()


@breaks(*JSON)
def group_missing(bed: Bed) -> Expected:
    row = bed.pick()
    for number, record in enumerate(bed.rows, 1):
        record["well"] = None if number == row else number % 8
    bed.overrides = ["folds.kind=group", "folds.group=well", "folds.k=4"]
    return "missing-group", (row,)


@breaks(*JSON)
def same_row_on_both_sides(bed: Bed) -> Expected:
    _, rows = _repeat(bed, str.lower)
    for number, record in enumerate(bed.rows, 1):
        record["fold"] = number % 3 if number not in rows else rows.index(number)
    bed.overrides = ["folds.kind=column", "folds.by=fold"]
    return "duplicate-across-folds", rows


@breaks(*JSON)
def rows_out_of_time(bed: Bed) -> Expected:
    row = bed.rng.randrange(1, len(bed.rows)) + 1
    for number, record in enumerate(bed.rows, 1):
        record["date"] = f"2024-03-{number if number != row else number - 1:02d}"
    bed.rows[row - 1]["date"] = "2023-01-01"
    bed.overrides = ["folds.kind=time-series", "folds.k=3"]
    return "time-order", (row,)


@breaks(*JSON)
def more_folds_than_rows(bed: Bed) -> Expected:
    bed.overrides = [f"folds.k={bed.rng.randrange(25, 60)}"]
    return "k-larger-than-rows", ()


SETTINGS = (
    ("lora.alpha={}", (2000, 10_000, 0.01), "adapter-scale"), ("train.learning_rate={}", (0.05, 1.0, 1e-8), "learning-rate"),
    ("lora.dropout={}", (0.0001, 0.7, 0.9), "dropout-without-effect"), ("train.warmup={}", (500, 10_000), "warmup-never-ends"),
    ("lora.targets=[q_proj, {}]", ("v_porj", "value", "q_porj", "all_linear"), "target-not-found"),
    ("lint.allow=[{}]", ("duplicate-row", "anything", "double_bos"), "unknown-code"),
    ("folds.repeats={}", (3, 7), "setting-without-effect"), ("folds.test_share={}", (0.3, 0.5), "setting-without-effect"),
)  # fmt: skip


@breaks(*JSON)
def setting(bed: Bed) -> Expected:
    option, values, code = bed.rng.choice(SETTINGS)
    bed.overrides = [option.format(bed.rng.choice(values)), "folds.k=3"]
    return code, ()


@breaks(*JSON)
def packed_to_nothing(bed: Bed) -> Expected:
    bed.overrides = ["data.packing=true", f"train.batch_size={bed.rng.randrange(8, 32)}", "folds.k=3"]
    return "packing-few-rows", ()
