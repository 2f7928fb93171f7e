"""Order of the turns of a conversation: who speaks first, who speaks twice, who never answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from crosstune.data.lint.catalogue import FAULTS
from crosstune.data.load import Row
from crosstune.errors import Finding

SYSTEM = ("system", "developer")
# By far the most common orders, and right: looked up before anything is looked at (a million rows pass here).
USUAL = {("user", "assistant"), ("system", "user", "assistant"), ("user", "assistant", "user", "assistant")}


def check_turns(row: Row, *, learn_all: bool = False) -> Iterable[Finding]:
    """All faults of one conversation's order."""
    roles = tuple(turn.role for turn in row.turns)
    if roles in USUAL or not roles:
        return ()
    found = [*check_consecutive_roles(row, roles), *check_assistant_first(row, roles), *check_late_system(row, roles)]
    if not learn_all:
        found += check_unanswered(row, roles)
    return found


def check_consecutive_roles(row: Row, roles: Sequence[str]) -> Iterable[Finding]:
    """user, user or assistant, assistant. Several tool results in a row are how parallel calls are written."""
    for place, (before, after) in enumerate(pairwise(roles)):
        if before == after and after in ("user", "assistant"):
            where = replace(row.where, field=f"messages[{place + 1}].role")
            yield FAULTS["consecutive-roles"].found(f"two turns of {after!r} follow each other", [row.number], where)
            return


def check_assistant_first(row: Row, roles: Sequence[str]) -> Iterable[Finding]:
    """A greeting by the assistant before any user turn."""
    speaking = [role for role in roles if role not in SYSTEM]
    if speaking and speaking[0] == "assistant":
        where = replace(row.where, field=f"messages[{roles.index('assistant')}].role")
        yield FAULTS["assistant-first"].found("the assistant speaks before the user does", [row.number], where)


def check_late_system(row: Row, roles: Sequence[str]) -> Iterable[Finding]:
    """A system turn after the conversation has begun."""
    for place, role in enumerate(roles):
        if role in SYSTEM and any(earlier not in SYSTEM for earlier in roles[:place]):
            where = replace(row.where, field=f"messages[{place}].role")
            yield FAULTS["late-system"].found(f"a {role} turn stands after {roles[place - 1]!r}", [row.number], where)
            return


def check_unanswered(row: Row, roles: Sequence[str]) -> Iterable[Finding]:
    """The last turn isn't the assistant's; or no turn is."""
    if roles[-1] == "assistant":
        return
    where = replace(row.where, field=f"messages[{len(roles) - 1}].role")
    message = f"the last turn is from {roles[-1]!r}; nothing is learned from it"
    yield FAULTS["ends-without-assistant"].found(message, [row.number], where)
    if "assistant" not in roles:
        where = replace(row.where, field="messages")
        yield FAULTS["no-assistant-turn"].found("no turn is from the assistant", [row.number], where)
