"""Faults of a file and of the way its rows are written. Found while reading (`crosstune.data.load`)."""

from __future__ import annotations

from crosstune.data.lint.fault import Fault


def chat(*turns: str) -> str:
    """A line of JSONL from 'role: text' pieces, for the examples of the catalogue."""
    messages = ", ".join(
        f'{{"role": "{role}", "content": "{text}"}}' for role, _, text in (turn.partition(": ") for turn in turns)
    )
    return f'{{"messages": [{messages}]}}\n'


ZINC = chat("user: Name one metal.", "assistant: zinc")
LARCH = chat("user: Name one tree.", "assistant: larch")
GOOD = ZINC + LARCH

FILE_FAULTS = (
    Fault(
        "unreadable",
        "error",
        "No file of rows",
        "A missing file, a directory, a picture, UTF-16, columns that no row has: there is nothing to read.",
        "See the message.",
        bad=b"\x1f\x8b\x08\x00 packed",
        good=GOOD,
    ),
    Fault(
        "encoding",
        "error",
        "A byte that is not UTF-8",
        "Read with another encoding the character is wrong; replaced by U+FFFD the model learns to print U+FFFD.",
        "Save the file as UTF-8, or mend the line.",
        bad=ZINC.encode() + LARCH.encode().replace(b"larch", b"caf\xe9"),
        good=ZINC + LARCH.replace("larch", "café"),
        source="https://github.com/WangRongsheng/MedQA-ChatGLM/issues/2",
    ),
    Fault(
        "bom",
        "note",
        "The file begins with a byte order mark",
        "It isn't part of the first row. Readers that keep it make the first key unknown.",
        "Nothing: it is left out.",
        bad=b"\xef\xbb\xbf" + GOOD.encode(),
        good=GOOD,
        source="https://github.com/microsoft/promptflow/pull/4172",
    ),
    Fault(
        "crlf",
        "note",
        "Lines end in CR LF",
        "A CR that stays behind becomes a token at the end of every answer.",
        "Nothing: it is left out.",
        bad=GOOD.replace("\n", "\r\n").encode(),
        good=GOOD,
    ),
    Fault(
        "lone-surrogate",
        "error",
        "Half of a surrogate pair",
        "It is no character: it can't be encoded as UTF-8, and tokenizers fail on it in the middle of a run.",
        "Write the whole pair or the character itself.",
        bad=ZINC.replace("zinc", "\\ud83e"),
        good=ZINC.replace("zinc", "\\ud83e\\udd8a"),
        source="https://github.com/huggingface/transformers/issues/8886",
    ),
    Fault(
        "json-syntax",
        "error",
        "A line that is not JSON",
        "Loaders stop at the first such line or skip it; here each is named.",
        "Mend the line at the column named. A pretty-printed file: one object a line (jq -c . FILE), or one list.",
        bad=ZINC.replace("}]}", "}]},") + LARCH,
        good=GOOD,
        source="https://github.com/baidubce/bce-qianfan-sdk/issues/332",
    ),
    Fault(
        "csv-syntax",
        "error",
        "A quote in a CSV file that is never closed, or text after a closing quote",
        "Rows swallow the ones after them.",
        'Close the quote; a quote inside a quoted cell is written twice ("").',
        bad='question,answer\nOne?,"yes\nTwo?,no\n',
        good="question,answer\nOne?,yes\nTwo?,no\n",
        file="rows.csv",
        source="https://github.com/deepset-ai/haystack/issues/12784",
    ),
    Fault(
        "csv-cells",
        "error",
        "A CSV row with more or fewer cells than the header",
        "Cells slide into the wrong columns.",
        "Put cells that hold the delimiter or a line break in quotes.",
        bad="question,answer\nSalt or both?,both, please\n",
        good='question,answer\nSalt or both?,"both, please"\n',
        file="rows.csv",
    ),
    Fault(
        "wrong-type",
        "error",
        "A list, number or object where text is due",
        "Loaders turn it into text in their own way ('[…]', '42') or fail at a row they don't name.",
        "Write it as text, in quotes.",
        bad=ZINC.replace('"zinc"', "42"),
        good=ZINC.replace('"zinc"', '"42"'),
        source="https://github.com/huggingface/datasets/issues/6460",
    ),
    Fault(
        "unknown-shape",
        "error",
        "A row with none of the known columns",
        "It would be left out, or be trained as something else.",
        "Give it messages, prompt and completion, instruction and output, or text.",
        bad=GOOD + '{"words": "zinc"}\n',
        good=GOOD,
    ),
    Fault(
        "other-shape",
        "warning",
        "Rows of another shape than most of the file",
        "A text is learned whole, of a conversation only the answers: one file would be trained in two ways.",
        "Check that these rows belong here; they are read as what they are.",
        bad=GOOD + '{"text": "Name one stone: slate"}\n',
        good=GOOD,
        source="https://github.com/axolotl-ai-cloud/axolotl/issues/752",
    ),
    Fault(
        "shape",
        "note",
        "Which shape the rows have, and from which columns that was told",
        "The shape decides what is learned.",
        "If that is wrong, set data.shape.",
        bad="a file of rows with a column messages, and no data.shape",
        good="the same: it is always said",
        file="",
    ),
    Fault(
        "missing-content",
        "error",
        "A message, prompt or answer that is null or not there",
        "Rendered through a template it becomes the word None, or the row fails in the middle of a run.",
        "Give it a text, or remove the row.",
        bad=ZINC.replace('"zinc"', "null"),
        good=ZINC,
        source="https://github.com/axolotl-ai-cloud/axolotl/issues/290",
    ),
    Fault(
        "unknown-role",
        "error",
        "A speaker that no template knows",
        "Templates either fail or write a header that the model has never seen.",
        "Use system, user, assistant or tool.",
        bad=ZINC.replace('"assistant"', '"bot"'),
        good=ZINC,
        source="https://github.com/hiyouga/LlamaFactory/issues/6066",
    ),
    Fault(
        "words-kept",
        "note",
        "Cells that say null, NA, None or nan, kept as text",
        "Other readers make them missing values: the country code of Namibia is NA.",
        "Nothing; if they do mean that a value is missing, remove the rows.",
        bad="question,answer\nCountry code of Namibia?,NA\n",
        good="question,answer\nCountry code of Chad?,TD\n",
        file="rows.csv",
        source="https://github.com/huggingface/datasets/issues/4467",
    ),
    Fault(
        "digits-kept",
        "note",
        "Cells of digits, kept as text",
        "Other readers make 007 the number 7 and 1e3 the number 1000.0.",
        "Nothing.",
        bad="question,answer\nCode?,007\n",
        good="question,answer\nCode?,A7\n",
        file="rows.csv",
        source="https://github.com/deepset-ai/haystack/issues/12784",
    ),
    Fault(
        "big-integer",
        "note",
        "A whole number beyond 2^53 in another column, kept exact",
        "Readers that make the column floating point round it: two identifiers become one.",
        "Nothing.",
        bad=ZINC.replace("]}\n", '], "id": 9007199254740993}\n'),
        good=ZINC.replace("]}\n", '], "id": "9007199254740993"}\n'),
    ),
    Fault(
        "empty-file",
        "error",
        "A file without a row",
        "There is nothing to learn from.",
        "Give the path of a file that has rows.",
        bad="\n\n",
        good=GOOD,
    ),
)
