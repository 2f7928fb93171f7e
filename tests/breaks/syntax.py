"""Broken bytes and syntax: JSON lines and CSV cells that can't be read, or not as they were meant."""

from __future__ import annotations

import json
import re

from tests.breaks.bed import JSON, SHAPES, Bed, Expected, breaks


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
