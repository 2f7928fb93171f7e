"""What stands in the text of one row and shouldn't: blanks, JSON in JSON, damaged characters, secrets, addresses.

Each check names the needles without which it can't find anything; the pass over the data looks for those in the text
of some thousand rows at once, and calls the check only where one occurs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.load import Row
from crosstune.errors import Finding

Parts = Sequence[tuple[str, str, str]]  # (field, role, text) of each piece of text in a row


def parts_of(row: Row) -> Parts:
    """Every piece of text that reaches the model, with the name of its field."""
    if row.shape == "messages":
        return [(f"messages[{i}].content", turn.role, turn.content) for i, turn in enumerate(row.turns)]
    if row.shape == "prompt":
        return [("prompt", "user", row.prompt), ("completion", "assistant", row.completion)]
    return [("text", "", row.text)]


def excerpt(text: str, start: int = 0, *, width: int = 40) -> str:
    """A few characters around `start`, on one line."""
    begin = max(0, start - width // 4)
    piece = text[begin : begin + width].replace("\n", "⏎")
    return ("…" if begin else "") + piece + ("…" if begin + width < len(text) else "")


def check_empty_response(row: Row, parts: Parts) -> Iterable[Finding]:
    """An answer of nothing, or of blanks and line breaks. A turn that calls tools may be silent."""
    for place, (field, role, text) in enumerate(parts):
        if role == "user" or text.strip():
            continue
        if role == "assistant" and not (row.shape == "messages" and row.turns[place].extra.get("tool_calls")):
            yield _found(
                "empty-response", row, field, "the answer is empty" if not text else "the answer is only blanks"
            )
        elif role == "":
            yield _found("empty-response", row, field, "the text is empty")


def check_empty_prompt(row: Row, parts: Parts) -> Iterable[Finding]:
    """A question of nothing."""
    for field, role, text in parts:
        if role == "user" and not text.strip():
            yield _found("empty-prompt", row, field, "the prompt is empty")


def check_nested_json(row: Row, parts: Parts) -> Iterable[Finding]:
    """A whole conversation written as a JSON string inside a field. Other JSON is an ordinary answer."""
    for field, _, text in parts:
        stripped = text.strip()
        if stripped[:1] in ("[", "{") and ('"content"' in stripped or '"value"' in stripped) and _holds_turns(stripped):
            yield _found("nested-json", row, field, f"holds a conversation as JSON text: {excerpt(stripped)!r}")


def _holds_turns(text: str) -> bool:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if isinstance(value, dict):
        value = next((value[key] for key in ("messages", "conversations") if key in value), [value])
    return isinstance(value, list) and bool(value) and all(_is_turn(turn) for turn in value)


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and any(keys <= value.keys() for keys in ({"role", "content"}, {"from", "value"}))


# UTF-8 read as Windows-1252 or Latin-1: "é" becomes "Ã©", "’" becomes "â€™". The second characters are those of the
# commonest letters and quotes; what also occurs in right text (Portuguese "MANHÃ»", "Â" before a blank) is left out.
_SECOND = "[¡-ª¬-º¼-¿€‚ƒ„†‡ˆ‰Š‹ŒŽ‘“•˜™š›œžŸ\u0080-\u009f]"
MOJIBAKE = re.compile(
    rf"Ã{_SECOND}|Å[‚„ˆ‡›™¡¯¼¾]|â€[™œ“”˜¦\u009d]|â\u0080[\u0090-\u00a6]|Â[°£©®·¿¡]|ï»¿|ðŸ[\u0080-\u00bf˜™š›œ]"
)


def check_mojibake(row: Row, parts: Parts) -> Iterable[Finding]:
    """Text decoded with the wrong encoding somewhere before it came here."""
    for field, _, text in parts:
        if match := MOJIBAKE.search(text):
            yield _found("mojibake", row, field, f"{match.group()!r} in {excerpt(text, match.start())!r}")
            return


def check_replacement_character(row: Row, parts: Parts) -> Iterable[Finding]:
    """U+FFFD: a character was lost when the text was decoded."""
    for field, _, text in parts:
        if (place := text.find("\ufffd")) >= 0:
            yield _found("replacement-character", row, field, f"U+FFFD in {excerpt(text, place)!r}")
            return


# C0 without tab, line feed, vertical tab, form feed, carriage return and escape (terminal transcripts); DEL; C1.
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")


def check_control_character(row: Row, parts: Parts) -> Iterable[Finding]:
    """Invisible bytes of binary files and broken exports."""
    for field, _, text in parts:
        if match := CONTROL.search(text):
            place, name = match.start(), f"U+{ord(match.group()):04X}"
            yield _found("control-character", row, field, f"{name} at character {place + 1}: {excerpt(text, place)!r}")
            return


# Shapes that the issuers document: name, first characters, the rest. A word like `password=` proves nothing and is left
# alone. Each is looked for by its first characters, which no ordinary word begins with.
SECRETS = tuple(
    (kind, start, re.compile(rest))
    for kind, start, rest in (
        ("AWS access key", "AKIA", r"[0-9A-Z]{16}\b"),
        ("AWS access key", "ASIA", r"[0-9A-Z]{16}\b"),
        *(("GitHub token", f"gh{kind}_", r"[A-Za-z0-9]{36,}\b") for kind in "pousr"),
        ("GitHub token", "github_pat_", r"[A-Za-z0-9_]{60,}\b"),
        ("GitLab token", "glpat-", r"[A-Za-z0-9_-]{20,}"),
        *(("Slack token", f"xox{kind}-", r"[A-Za-z0-9-]{20,}") for kind in "abprs"),
        ("Anthropic key", "sk-ant-", r"[A-Za-z0-9_-]{40,}"),
        ("OpenAI key", "sk-proj-", r"[A-Za-z0-9_-]{40,}"),
        ("OpenAI key", "sk-", r"[A-Za-z0-9]{32,}\b"),
        ("Google key", "AIza", r"[0-9A-Za-z_-]{35}\b"),
        ("Hugging Face token", "hf_", r"[A-Za-z]{34}\b"),
        *(("Stripe key", f"{kind}_live_", r"[A-Za-z0-9]{20,}") for kind in ("sk", "rk")),
        ("npm token", "npm_", r"[A-Za-z0-9]{36}\b"),
        ("PyPI token", "pypi-AgEIcHlwaS", r"[A-Za-z0-9_-]{40,}"),
        *(
            ("private key", f"-----BEGIN {kind}PRIVATE KEY-----", r"\s+[A-Za-z0-9+/=:,\s-]{40,}")
            for kind in ("", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ")
        ),
        ("JSON web token", "eyJ", r"[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}"),
    )
)
FILLED_IN = re.compile(r"EXAMPLE|example|your|YOUR|placeholder|redacted|REDACTED")


def check_secret(row: Row, parts: Parts) -> Iterable[Finding]:
    """Keys and tokens that a model would learn by heart. Only their first characters are shown."""
    for field, _, text in parts:
        for kind, start, rest in SECRETS:
            at = text.find(start)
            while at >= 0:
                match = rest.match(text, at + len(start))
                if match and not text[at - 1 : at].isalnum() and _looks_issued(text[at : match.end()]):
                    yield _found("secret", row, field, f"looks like a {kind}: {text[at : at + 8]}…")
                    return
                at = text.find(start, at + 1)


def _looks_issued(value: str) -> bool:
    """Not a documented example, nor a row of x's: an issued key has far more than 10 different characters."""
    return not FILLED_IN.search(value) and len(set(value)) > 10


# Letters before and after a domain as registered today: any two-letter country, or one of the common longer ends.
EMAIL = re.compile(
    r"(?<![\w.+/@:-])[A-Za-z0-9][\w.+-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+"
    r"(?:[a-z]{2}|com|org|net|edu|gov|mil|int|info|biz|name|dev|app|cloud|online|site|tech|shop|blog|email)(?![\w(@-]|\.\w)"
)
# Reserved for documentation (RFC 2606, RFC 6761) or filled in by habit; the ssh user of git hosts; no person at all.
NO_PERSON = re.compile(
    r"@(?:[\w-]+\.)*(?:example|test|invalid|localhost)(?:\.\w+)?$"
    r"|@(?:(?:your|my)?-?(?:domain|company)|email|foo|bar|acme)\.(?:com|org|net|io)$"
    r"|^(?:git|hg|svn|no-?reply)@",
    re.IGNORECASE,
)


def check_email_address(row: Row, parts: Parts) -> Iterable[Finding]:
    """Addresses of people."""
    for field, _, text in parts:
        for match in EMAIL.finditer(text) if "@" in text else ():
            if not NO_PERSON.search(match.group()):
                yield _found("email-address", row, field, f"holds the address {_hidden(match.group())}")
                return


def _hidden(address: str) -> str:
    name, _, domain = address.partition("@")
    return f"{name[0]}…@{domain}"


def _found(code: str, row: Row, field: str, message: str) -> Finding:
    return FAULTS[code].found(message, [row.number], replace(row.where, field=field))


@dataclass(frozen=True, slots=True)
class TextCheck:
    """A check and what must occur in the text for it to find anything (none: always called)."""

    check: Callable[[Row, Parts], Iterable[Finding]]
    needles: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None

    def may_find(self, text: str) -> bool:
        if self.pattern is not None:
            return self.pattern.search(text) is not None
        return not self.needles or any(needle in text for needle in self.needles)


TEXT_CHECKS = (
    TextCheck(check_nested_json, ('"content"', '"value"')),
    TextCheck(check_mojibake, pattern=MOJIBAKE),
    TextCheck(check_replacement_character, ("\ufffd",)),
    TextCheck(check_control_character, pattern=CONTROL),
    TextCheck(check_secret, tuple(start for _, start, _ in SECRETS)),
    TextCheck(check_email_address, ("@",)),
)
