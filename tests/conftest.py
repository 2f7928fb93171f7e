"""Shared fixtures: the tiny model, made once a session."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import pytest

# What transformers 5.10 looks for with Python 3.10, where a test has transformers read a file by itself (gguf_once.py).
if not hasattr(gguf, "__version__"):
    gguf.__version__ = version("gguf")  # type: ignore[attr-defined]

# Tests run side by side, a process a core; must be set before torch is imported, and holds for programs they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

from tests.tiny import CASES, make_tiny

# How long an example takes depends on what else the computer does: not a thing to fail by.
settings.register_profile("crosstune", deadline=None)
settings.load_profile("crosstune")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny `instruct` model."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "instruct")


@pytest.fixture(scope="session")
def plain(tiny: Path) -> Any:
    """The tiny tokenizer as AutoTokenizer gives it: the oracle's."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def cases() -> Path:
    """Folder of the case files."""
    return CASES
