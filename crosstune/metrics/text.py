"""Metrics of generated text: what the model wrote against what the row holds.

Row metrics give one number a row, and a fold's score is their mean; BLEU and chrF are defined on all rows at once.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from crosstune.errors import MissingExtra

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


def exact_match(predicted: str, wanted: str) -> float:
    """1 if the strings are equal, character by character."""
    return float(predicted == wanted)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and extra blanks (SQuAD's evaluation script)."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def normalized_match(predicted: str, wanted: str) -> float:
    """1 if the strings are equal once case, punctuation, articles and extra blanks are taken away."""
    return float(normalize_answer(predicted) == normalize_answer(wanted))


def token_f1(predicted: str, wanted: str) -> float:
    """F1 of the words that both hold, after `normalize_answer` (SQuAD; Rajpurkar et al., arXiv:1606.05250)."""
    one, two = normalize_answer(predicted).split(), normalize_answer(wanted).split()
    if not one or not two:
        return float(one == two)
    shared = (Counter(one) & Counter(two)).total()
    return 2 * shared / (len(one) + len(two))


# rouge-score's own tokenizer drops every letter outside a–z and 0–9, so that Greek or Chinese scores 0. This one equals
# it on ASCII, keeps other words, and takes Han and Kana one sign at a time, as those scripts don't part words.
_WORD = re.compile(r"[぀-ヿ㐀-鿿豈-﫿]|[^\W_぀-ヿ㐀-鿿豈-﫿]+")


class _Words:
    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


@lru_cache(maxsize=4)
def _rouge(kind: str) -> RougeScorer:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError:
        raise MissingExtra("rouge-score", "metrics") from None
    return RougeScorer([kind], tokenizer=_Words())


def rouge1(predicted: str, wanted: str) -> float:
    """ROUGE-1's F measure: single words in common (rouge-score)."""
    return float(_rouge("rouge1").score(wanted, predicted)["rouge1"].fmeasure)


def rouge2(predicted: str, wanted: str) -> float:
    """ROUGE-2's F measure: pairs of words in common (rouge-score)."""
    return float(_rouge("rouge2").score(wanted, predicted)["rouge2"].fmeasure)


def rouge_l(predicted: str, wanted: str) -> float:
    """ROUGE-L's F measure: the longest common subsequence of words (rouge-score)."""
    return float(_rouge("rougeL").score(wanted, predicted)["rougeL"].fmeasure)


def bleu(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    """Corpus BLEU from 0 to 100 (sacrebleu's defaults: 13a, exponential smoothing)."""
    try:
        import sacrebleu
    except ModuleNotFoundError:
        raise MissingExtra("sacrebleu", "metrics") from None
    return float(sacrebleu.corpus_bleu(list(predicted), [list(wanted)]).score)


def chrf(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    """Corpus chrF2 from 0 to 100 (sacrebleu's defaults)."""
    try:
        import sacrebleu
    except ModuleNotFoundError:
        raise MissingExtra("sacrebleu", "metrics") from None
    return float(sacrebleu.corpus_chrf(list(predicted), [list(wanted)]).score)


def _read_json(text: str) -> Any:
    def no_constant(word: str) -> Any:
        raise ValueError(word)  # NaN and Infinity are Python's, not JSON's

    return json.loads(text, parse_constant=no_constant)


def json_valid(predicted: str, wanted: str) -> float:
    """1 if the whole answer is JSON (RFC 8259): no fences, no words around it."""
    try:
        _read_json(predicted)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def json_fields(predicted: str, wanted: str) -> float:
    """Fields (leaves, by path) with equal values, as a share of all fields that either holds. 0 if not JSON.

    The wanted text must be JSON; 1 and 1.0 are equal, 1 and true are not.
    """
    try:
        one, two = dict(_leaves(_read_json(predicted))), dict(_leaves(_read_json(wanted)))
    except (ValueError, RecursionError):
        return 0.0
    equal = sum(path in one and one[path] == value for path, value in two.items())
    return equal / len(one.keys() | two.keys())


def _leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], tuple[bool, Any]]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list) and tree:
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        # The flag keeps true apart from 1, which Python calls equal.
        yield path, (isinstance(tree, bool), json.dumps(tree) if isinstance(tree, dict | list) else tree)


_NUMBER = re.compile(r"[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?")


def last_number(text: str) -> float | None:
    """The answer in a text of steps: the number after `####` (as in GSM8K) if there is one, else the last number."""
    tail = text.rpartition("####")[2]
    found = [number for number in _NUMBER.findall(tail) if any(letter.isdigit() for letter in number)]
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None


def numeric_match(predicted: str, wanted: str) -> float:
    """1 if the answers' numbers are equal (relative 1e-6); 1,000 and 1000.0 are."""
    one, two = last_number(predicted), last_number(wanted)
    return float(one is not None and two is not None and math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-12))
