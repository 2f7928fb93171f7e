"""A GGUF file is parsed once, however often transformers asks for it.

transformers 5 reads a GGUF's header anew for the tokenizer, the tokenizer's config, the config and the weights, and
builds gguf's table of tensor names anew for every submodule. For SmolLM2-135M (49,152 tokens, 397 modules) each header
takes 2 s of gguf's Python and each table 10 ms: 16 of the 20 s that loading it took.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

_parsed: dict[tuple[str, int, int], Any] = {}  # (path, size, time of change) → reader; one file at most


@contextmanager
def parsed_once() -> Iterator[None]:
    """While open, transformers gets the same reader for the same file. It stays until `forget_parsed`."""
    try:
        import gguf
    except ImportError:  # transformers says so itself, if it needs it
        yield
        return
    names: Any = gguf
    if not hasattr(gguf, "__version__"):  # with Python 3.10 transformers 5.10 looks here: no module is listed there
        names.__version__ = version("gguf")
    reader_class, name_map = names.GGUFReader, names.get_tensor_name_map

    def reader(path: Any, mode: str = "r") -> Any:
        if mode != "r":
            return reader_class(path, mode)
        file = Path(path).resolve()
        found = file.stat()
        key = (str(file), found.st_size, found.st_mtime_ns)
        if key not in _parsed:
            _parsed.clear()
            _parsed[key] = reader_class(path)
        return _parsed[key]

    names.GGUFReader, names.get_tensor_name_map = reader, cache(name_map)
    try:
        yield
    finally:
        names.GGUFReader, names.get_tensor_name_map = reader_class, name_map


def forget_parsed() -> None:
    """Free the reader (160 MB for 49,152 tokens), once the weights are loaded."""
    _parsed.clear()
