"""One message → `Turn`, or a `Fault` that says what is wrong with it and where: roles, contents, types."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from crosstune.data.rows import NOTHING, Turn

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "ipython", "function"})
# ShareGPT's names for the speakers; `bot`, `model` and the like are too vague to guess at.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


class Fault(Exception):
    """A row can't be read; carries one finding. Never leaves this module."""

    def __init__(self, code: str, path: str, message: str, fix: str) -> None:
        super().__init__(code, path, message, fix)
        self.code, self.path, self.message, self.fix = code, path, message, fix


def read_turn(message: Any, path: str, place: int) -> Turn:
    if not isinstance(message, Mapping):
        at = f"{path}[{place}]"
        raise Fault("wrong-type", at, f"{at} is {kind_of(message)}, an object is expected",
                    'Write each message as {"role": "user", "content": "…"}.')  # fmt: skip
    role_key, content_key = ("role", "content") if "role" in message or "from" not in message else ("from", "value")
    role: Any = message.get(role_key)
    content: Any = message.get(content_key)
    known = role in ROLES if type(role) is str else False
    if known and type(content) is str and len(message) == 2:
        return Turn(role, content)
    if role_key == "from" and type(role) is str and role in SPEAKERS:
        role, known = SPEAKERS[role], True
    if not known:
        raise _unknown_role(role, f"{path}[{place}].{role_key}", role_key)
    extra = {key: value for key, value in message.items() if key not in (role_key, content_key)}
    if content is None and extra.get("tool_calls"):
        if content_key in message:
            extra["content"] = None  # a template may test for it: kept as it was written
        content = ""
    elif type(content) is not str:
        content = _text_of(content, f"{path}[{place}].{content_key}")
    return Turn(role, content, extra or NOTHING, learn=extra.get("weight") != 0)


def _text_of(content: Any, path: str) -> str:
    if content is None:
        raise missing(path)
    if isinstance(content, list) and content:  # OpenAI's content parts, where all are text
        parts = [
            p["text"] for p in content if isinstance(p, dict) and p.get("type") == "text" and type(p.get("text")) is str
        ]
        if len(parts) == len(content):
            return "".join(parts)
    raise Fault("wrong-type", path, f"{path} is {kind_of(content)}, text is expected", "Write it as text, in quotes.")


def missing(path: str) -> Fault:
    return Fault("missing-content", path, f"{path} is missing or null", "Give it a text, or remove the row.")


def _unknown_role(role: Any, path: str, key: str) -> Fault:
    names = sorted(ROLES if key == "role" else SPEAKERS)
    if type(role) is not str:
        what = "is missing" if role is None else f"is {kind_of(role)}"
        return Fault("unknown-role", path, f"{path} {what}", f"Known: {', '.join(names)}.")
    guess = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
    clean = role.strip().lower()
    near = guess.get(clean) or next(iter(difflib.get_close_matches(clean, names, n=1, cutoff=0.6)), None)
    hint = f"Did you mean {near!r}? " if near else ""
    return Fault(
        "unknown-role", path, f"{path} is {role!r}, which is no known role", f"{hint}Known: {', '.join(names)}."
    )


def kind_of(value: Any) -> str:
    words = {
        "NoneType": "null",
        "dict": "an object",
        "int": "an int",
        "list": "a list",
        "str": "text (str)",
        "bool": "true or false",
    }
    name = type(value).__name__
    return words.get(name, f"a {name}")


def surrogate_path(value: Any, path: str = "") -> str | None:
    """Where half of a surrogate pair lies, or None."""
    if type(value) is str:
        if value.isascii():
            return None
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return path
        return None
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if type(key) is str and surrogate_path(key) is not None:
                return path
            if (found := surrogate_path(inner, f"{path}.{key}" if path else str(key))) is not None:
                return found
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            if (found := surrogate_path(inner, f"{path}[{place}]")) is not None:
                return found
    return None
