"""One process a run folder: a lock that names its holder.

The lock itself is filelock's, which the system frees when its holder dies, so a killed run never locks itself out.
Who holds it stands beside it, in lock.json, for the message only.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from crosstune.errors import RunError
from crosstune.store.files import guard, make_folder, write_file


class FolderLock:
    """A lock that is held, until `release`."""

    def __init__(self, lock: BaseFileLock, note: Path) -> None:
        self._lock, self._note = lock, note

    @classmethod
    def take(cls, folder: Path) -> FolderLock:
        """Make the folder if need be and lock it, or raise `RunError` naming who holds it."""
        note = folder / "lock.json"
        with guard("making the run folder", folder):
            make_folder(folder)
        lock = FileLock(folder / ".lock", thread_local=False)  # released by whichever thread closes the run
        with guard("locking", folder):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise RunError(f"{str(folder)!r} is in use{_holder(note)}", _fix(note)) from None
            except NotImplementedError:  # a word of filelock: this file system has no flock
                raise RunError(
                    f"{str(folder)!r} can't be locked: its file system has no locks",
                    "Set output to a folder on a disk of this machine.",
                ) from None
        held = cls(lock, note)
        try:
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            write_file(note, json.dumps(who).encode())
        except BaseException:
            held.release()
            raise
        return held

    def release(self) -> None:
        """Give the folder free."""
        with suppress(OSError):
            self._note.unlink(missing_ok=True)
        self._lock.release()


def _read(note: Path) -> dict[str, object]:
    try:
        who = json.loads(note.read_bytes())
    except (OSError, ValueError):  # just being written, or never was
        return {}
    return who if isinstance(who, dict) and {"pid", "host", "since"} <= who.keys() else {}


def _holder(note: Path) -> str:
    who = _read(note)
    return f" by process {who['pid']} on {who['host']}, since {who['since']}" if who else " by another process"


def _fix(note: Path) -> str:
    who = _read(note)
    end = f" or end it (kill {who['pid']})" if who.get("host") == socket.gethostname() else ""
    return f"Wait for it{end}, or set output to another folder."
