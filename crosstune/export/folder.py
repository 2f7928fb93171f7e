"""A folder appears whole or not at all: written beside its place, flushed, then renamed into it.

Knows files and names only, nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosstune.errors import ModelError, RunError, first_line
from crosstune.store.files import beside, guard, make_folder, sync, sync_folder

CHECKSUMS = "SHA256SUMS"
PIECE = 8 << 20  # bytes hashed at a time: other threads wait for Python's lock between pieces only


class Draft:
    """A folder that is filled beside its place, in one go or in several, and takes the place once it is whole.

    A folder at `path` is replaced only if it is empty or holds a file `marker`, which tells that we wrote it.
    A symbolic link stays one: the folder is written where it leads.
    """

    def __init__(self, path: str | os.PathLike[str], *, marker: str) -> None:
        self.final = Path(path).resolve()
        self.digests: dict[str, str] = {}  # SHA-256 of the files that are flushed, by name
        refuse_occupied(self.final, marker=marker)
        with guard("writing", self.final):
            make_folder(self.final.parent)
            self.work = beside(self.final)
            self.work.mkdir()

    @contextmanager
    def filling(self) -> Iterator[Path]:
        """The folder to fill. It vanishes if the block fails."""
        try:
            with guard("writing", self.final):
                yield self.work
        except BaseException:
            shutil.rmtree(self.work, ignore_errors=True)
            raise

    def settle(self) -> None:
        """Flush and hash the files that are new: their bytes are in memory still, hashed while the disk takes them."""
        new = [name for name in _names(self.work) if name not in self.digests]
        with ThreadPoolExecutor(1) as other:
            flushed = other.map(sync, [self.work / name for name in new])
            digests = {name: sha256(self.work / name) for name in new}
            list(flushed)
        self.digests |= digests

    def put(self) -> None:
        """Flush what isn't flushed, then the folders that name it all, and take the place."""
        for name in _names(self.work):
            if name not in self.digests:
                sync(self.work / name)
        for place in [*(place for place in self.work.rglob("*") if place.is_dir()), self.work]:
            sync_folder(place)
        _put(self.work, self.final)


@contextmanager
def new_folder(path: str | os.PathLike[str], *, marker: str) -> Iterator[Path]:
    """Yield an empty folder to fill (`Draft`); it takes the place of `path` when the block ends."""
    draft = Draft(path, marker=marker)
    with draft.filling() as work:
        yield work
        draft.put()


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
    names = [file for file in _names(folder) if Path(file).name != CHECKSUMS]
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


def _names(folder: Path) -> list[str]:
    """Every file in a folder and in those below it."""
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
