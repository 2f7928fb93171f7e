"""The options of a recipe as words: name, type, default, description. Knows pydantic models, not which ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Option(NamedTuple):
    """One option, described once, at its field."""

    name: str
    type: str
    default: str
    description: str

    @property
    def default_words(self) -> str:
        return self.default if self.default == "required" else f"default {self.default}"


def list_options(kind: type[BaseModel], prefix: str = "") -> Iterator[Option]:
    """Every option below `kind`, in the order of its fields, sections opened."""
    for key, field in kind.model_fields.items():
        name = prefix + key
        section = section_of(field.annotation)
        if section is None or default_words(field) == "null":
            yield Option(name, type_words(field), default_words(field), field.description or "")
        if section is not None:
            yield from list_options(section, name + ".")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model that `annotation` (or one side of its union) is, if any."""
    origin = get_origin(annotation)
    if origin in (Annotated, Union, UnionType):
        return next((section for part in get_args(annotation) if (section := section_of(part))), None)
    # Python 3.10 takes `list[int]` for a type, but not as issubclass's argument
    if origin is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def type_words(field: FieldInfo) -> str:
    """`auto | whole number ≥ 1`: what may be written for this option."""
    return " | ".join(dict.fromkeys(_words(field.annotation, field.metadata)))


def _words(annotation: Any, limits: list[Any]) -> Iterator[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(parts[0], [*limits, *_flat(parts[1:])])
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _words(part, limits)
    elif origin is Literal:
        yield from (str(part) for part in parts)
    elif origin is tuple or origin is list:
        yield f"list of {_plural(next(_words(parts[0], [])))}"
    elif annotation is bool:
        yield "true | false"
    elif annotation in (int, float):
        yield ("whole number" if annotation is int else "number") + _limit_words(limits)
    elif annotation is NoneType:
        yield "null"
    elif section_of(annotation) or origin is dict or annotation is dict:
        yield "mapping"
    else:
        yield "text"


def _plural(word: str) -> str:
    return {"text": "words", "number": "numbers", "whole number": "whole numbers"}.get(word, word)


def _flat(limits: tuple[Any, ...]) -> list[Any]:
    return [one for limit in limits for one in (limit.metadata if isinstance(limit, FieldInfo) else [limit])]


def _limit_words(limits: list[Any]) -> str:
    words = []
    for limit in limits:
        match limit:
            case annotated_types.Ge(ge=value):
                words.append(f"≥ {value}")
            case annotated_types.Gt(gt=value):
                words.append(f"> {value}")
            case annotated_types.Le(le=value):
                words.append(f"≤ {value}")
            case annotated_types.Lt(lt=value):
                words.append(f"< {value}")
    return " " + ", ".join(words) if words else ""


def default_words(field: FieldInfo) -> str:
    """The default as it would be written in a recipe."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    return json.dumps(value) if isinstance(value, bool | tuple | list | dict) else str(value)
