"""What a text should not hold: keys, addresses, characters that were lost."""

from __future__ import annotations

import json
import string

from tests.breaks.bed import JSON, SHAPES, Bed, Expected, breaks

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
