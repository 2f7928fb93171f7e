"""Checkpoints of one wave: tensors and a small JSON header in one safetensors file, the last two kept.

What can be computed from (seed, lane, step) is not stored: no random state, no row order, no learning rate.
A file is written beside its place, flushed and renamed. A damaged one is named, and the one before it is taken.
This module knows nothing of what the tensors are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from crosstune.errors import RunError
from crosstune.interrupt import Interrupts
from crosstune.store.files import guard, sweep_parts, write_file

KEPT = 2  # the newest, and the one to fall back on
VERSION = "1"
# An epoch's end is kept too, unless the last checkpoint is younger than this: an epoch may last less than a second.
EPOCH_SECONDS = 30.0
Packed = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # tensors on the CPU and a header with "step"


class Checkpoints:
    """When one wave is kept, and where: every so many steps or seconds, at the end of epochs, and when interrupted.

    Files are written by a thread of their own while training goes on; what it failed with is raised at the next `save`.
    """

    def __init__(
        self, folder: Path | None, every: int | str, interrupts: Interrupts, say: Callable[[str], None]
    ) -> None:
        self.folder, self.interrupts, self._say = folder, interrupts, say
        self._every_steps, self._every_seconds = _interval(every)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Path] | None = None
        self._last_step, self._last_time = 0, time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole checkpoint, if there is one."""
        return None if self.folder is None else load_checkpoint(self.folder, say=self._say)

    def is_due(self, step: int, epoch_ended: bool) -> bool:
        """Whether the wave should be kept as it stands after `step`."""
        if self.folder is None or self._every_steps == self._every_seconds == 0 or step == self._last_step:
            return False
        seconds = time.monotonic() - self._last_time
        by_step = self._every_steps and step - self._last_step >= self._every_steps
        by_time = self._every_seconds and seconds >= self._every_seconds
        return bool(by_step or by_time or (epoch_ended and seconds >= EPOCH_SECONDS))

    def save(self, packed: Packed) -> None:
        """Keep a packed wave; returns while it is being written."""
        if self.folder is not None:
            self.wait()
            tensors, meta = packed
            self._writing = self._writer.submit(save_checkpoint, self.folder, tensors, meta)
            self.note_saved(int(meta["step"]))

    def note_saved(self, step: int) -> None:
        """The next one is due counted from here."""
        self._last_step, self._last_time = step, time.monotonic()

    def wait(self) -> None:
        """Until the last one is written; raises what its writing raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def drop(self) -> None:
        """Remove them: all lanes of the wave are recorded."""
        self.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            with suppress(OSError):  # other waves may have theirs
                self.folder.parent.rmdir()

    def close(self) -> None:
        """End the writing thread."""
        self._writer.shutdown(wait=True)


def no_checkpoints() -> Checkpoints:
    """For a wave that is not kept."""
    return Checkpoints(None, "never", Interrupts(), lambda text: None)


def _interval(every: int | str) -> tuple[int, float]:
    """(steps, seconds) of `train.checkpoint_every`; the one that isn't meant is 0."""
    if isinstance(every, int):
        return every, 0.0
    unit = next((unit for unit in ("min", "s", "h") if every.endswith(unit)), "")
    return 0, float(every.removesuffix(unit)) * {"s": 1, "min": 60, "h": 3600}[unit] if unit else 0.0


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
    """Write step-<meta["step"]>.safetensors, then remove all but it and the one before. `meta`: as JSON holds it."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(meta))
    header = {"version": VERSION, "meta": text, "sha256": _digest(host, VERSION, text)}
    place = folder / f"step-{int(meta['step']):09d}.safetensors"

    write_file(place, lambda part: save_file(host, part, metadata=header))
    every = _newest_first(folder)
    at = every.index(place)  # of those that are newer none could be gone on from: damaged, or of other lanes
    for other in (*every[:at], *every[at + KEPT :]):
        with suppress(OSError):
            other.unlink()
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
