"""Shared fixtures: the tiny model, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import CASES, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny `instruct` model."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "instruct")


@pytest.fixture
def cases() -> Path:
    """Folder of the case files."""
    return CASES
