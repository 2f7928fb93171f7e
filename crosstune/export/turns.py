"""A Jinja chat template taken apart into the strings around each turn, for servers that don't run Jinja.

Found by rendering conversations with marked contents; `plain_turns` gives None unless the parts put together again
equal what the template renders, for every conversation tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

Turn = dict[str, str]


@dataclass(frozen=True)
class PlainTurns:
    """A conversation is start + the turns + open. `system` is what the template says where no system turn is given."""

    start: str
    around: dict[str, tuple[str, str]]  # role → before and after its content
    open: str  # opens the assistant's turn
    system: str

    def render(self, turns: Sequence[Turn]) -> str:
        """What the template renders, with the assistant's turn opened."""
        if self.system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        return self.start + "".join(turn["content"].join(self.around[turn["role"]]) for turn in turns) + self.open


def plain_turns(tokenizer: PreTrainedTokenizerBase) -> PlainTurns | None:
    """The parts of the tokenizer's chat template, or None if it has none or does more than surround turns."""
    if not tokenizer.chat_template:
        return None
    try:
        found = _take_apart(tokenizer)
        whole = found is not None and all(found.render(turns) == _render(tokenizer, turns) for turns in _TRIED)
    except (TemplateError, ValueError, IndexError):  # a template that refuses a system turn, or another order of turns
        return None
    return found if whole else None


def _take_apart(tokenizer: PreTrainedTokenizerBase) -> PlainTurns | None:
    asked = [_turn("system", 0), _turn("user", 1), _turn("assistant", 2), _turn("user", 3)]
    open_text, closed = _render(tokenizer, asked), _render(tokenizer, asked, open_turn=False)
    gaps = _gaps(closed, asked)
    after_user = gaps[-1]
    after_assistant = _gaps(_render(tokenizer, asked[:3], open_turn=False), asked[:3])[-1]
    before_user = gaps[3].removeprefix(after_assistant)
    after_system = gaps[1].removesuffix(before_user)
    bos = tokenizer.bos_token or ""
    # SmolLM2's BOS is <|im_start|>, which opens every turn: there it belongs to the turn
    start = bos if bos and closed.startswith(bos) and not before_user.startswith(bos) else ""
    around = {
        "system": (gaps[0].removeprefix(start), after_system),
        "user": (before_user, after_user),
        "assistant": (gaps[2].removeprefix(after_user), after_assistant),
    }
    head = _gaps(_render(tokenizer, asked[1:2]), asked[1:2])[0].removeprefix(start)
    own = head.removesuffix(before_user).removeprefix(around["system"][0]).removesuffix(after_system)
    return PlainTurns(start, around, open_text.removeprefix(closed), own)


def _gaps(text: str, turns: Sequence[Turn]) -> list[str]:
    """What stands before, between and after the contents."""
    gaps = []
    for turn in turns:
        gap, found, text = text.partition(turn["content"])
        if not found:
            raise ValueError("the template drops a content")
        gaps.append(gap)
    return [*gaps, text]


def _turn(role: str, number: int) -> Turn:
    return {"role": role, "content": f"«Aa{number}»"}


def _render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], *, open_turn: bool = True) -> str:
    text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=open_turn)
    assert isinstance(text, str)
    return text


_TRIED = (
    [_turn("user", 7)],
    [_turn("system", 7), _turn("user", 8)],
    [_turn("user", 7), _turn("assistant", 8), _turn("user", 9)],
    [
        _turn("system", 5),
        _turn("user", 6),
        _turn("assistant", 7),
        _turn("user", 8),
        _turn("assistant", 9),
        _turn("user", 4),
    ],
)
