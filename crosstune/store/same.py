"""Is this the run that it was? Another recipe, other data or another model in a run folder is refused, and named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from crosstune.errors import RunError
from crosstune.recipe.recipe import Recipe
from crosstune.store.secrets import MASK, redact_tree


def refuse_changed_recipe(stored: Mapping[str, Any], recipe: Recipe, folder: Path) -> None:
    """Name every key that matters and differs. Keys that a newer crosstune has added count with their default."""
    was, now = _flat(stored), _flat(redact_tree(recipe.what_matters()))
    free = _flat(recipe.model_dump(mode="json")).keys() - _flat(recipe.what_matters()).keys()
    default = _flat(Recipe.build({"model": "-", "data": "-"}).what_matters())
    changed = [
        f"{key} was {_word(was.get(key, default.get(key)))} and is now {_word(now.get(key, default.get(key)))}"
        for key in sorted(was.keys() | now.keys())
        if key not in free and not _equal(was.get(key, default.get(key)), now.get(key, default.get(key)))
    ]
    if changed:
        raise RunError(
            f"resume-recipe-changed: {str(folder)!r} holds the run of another recipe: " + "; ".join(changed),
            "Set output to another folder, or go back to the recipe in that folder's recipe.yaml.",
        )


def refuse_changed_data(
    was_rows: Iterable[int], was_hashes: Iterable[bytes], rows: Iterable[int], hashes: Iterable[bytes]
) -> None:
    """Raise, naming the first row that isn't as it was. The caller knows that one isn't."""
    was = list(zip(map(int, was_rows), map(bytes, was_hashes), strict=True))
    now = list(zip(map(int, rows), map(bytes, hashes), strict=True))
    place = next((i for i, (old, new) in enumerate(zip(was, now, strict=False)) if old != new), min(len(was), len(now)))
    if not was:
        what = "some row changed (row_hashes.parquet is gone, so it can't be named)"
    elif place == len(was):
        what = f"row {now[place][0]} is new ({len(was)} rows then, {len(now)} now)"
    elif place == len(now):
        what = f"row {was[place][0]} is gone ({len(was)} rows then, {len(now)} now)"
    else:
        what = f"row {now[place][0]} is the first that isn't the same ({len(was)} rows then, {len(now)} now)"
    raise RunError(
        f"resume-data-changed: since this run began, {what}",
        "Restore the rows, or set output to another folder to begin a new run with the changed ones.",
    )


def refuse_changed_prints(stored: Mapping[str, str], prints: Mapping[str, str], folder: Path) -> None:
    """Fingerprints of other inputs, by name. One that either side doesn't know is not judged."""
    changed = [name for name in stored if name in prints and stored[name] != prints[name]]
    if changed:
        raise RunError(
            f"resume-input-changed: {' and '.join(changed)} changed since the run in {str(folder)!r} began",
            "Restore what it was, or set output to another folder to begin a new run.",
        )


def refuse_changed_folds(stored: Mapping[str, Any], folds: Mapping[str, Any], folder: Path) -> None:
    """Raise, naming the first row that isn't held out where it was."""
    was = list(zip(map(int, stored["row"]), map(int, stored["fold"]), strict=True))
    now = list(zip(map(int, folds["row"]), map(int, folds["fold"]), strict=True))
    if was == now:
        return
    place = next((i for i, (old, new) in enumerate(zip(was, now, strict=False)) if old != new), min(len(was), len(now)))
    then = f"row {was[place][0]} in fold {was[place][1]}" if place < len(was) else "nothing further"
    here = f"row {now[place][0]} in fold {now[place][1]}" if place < len(now) else "nothing further"
    raise RunError(
        f"resume-folds-changed: the run in {str(folder)!r} held out {then}, and now it would be {here}",
        "Split the rows as before, or set output to another folder.",
    )


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and above != "sweep.":
            out |= _flat(value, f"{name}.")
        else:
            out[name] = value
    return out


def _equal(was: Any, now: Any) -> bool:
    """Equal, where what was redacted equals anything: a new token is no new recipe."""
    if isinstance(was, str) and isinstance(now, str) and (MASK in was or MASK in now):
        masked, other = (was, now) if MASK in was else (now, was)
        return re.fullmatch(".*".join(map(re.escape, masked.split(MASK))), other, re.DOTALL) is not None
    return bool(was == now)


def _word(value: Any) -> str:
    return "not set" if value is None else repr(value)
