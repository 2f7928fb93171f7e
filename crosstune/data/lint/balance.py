"""Classes and languages of very different frequency. Notes: what is rare may be meant to be."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.load import Row
from crosstune.errors import Finding, Place

LABEL_COLUMNS = ("label", "class", "category", "intent")
MOST_CLASSES = 50  # a column with more values is no class
RATIO = 10
FEWEST_ROWS = 20
RARE_SHARE = 0.1
FEWEST_KNOWN = 10  # rows whose language can be told: one in ten is then a single row
LOOKED_AT = 20_000  # rows whose language is told; later ones cost time and change nothing
FIRST_CHARACTERS = 600
# The commonest words; those that two of these languages share are taken out below.
COMMON_WORDS = {
    "English": "the and of is that it was for with are this have not you they which what",
    "German": "und der die das ist nicht ein eine mit sich auf auch werden wird dem den zu",
    "French": "le les des est une dans que pour pas avec sur qui sont du nous vous cette",
    "Spanish": "el los las una por con para que del como más pero fue este esta son muy",
    "Italian": "il gli della che di per sono una con non del nel anche come questo è",
    "Portuguese": "os das uma não com para que dos em são mais como foi pelo pela ao você",
    "Dutch": "het een van dat niet zijn voor met ook maar er aan wordt deze hij wij",
    "Polish": "nie się jest na do że jak dla co przez jego oraz być tym które ale",
}
_TIMES = Counter(word for words in COMMON_WORDS.values() for word in words.split())
_LANGUAGE = {word: name for name, words in COMMON_WORDS.items() for word in words.split() if _TIMES[word] == 1}
_LETTERS = re.compile(r"[^\W\d_]+")


class Labels:
    """Counts the values of the first column that looks like a class."""

    def __init__(self, file: str, column: str | None = None) -> None:
        self.file = file
        self.names = (column,) if column else LABEL_COLUMNS
        self.counts: dict[str, Counter[str]] = {}
        self.first: dict[tuple[str, str], list[int]] = {}  # (column, class) → its first rows

    def add(self, row: Row) -> None:
        for name in self.names:
            value = row.columns.get(name)
            if isinstance(value, str | int):
                counts, value = self.counts.setdefault(name, Counter()), str(value)
                if len(counts) > MOST_CLASSES:
                    continue
                counts[value] += 1
                if counts[value] <= FEWEST_ROWS:
                    self.first.setdefault((name, value), []).append(row.number)

    def findings(self) -> Iterator[Finding]:
        for name, counts in self.counts.items():
            if not 2 <= len(counts) <= MOST_CLASSES or sum(counts.values()) < FEWEST_ROWS:
                continue
            (most, many), (least, few) = counts.most_common()[0], counts.most_common()[-1]
            if many > RATIO * few:
                message = f"{name}: {most!r} has {many:,} rows, {least!r} has {few:,}"
                rows = self.first[name, least]
                finding = FAULTS["label-imbalance"].found(message, rows, Place(self.file, field=name))
                yield replace(finding, count=few)


class Languages:
    """Tells the language of the first rows by script and common words."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.looked_at = 0
        self.counts: Counter[str] = Counter()
        self.rare: dict[str, list[int]] = {}

    @property
    def is_listening(self) -> bool:
        return self.looked_at < LOOKED_AT

    def add(self, number: int, text: str) -> None:
        self.looked_at += 1
        language = language_of(text[:FIRST_CHARACTERS])
        if language:
            self.counts[language] += 1
            numbers = self.rare.setdefault(language, [])
            if len(numbers) <= RARE_SHARE * LOOKED_AT:
                numbers.append(number)

    def findings(self) -> Iterator[Finding]:
        known = sum(self.counts.values())
        if known < FEWEST_KNOWN:
            return
        most, many = self.counts.most_common(1)[0]
        rows = sorted(row for name, numbers in self.rare.items() if name != most for row in numbers)
        if rows and many >= (1 - RARE_SHARE) * known:
            others = ", ".join(f"{name} {count:,}" for name, count in self.counts.most_common()[1:6])
            message = f"{many:,} of {known:,} rows are {most}; the others: {others}"
            yield FAULTS["language-mix"].found(message, rows, Place(self.file))


def language_of(text: str) -> str:
    """A language or script, or "" where a few words or digits don't tell."""
    words = _LETTERS.findall(text.lower())
    if not words:
        return ""
    if not text.isascii():
        scripts = Counter(_script(character) for word in words for character in word)
        script, letters = scripts.most_common(1)[0]
        if script != "Latin":
            return script if letters >= 5 else ""
    hits = Counter(_LANGUAGE[word] for word in words if word in _LANGUAGE).most_common(2)
    best, first = hits[0] if hits else ("", 0)
    second = hits[1][1] if len(hits) > 1 else 0
    # Three common words of one language, and twice as many as of any other: titles, names and code tell nothing.
    return best if first >= 3 and first >= 2 * second else ""


@lru_cache(maxsize=4096)
def _script(character: str) -> str:
    name = unicodedata.name(character, "").split(" ")[0]
    return {"CJK": "Chinese or Japanese", "HIRAGANA": "Chinese or Japanese", "KATAKANA": "Chinese or Japanese",
            "HANGUL": "Korean"}.get(name, name.capitalize())  # fmt: skip
