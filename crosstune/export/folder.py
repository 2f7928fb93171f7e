"""A folder appears whole or not at all: written beside its place, flushed, then renamed into it.

Knows files and names only, nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosstune.errors import ModelError, RunError, first_line
from crosstune.store.files import beside, guard, make_folder, sync, sync_folder

CHECKSUMS = "SHA256SUMS"
PIECE = 8 << 20  # bytes hashed at a time: other threads wait for Python's lock between pieces only


@contextmanager
def new_folder(path: str | os.PathLike[str], *, marker: str) -> Iterator[Path]:
    """Yield an empty folder to fill; it takes the place of `path` when the block ends, and vanishes if the block fails.

    A folder at `path` is replaced only if it is empty or holds a file `marker`, which tells that we wrote it.
    A symbolic link stays one: the folder is written where it leads.
    """
    final = Path(path).resolve()
    refuse_occupied(final, marker=marker)
    with guard("writing", final):
        make_folder(final.parent)
        work = beside(final)
        work.mkdir()
    try:
        yield work
        with guard("writing", final):
            _flush(work)
            _put(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def refuse_occupied(path: Path, *, marker: str) -> None:
    """Refuse a place whose content isn't ours to replace."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{str(path)!r} is a file, and a folder is to be written there", "Choose another place.")
    if path.is_dir() and any(path.iterdir()) and not (path / marker).is_file():
        raise RunError(f"{str(path)!r} holds files that crosstune didn't write", "Choose another place, or empty it.")


def refuse_sources(path: Path, sources: Iterable[Path]) -> None:
    """Refuse a place whose replacement would take away what is read to make it."""
    for source in sources:
        if source.exists() and source.resolve().is_relative_to(path.resolve()):
            raise RunError(
                f"{str(path)!r} is to be written, and {str(source)!r}, which it is made from, would be lost",
                "Choose another place.",
            )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model or adapter; refused, by its name, where it is damaged."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} can't be read: {first_line(error)}", "Fetch or write that file again.") from None
    if not isinstance(tree, dict):
        raise ModelError(f"{file} holds no JSON object", "Fetch or write that file again.")
    return tree


def write_checksums(folder: Path, known: Mapping[str, str] | None = None) -> Path:
    """Write `SHA256SUMS` over every file of `folder`, in the format that `sha256sum --check` reads.

    `known`: digests that need not be made again, by name.
    """
    known = known or {}
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != CHECKSUMS)
    names = [file.relative_to(folder).as_posix() for file in files]
    lines = [f"{known.get(name) or sha256(folder / name)}  {name}\n" for name in names]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")
    return folder / CHECKSUMS


def wrong_checksums(folder: Path) -> list[str]:
    """Names in `SHA256SUMS` whose file is missing or differs. An absent list means nothing to compare: []."""
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return []
    wrong = []
    for line in sums.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            wrong.append(name)
    return wrong


def sha256(file: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _put(work: Path, final: Path) -> None:
    if not final.exists():
        work.replace(final)
        sync_folder(final.parent)
        return
    # A non-empty folder can't be renamed over: the old one steps aside first, and is deleted last.
    old = beside(final, ".old")
    final.replace(old)
    try:
        work.replace(final)
    except BaseException:
        old.replace(final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)  # a network disk may keep files that somebody reads: no fault of the new one


def _flush(folder: Path) -> None:
    """Flush every file to the disk, then the folders that name them."""
    for file in sorted(place for place in folder.rglob("*") if place.is_file()):
        sync(file)
    for place in [*(place for place in folder.rglob("*") if place.is_dir()), folder]:
        sync_folder(place)
