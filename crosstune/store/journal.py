"""The journal: what happened, one JSON object a line, only ever appended. State is a replay of it.

A line ends with a checksum of the rest. A damaged last line is what a killed writer leaves: it is cut off. A damaged
line before the last is never guessed around: its place is named and nothing is written.
This module knows nothing of what the events mean.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.errors import RunError
from crosstune.store.files import guard, sync_folder
from crosstune.store.secrets import redact_tree

VERSION = 1  # raised when an older crosstune would misread the events; readers refuse a version they don't know
Event = dict[str, Any]


class Journal:
    """An open journal. `events` holds all of it, oldest first; `cut` says what of a torn last line was dropped."""

    def __init__(self, path: Path, events: list[Event], cut: str, handle: int | None) -> None:
        self.path, self.events, self.cut = path, events, cut
        self._handle = handle
        self._is_torn = False

    @classmethod
    def read(cls, path: Path) -> Journal:
        """The journal as it stands, for reading only; another process may be writing it."""
        events, _, cut = _load(path)
        return cls(path, events, cut, None)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """The journal, ready for more. A missing file begins a new one; the caller holds the run's lock."""
        events, good_bytes, cut = _load(path) if path.exists() else ([], 0, "")
        with guard("opening", path):
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        journal = cls(path, events, cut, handle)
        with guard("writing", path):
            if cut:
                os.ftruncate(handle, good_bytes)
                os.fsync(handle)
        sync_folder(path.parent)
        return journal

    def append(self, event: str, durable: bool = False, **fields: Any) -> Event:
        """Add one event. A durable one is on the disk when this returns; if that fails, the journal is as before.

        Where it can't be made so, it takes no more: a line after a torn one would make it unreadable.
        """
        assert self._handle is not None, "this journal was opened for reading"
        clean = redact_tree(_plain(fields))
        entry: Event = {"event": event, "at": round(time.time(), 3), **clean}
        if not self.events:
            entry = {"event": event, "version": VERSION, "at": entry["at"], **clean}
        with guard("writing", self.path):
            if self._is_torn:
                raise OSError(errno.EIO, "the line before could not be written")
            before = os.fstat(self._handle).st_size
            try:
                _write_all(self._handle, _to_line(entry))
                if durable:
                    os.fsync(self._handle)
                self._still_there()
            except BaseException:  # also Ctrl-C: the event that tells of it is to follow a whole line
                self._is_torn = True
                with suppress(OSError):
                    os.ftruncate(self._handle, before)
                    self._is_torn = False
                raise
        self.events.append(entry)
        return entry

    def close(self) -> None:
        """Flush and close; harmless when closed already."""
        if self._handle is not None:
            with suppress(OSError):
                os.fsync(self._handle)
            os.close(self._handle)
            self._handle = None

    def _still_there(self) -> None:
        """A journal that was deleted or replaced would take events and keep none."""
        assert self._handle is not None
        here, there = os.fstat(self._handle), self.path.stat()
        if (here.st_ino, here.st_dev) != (there.st_ino, there.st_dev):
            raise FileNotFoundError(2, "another file stands in its place")


def _load(path: Path) -> tuple[list[Event], int, str]:
    """All events, the number of bytes they fill, and what was wrong with a last line that was left out."""
    with guard("reading", path):
        data = path.read_bytes()
    events: list[Event] = []
    start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        stop = len(data) if end < 0 else end
        entry = _from_line(data[start:stop]) if end >= 0 else None
        if entry is None:
            # A power cut may leave zeros after the last full block; they belong to the torn line.
            if data[stop:].strip(b"\0\r\n ") == b"":
                return events, start, f"line {len(events) + 1} (byte {start}) was not finished"
            raise RunError(
                f"{path} line {len(events) + 1} (byte {start}) is damaged, and events follow it",
                "Restore the file from a copy; or delete that line and all after it: what they say is then done again.",
            )
        if not events:
            _check_version(path, entry)
        events.append(entry)
        start = stop + 1
    return events, start, ""


def _check_version(path: Path, first: Event) -> None:
    version = first.get("version")
    if version != VERSION:
        raise RunError(
            f"{path} has journal version {version}, and this crosstune reads version {VERSION}",
            "Continue it with the crosstune that began it (see the first line), or set output to another folder.",
        )


def _to_line(entry: Event) -> bytes:
    body = json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
    return body[:-1] + b', "crc": "%08x"}\n' % zlib.crc32(body)


def _from_line(line: bytes) -> Event | None:
    """The event, or None where the line isn't one that `_to_line` wrote."""
    body, mark, check = line.rpartition(b', "crc": "')
    if not mark or len(check) != 10 or check[8:] != b'"}':
        return None
    body += b"}"
    if f"{zlib.crc32(body):08x}".encode() != check[:8]:
        return None
    try:
        entry = json.loads(body)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _plain(value: Any) -> Any:
    """JSON's own types. JSON has no infinity: a non-finite number becomes the word, so that it is seen and not lost."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # file names may hold lone surrogates
    assert value is None or isinstance(value, int | float), f"{type(value).__name__} has no place in the journal"
    return value


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
