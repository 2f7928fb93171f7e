"""YAML in and out, and text written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from crosstune.errors import RecipeError
from crosstune.store.files import write_file


def parse_yaml(text: str, *, name: str = "recipe") -> Any:
    """YAML 1.2, safely: `2e-4` is a number and `no` is a word. Raises `RecipeError` with line and column."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1} column {mark.column + 1}" if mark else ""
        what = str(error.problem or error.context).partition(" with value ")[0]  # a section's value is shown as {}
        raise RecipeError(f"{name}{place}: {what}", "Mend the YAML at that place.") from None
    except YAMLError as error:
        raise RecipeError(f"{name}: {error}", "Mend the YAML.") from None


def dump_yaml(tree: Any) -> str:
    """`tree` as block-style YAML."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    out = io.StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(tree, out)
    return out.getvalue()


def write_text(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either the old or the new text, never half of it."""
    write_file(path, text.encode())
