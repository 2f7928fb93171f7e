"""Run: the folder of one cross-validation, its lock, its journal, and the state of each lane.

    recipe.yaml          what was asked, all defaults included
    journal.jsonl        what happened; the state is a replay of it (state.py)
    row_hashes.parquet   a hash of every row's content, so that changed data is named by its row
    folds.parquet        row, fold                       (rows from 1, folds from 0)
    scores.json          out_of_fold.parquet             written when the run is finished
    lanes/trial-0/fold-3/…                               lanes/trial-0/all/ for the fit on all rows
    checkpoints/…                                        of unfinished waves only

This module knows nothing of tensors, and nothing of how a lane is trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from crosstune.errors import RunError
from crosstune.recipe.recipe import Recipe, dump_yaml
from crosstune.store.files import guard, sweep_parts, write_file
from crosstune.store.journal import Event, Journal
from crosstune.store.lock import FolderLock
from crosstune.store.same import refuse_changed_data, refuse_changed_folds, refuse_changed_prints, refuse_changed_recipe
from crosstune.store.secrets import redact_tree
from crosstune.store.state import DURABLE, Lane, in_order, replay
from crosstune.store.tables import from_parquet, to_parquet

OURS = ("recipe.yaml", "folds.parquet", "scores.json", "out_of_fold.parquet", "lanes", "checkpoints")
LIBRARIES = ("crosstune", "torch", "transformers", "peft", "bitsandbytes", "numpy", "safetensors")


class Run:
    """A run folder, held by this process until `close`. `Run.open` continues or begins one; `Run.read` only looks."""

    def __init__(self, folder: Path, journal: Journal, lock: FolderLock | None) -> None:
        self.folder, self._journal, self._lock = folder, journal, lock
        self._state = replay(journal.events)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        recipe: Recipe,
        data_hashes: Sequence[bytes],
        rows: Sequence[int],
        prints: Mapping[str, str] | None = None,
    ) -> Run:
        """Continue the run in `folder` if it is the same, begin one if there is none, else raise `RunError`.

        `data_hashes` and `rows` are the content hash and the number of every row. `prints` are further fingerprints by
        name ("tokens", "model") which must be as they were.
        """
        place = Path(folder).expanduser().absolute()
        _refuse_foreign_folder(place)
        lock = FolderLock.take(place)
        try:
            journal = Journal.open(place / "journal.jsonl")
            try:
                run = cls(place, journal, lock)
                if journal.events:
                    run._check_same(recipe, data_hashes, rows, prints or {})
                else:
                    run._begin(recipe, data_hashes, rows, prints or {})
                run._write_recipe(recipe)
                run._say_opened(recipe)
            except BaseException:
                journal.close()
                raise
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Run:
        """The run in `folder` as it stands, without its lock: nothing can be recorded."""
        place = Path(folder).expanduser().absolute()
        if not (place / "journal.jsonl").is_file():
            inside = sorted(str(journal.parent) for journal in Path(folder).expanduser().glob("*/journal.jsonl"))[:6]
            raise RunError(
                f"{os.fspath(folder)!r} holds no run: no journal.jsonl is in it",
                f"Give the folder of a run{': ' + ', '.join(inside) if inside else ''}.",
            )
        return cls(place, Journal.read(place / "journal.jsonl"), None)

    # — what happened —

    @property
    def is_finished(self) -> bool:
        """Every lane was trained, or failed, and the scores were written."""
        return self._state.is_finished

    @property
    def torn(self) -> str:
        """What of the journal's last line was cut off when the run was opened; empty if nothing was."""
        return self._journal.cut

    def finished_lanes(self) -> dict[Lane, Event]:
        """(trial, fold) → the fields recorded with "lane_finished"."""
        return in_order(self._state.finished)

    def failed_lanes(self) -> dict[Lane, Event]:
        """(trial, fold) → the fields recorded with "lane_failed": reason, step."""
        return in_order(self._state.failed)

    def lanes_over(self) -> set[Lane]:
        """Lanes that finished, failed or were given up with their trial, and are not to be tried again."""
        return {*self._state.finished, *self._state.failed, *self._state.given_up}

    def lanes_again(self) -> set[Lane]:
        """Lanes that failed once and were, or are to be, tried again."""
        return set(self._state.again)

    def events(self, *kinds: str) -> list[Event]:
        """All events of these kinds (all events without one), oldest first."""
        return [event for event in self._journal.events if not kinds or event["event"] in kinds]

    def stored_recipe(self) -> dict[str, Any]:
        """The recipe with which the run was begun, as nested mappings; its rows lie where they were found last."""
        recipe, opened = dict(self._journal.events[0]["recipe"]), self.events("opened")
        path = opened[-1].get("data", recipe["data"]["path"]) if opened else recipe["data"]["path"]
        return {**recipe, "data": {**recipe["data"], "path": path}}

    # — what happens —

    def record(self, event: str, durable: bool = False, **fields: Any) -> None:
        """Add an event to the journal. Those that change the state of the run or of a lane are always durable."""
        self._state.see(self._journal.append(event, durable or event in DURABLE, **fields))

    def retry_failed(self) -> list[Lane]:
        """Make every failed lane one that is still to be trained; says which."""
        lanes = list(self._state.failed)
        for trial, fold in lanes:
            self.record("lane_again", trial=trial, fold=fold)
        return lanes

    def close(self) -> None:
        """Close the journal and give the folder free; harmless when closed already."""
        self._journal.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # — files —

    def path(self, *names: str | int) -> Path:
        """A place inside the folder, whatever the names hold: one that would lead outside is refused."""
        for name in map(str, names):
            if not name or name in (".", "..") or any(mark in name for mark in "/\\:\0") or len(name.encode()) > 200:
                raise RunError(
                    f"{name!r} can't be the name of a file in a run", "Use letters, digits, '-', '_' and '.' only."
                )
        place = self.folder.joinpath(*map(str, names))
        if not place.resolve().is_relative_to(self.folder.resolve()):
            raise RunError(f"{place} leads out of the run folder (to {place.resolve()})", "Remove that symbolic link.")
        return place

    def lane_folder(self, trial: int, fold: int | None) -> Path:
        """lanes/trial-0/fold-3, or lanes/trial-0/all for a lane on all rows. Not made until something is written."""
        return self.path("lanes", f"trial-{trial:d}", "all" if fold is None else f"fold-{fold:d}")

    def checkpoint_folder(self, lanes: Sequence[Lane]) -> Path:
        """Where the checkpoints of a wave of these lanes lie. The same lanes in the same order: the same folder."""
        name = hashlib.sha256(json.dumps(list(lanes)).encode()).hexdigest()[:16]
        return self.path("checkpoints", f"wave-{name}")

    def drop_checkpoints(self) -> None:
        """Remove what is left of checkpoints once every lane is over: a run killed at a wave's end leaves some."""
        shutil.rmtree(self.path("checkpoints"), ignore_errors=True)

    def write_folds(self, table: Mapping[str, Any]) -> None:
        """Keep `row` and `fold` of every held-out row; on a run that has them, refuse any others."""
        new = {name: np.asarray(table[name], dtype=np.int64) for name in ("row", "fold")}
        stored = self.read_folds()
        if stored is None:
            self.write_table("folds.parquet", new)
        else:
            refuse_changed_folds(stored, new, self.folder)

    def read_folds(self) -> dict[str, np.ndarray] | None:
        """`row` and `fold` as they were written, or None."""
        return self.read_table("folds.parquet")

    def write_scores(self, scores: Mapping[str, Any]) -> None:
        """Write scores.json."""
        text = json.dumps(redact_tree(scores), indent=1, ensure_ascii=False)
        write_file(self.path("scores.json"), (text + "\n").encode())

    def write_out_of_fold(self, columns: Mapping[str, Any]) -> None:
        """Write out_of_fold.parquet from columns of equal length."""
        self.write_table("out_of_fold.parquet", columns)

    def write_lane_rows(
        self, trial: int, fold: int | None, columns: Mapping[str, Any], name: str = "rows.parquet"
    ) -> None:
        """Keep a lane's scores row by row, until all lanes are there to make one file of them."""
        write_file(self.lane_folder(trial, fold) / name, to_parquet(columns))

    def read_lane_rows(self, trial: int, fold: int | None, name: str = "rows.parquet") -> dict[str, np.ndarray]:
        """What `write_lane_rows` kept."""
        return from_parquet(self.lane_folder(trial, fold) / name)

    def write_table(self, name: str, columns: Mapping[str, Any]) -> None:
        """Write columns of equal length to a Parquet file of the run."""
        write_file(self.path(name), to_parquet(columns))

    def read_table(self, name: str) -> dict[str, np.ndarray] | None:
        """The columns of a Parquet file of the run, or None where there is no such file."""
        place = self.path(name)
        return from_parquet(place) if place.is_file() else None

    # — beginning and continuing —

    def _begin(
        self, recipe: Recipe, data_hashes: Sequence[bytes], rows: Sequence[int], prints: Mapping[str, str]
    ) -> None:
        self.write_table("row_hashes.parquet", {"row": np.asarray(rows, np.int64), "hash": list(data_hashes)})
        self.record(
            "created",
            recipe=recipe.model_dump(mode="json"),
            data=_digest(rows, data_hashes),
            num_rows=len(rows),
            prints=dict(prints),
        )

    def _check_same(
        self, recipe: Recipe, data_hashes: Sequence[bytes], rows: Sequence[int], prints: Mapping[str, str]
    ) -> None:
        first = self._journal.events[0]
        if first["event"] != "created":
            raise RunError(
                f"{self._journal.path} begins with {first['event']!r}, not with 'created'", "Restore it from a copy."
            )
        refuse_changed_recipe(first["recipe"], recipe, self.folder)
        if first["data"] != _digest(rows, data_hashes):
            stored = self.read_table("row_hashes.parquet") or {}
            refuse_changed_data(stored.get("row", ()), stored.get("hash", ()), rows, data_hashes)
        refuse_changed_prints(first["prints"], prints, self.folder)
        sweep_parts(self.folder)
        for folder in self.folder.glob("lanes/*/*"):
            sweep_parts(folder, folders=True)

    def _write_recipe(self, recipe: Recipe) -> None:
        text = dump_yaml(redact_tree(recipe.model_dump(mode="json"))).encode()
        place = self.path("recipe.yaml")
        with guard("reading", place):
            is_same = place.is_file() and place.read_bytes() == text
        if not is_same:
            write_file(place, text)

    def _say_opened(self, recipe: Recipe) -> None:
        self.record(
            "opened",
            pid=os.getpid(),
            host=socket.gethostname(),
            data=recipe.data.path,
            trust_remote_code=recipe.model.trust_remote_code,
            libraries={name: found for name in LIBRARIES if (found := _installed(name))},
        )


def _refuse_foreign_folder(place: Path) -> None:
    """A folder with files under our names but without a journal was not made by us, or has lost its memory."""
    if place.exists() and not place.is_dir():
        raise RunError(f"the output {str(place)!r} is a file", "Set output to a folder.")
    taken = [name for name in OURS if (place / name).exists()]
    if taken and not (place / "journal.jsonl").exists():
        raise RunError(
            f"{str(place)!r} holds {', '.join(taken)} but no journal.jsonl: it isn't a run that can be continued",
            "Restore its journal, or set output to another folder.",
        )


def _digest(rows: Sequence[int], hashes: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for row, content in zip(rows, hashes, strict=True):
        digest.update(b"%d %d " % (row, len(content)) + content)
    return digest.hexdigest()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
