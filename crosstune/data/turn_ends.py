"""How a chat template ends a turn: read off two rendered turns with marks in place of their contents.

Strings only; knows nothing of tokenizers. P user X user Y stand for what comes before, between and after the contents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """Text that closes an assistant turn, and what the template writes after the last one although nobody asked."""

    mid: str = ""  # after a turn that others follow
    last: str = ""  # after the last turn
    tail: str = ""  # the header of one more assistant turn


def read_ends(parts: Sequence[str], special: re.Pattern[str] | None, *, opens: bool, eos: str) -> TurnEnds:
    """`parts` of two turns: before the first question, then what stands after the first question, the first answer, the
    second question and the second answer. `opens`: the template opens a turn only when asked to."""
    before, _, after_mid, after_question, after_last = parts
    mid, last = pieces(after_mid, special), pieces(after_last, special)
    both = _common(mid, last)
    if not opens:
        # What stands before both questions is how a user turn is opened.
        backwards = zip(before[::-1], after_mid[::-1], strict=False)
        header = sum(1 for _ in takewhile(lambda two: two[0] == two[1], backwards))
        end = _bounded(pieces(after_mid[: len(after_mid) - header], special), both, special, eos)
        rest = pieces(after_last[len(end) :], special)
        if "".join(rest[:2]).strip() and "".join(rest[:2]) in after_question:
            return TurnEnds(end, end, after_last[len(end) :])
    end = upto_last(both, special)
    if end:
        return TurnEnds(end, end)
    # The two ends differ. A control token that stands before the first question, too, may open the user's turn.
    end, first = upto_last(last, special), _first(mid, special)
    return TurnEnds(first if end or first.strip() not in before else "", end)


def pieces(text: str, special: re.Pattern[str] | None) -> list[str]:
    """The text cut into control tokens and what stands between them."""
    if special is None:
        return [text] if text else []
    cut, done = [], 0
    for match in special.finditer(text):
        cut += [text[done : match.start()], match.group()]
        done = match.end()
    return [piece for piece in [*cut, text[done:]] if piece]


def upto_last(parts: list[str], special: re.Pattern[str] | None) -> str:
    """Everything up to the last control token; "" if there is none."""
    places = [i for i, part in enumerate(parts) if _is_special(part, special)]
    return "".join(parts[: places[-1] + 1]) if places else ""


def last_special(text: str, special: re.Pattern[str] | None) -> str:
    """The last control token in a text, or ""."""
    found = [match.group() for match in special.finditer(text)] if special is not None else []
    return found[-1] if found else ""


def _bounded(low: list[str], high: list[str], special: re.Pattern[str] | None, eos: str) -> str:
    """Where the template always opens the next turn, the end lies between what no user's header repeats and what both
    turns share; the EOS token belongs to it."""
    low = _common(low, high)
    if eos in high:
        low = high[: max(len(low), len(high) - high[::-1].index(eos))]
    return upto_last(low, special) or _first(high, special)


def _first(parts: list[str], special: re.Pattern[str] | None) -> str:
    """The first control token with the white space before it; "" if text comes first."""
    for i, part in enumerate(parts[:2]):
        if _is_special(part, special):
            return "".join(parts[: i + 1])
        if part.strip():
            break
    return ""


def _common(one: list[str], other: list[str]) -> list[str]:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return one[:count]


def _is_special(part: str, special: re.Pattern[str] | None) -> bool:
    return special is not None and special.fullmatch(part) is not None
