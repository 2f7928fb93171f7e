"""Files of a run folder: written whole or not at all, and every failure of the disk said as a `RunError`.

A file is written beside its place, flushed to the disk, renamed over it, and the folder's entry is flushed too.
This module knows nothing of what the files mean.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from secrets import token_hex

from crosstune.errors import CrosstuneError, RunError

_FIXES = {
    errno.ENOSPC: "Free some space on that disk and give the same command again: nothing that was finished is lost.",
    errno.EDQUOT: "Your quota is used up: free some space and give the same command again; nothing finished is lost.",
    errno.EROFS: "The disk is mounted read-only: set output to a folder that can be written.",
    errno.EACCES: "Give yourself the right to write there, or set output to another folder.",
    errno.EPERM: "Give yourself the right to write there, or set output to another folder.",
    errno.ENOENT: "It vanished while the run was using it: restore it, and give the same command again.",
    errno.ENOTDIR: "A file stands where a folder is needed: set output to another folder.",
    errno.EISDIR: "A folder stands where a file is needed: set output to another folder.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n) and give the same command again.",
}

_FOLDER_PART = re.compile(r"\..+\.[0-9a-f]{8}(\.old)?")  # as `beside` names them
_TENSORS_PART = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # safetensors writes into one, and renames it
_MAKING = threading.Lock()  # what another thread finds made is flushed too


@contextmanager
def guard(doing: str, path: Path) -> Iterator[None]:
    """Turn what the disk said inside the block into a `RunError`: what was done where, and what to do now."""
    try:
        yield
    except CrosstuneError:
        raise
    except OSError as error:
        raise _refused(doing, path, error.errno or 0, str(error.strerror or error)) from error
    except Exception as error:  # safetensors' own or, from tokenizers, of no class: "I/O error: … (os error 28)"
        number = re.search(r"I/O error(?!.*\(os error)|(?:\(os error |IoError\(Os \{ code: )(\d+)", str(error))
        if number is None:
            raise
        raise _refused(doing, path, int(number[1] or 0), str(error)) from error


def _refused(doing: str, path: Path, number: int, said: str) -> RunError:
    fix = _FIXES.get(number, "Check that disk, and give the same command again.")
    return RunError(f"{doing} {str(path)!r} failed: {said}", fix)


def write_file(path: Path, fill: bytes | Callable[[Path], object]) -> None:
    """Write `path` so that it is old or new, never half. `fill`: its bytes, or a function that writes a file."""
    with guard("writing", path):
        make_folder(path.parent)
        part = beside(path, ".part")
        try:
            part.touch(exist_ok=False)
            mode = part.stat().st_mode
            if isinstance(fill, bytes):
                part.write_bytes(fill)
            else:
                fill(part)
            sync(part)  # opened anew: `fill` may have put another file in the place of the empty one,
            part.chmod(mode)  # and safetensors makes 0600, which hides a shared run from the group
            part.replace(path)
        except BaseException:  # also Ctrl-C: no half file stays behind
            with suppress(OSError):
                part.unlink()
            raise
        sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and what is missing above it; each one's entry is flushed too."""
    with _MAKING:
        missing = list(takewhile(lambda place: not place.exists(), (folder, *folder.parents)))
        folder.mkdir(parents=True, exist_ok=True)
        for place in missing:
            sync_folder(place.parent)


def beside(path: Path, ending: str = "") -> Path:
    """A name for what is to take the place of `path` once it is whole. Nothing has it yet."""
    return path.parent / f".{path.name}.{token_hex(4)}{ending}"


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries: without it a rename may be undone by a power cut. Some systems can't, and needn't."""
    with suppress(OSError):
        sync(folder)


def sweep_parts(folder: Path, *, folders: bool = False) -> None:
    """Remove what a killed writer left beside its place; `folders`: also those that were to be renamed as a whole.

    Nothing else: a run may lie in a folder that has a .git or .venv of somebody's own.
    """
    for place in folder.glob(".*"):
        if place.is_dir() and not place.is_symlink():
            if folders and _FOLDER_PART.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)
        elif place.name.endswith(".part") or _TENSORS_PART.fullmatch(place.name):
            with suppress(OSError):
                place.unlink()


def sync(place: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
