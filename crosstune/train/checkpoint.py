"""Checkpoints of one wave: tensors and a small JSON header in one safetensors file, the last two kept.

What can be computed from (seed, lane, step) is not stored: no random state, no row order, no learning rate.
A file is written beside its place, flushed and renamed. A damaged one is named, and the one before it is taken.
This module knows nothing of what the tensors are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from crosstune.errors import RunError
from crosstune.store.files import guard, sweep_parts, write_file

KEPT = 2  # the newest, and the one to fall back on
VERSION = "1"


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write step-<meta["step"]>.safetensors, then remove all but the last two. `meta` is anything JSON can hold."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(meta))
    header = {"version": VERSION, "meta": text, "sha256": _digest(host, VERSION, text)}
    place = folder / f"step-{int(meta['step']):09d}.safetensors"

    def fill(part: Path) -> None:
        try:
            save_file(host, part, metadata=header)
        except SafetensorError as error:  # "I/O error: No space left on device (os error 28)"
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 5, str(error)) from error

    write_file(place, fill)
    for old in _newest_first(folder)[KEPT:]:
        with suppress(OSError):
            old.unlink()
    return place


def load_checkpoint(
    folder: Path, *, say: Callable[[str], None] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole checkpoint as (tensors on the CPU, meta), or None. `say` is told of every damaged one."""
    sweep_parts(folder)
    for place in _newest_first(folder):
        try:
            return _read(place)
        except (SafetensorError, ValueError, KeyError) as error:
            if say is not None:
                say(f"the checkpoint {place} is damaged ({error}); taking the one before it")
    return None


def _read(place: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with guard("reading", place), safe_open(place, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    if _digest(tensors, header["version"], header["meta"]) != header["sha256"]:
        raise ValueError("its checksum is wrong")
    if header["version"] != VERSION:
        raise RunError(
            f"{place} has checkpoint version {header['version']}, and this crosstune reads version {VERSION}",
            "Continue it with the crosstune that began it, or delete the file: its wave then starts over.",
        )
    return tensors, json.loads(header["meta"])


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def _digest(tensors: Mapping[str, Tensor], version: str, meta: str) -> str:
    """Over names, types, shapes and bytes: safetensors itself doesn't notice a flipped bit."""
    digest = hashlib.sha256(f"{version} {meta}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
