"""From a run to what is served: merged with the run's own rows as proof, or its folds' adapters averaged.

Knows where a run keeps its adapters and which rows each has not seen; `export` does the work.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.data.load import Rows, load_rows
from crosstune.data.tokenizer import longest_row
from crosstune.data.tokens import tokenize
from crosstune.errors import DataError, RunError, refuse
from crosstune.progress import Progress
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.sections import Data, Lora
from crosstune.results.result import Result
from crosstune.store.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from crosstune.export.average import Averaged, Score
    from crosstune.export.merge import MergeReport
    from crosstune.export.verify import EncodedRow

MOST_ROWS = 64


def merge(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    trial: int | str = "best",
    data: Any = None,
    dtype: str | None = None,
    quantize: str = "none",
    base: str | None = None,
    into_quantized: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> MergeReport:
    """Merge an adapter into its base, compare the result with base + adapter on real rows, and write it to `out`.

    source          a run with a fit, a fold's folder in it, or any PEFT adapter's folder
    trial           where the run has several fits: which one
    data            rows to compare on: a file, hub id or data frame. Default: rows of the run that the adapter has not
                    seen, else some that it has; without a run eight short prompts
    dtype           fp32, bf16 or fp16; default: each tensor keeps its own
    quantize        nf4 or int8: write it quantised, verified a second time as such
    base            hub id, folder or .gguf of the base; default: the one that the adapter names
    into_quantized  merge into a base that is stored in 4 or 8 bit, with what that costs in the report
    device          where the comparison runs; merging needs no GPU

    Nothing is written if the merged model differs by more than rounding explains.
    """
    from crosstune.export.merge import merge as merge_adapter
    from crosstune.export.saved import adapter_folder

    folder = adapter_folder(chosen_fit(source, trial))
    return merge_adapter(
        folder,
        Path(out),
        dtype=dtype,
        quantize=quantize,  # type: ignore[arg-type]  # judged there
        base=base,
        rows=rows_for(folder, data) or None,
        into_quantized=into_quantized,
        device=device,
        progress=progress,
    )


def average(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    trial: int | str = "best",
    rank: int | None = None,
    base: str | None = None,
    data: Any = None,
    device: str = "auto",
) -> Averaged:
    """Write the average of a trial's fold adapters as one adapter: exact at the sum of their ranks, or cut to `rank`.

    data    rows to score it on: a path, hub id or data frame; rows that some fold has seen are left out
    device  where it is scored

    A row of the run can't score it: every one was trained on by all of these adapters but one. Where the run lies
    inside of a nested cross-validation, its outer fold's rows do, without `data`. Without such rows there's no score.
    """
    from crosstune.export.average import average_adapters

    result = Result.read(run)
    number = result.best["trial"] if trial == "best" else trial
    folders = [folder for (of, _), folder in sorted(result.adapters.items()) if of == number]
    if not folders:
        known = ", ".join(str(entry["trial"]) for entry in result.trials)
        problem = f"{str(result.run)!r} has no trial {trial!r} with finished folds"
        raise RunError(problem, f"Choose best, or one of {known}.")
    unseen = rows_no_fold_saw(Run.read(run), data)
    score = None if unseen is None else partial(_score, Run.read(run), unseen, folders[0], base, device)
    return average_adapters(folders, Path(out), rank=rank, base=base, score=score)


def rows_no_fold_saw(run: Run, data: Any = None) -> Rows | None:
    """The rows of `data` that no lane of the run was trained or scored on; without it, those of its outer fold.

    None where there are none to be had; raises DataError where `data` was given and holds no new row.
    """
    outer = _outer_rows(run)
    section = _data_section(run, data)
    if data is None and (not outer or section.path.endswith(" in memory")):
        return None
    table = run.read_table("row_hashes.parquet")
    if table is None:
        raise RunError(f"{str(run.folder)!r} has lost row_hashes.parquet, which says what its folds saw", "Restore it.")
    seen = {bytes(key) for row, key in zip(table["row"], table["hash"], strict=True) if int(row) not in outer}
    rows = load_rows(section.path if data is None or isinstance(data, str | Path) else data, section)
    old = [row.number for row, key in zip(rows.rows, rows.hashes, strict=True) if key in seen]
    if len(old) == len(rows):
        raise DataError(
            f"{rows.name}: all {len(rows)} rows are among those of the run, which its folds have seen",
            "Give rows that were kept aside (data=…, --data FILE).",
        )
    return rows.without(old)


def _outer_rows(run: Run) -> set[int]:
    """Numbers of the rows that a nested cross-validation set aside before this run, the choice within, began."""
    journals = sorted(run.folder.parent.glob(f"{run.folder.name}-chosen-*/journal.jsonl"))  # any winner's: same rows
    if not run.folder.name.startswith("outer-") or not journals:
        return set()
    chosen = Run.read(journals[0].parent)
    table = chosen.read_folds()
    same_rows = chosen.events("created")[0]["data"] == run.events("created")[0]["data"]
    return set() if table is None or not same_rows else set(table["row"].tolist())


def _score(
    run: Run,
    rows: Rows,
    folder: Path,
    base_name: str | None,
    device: str,
    layers: Sequence[str],
    adapters: Sequence[tuple[Lora, Mapping[str, Tensor]]],
) -> Score:
    """The loss of the base and of each adapter on `rows`, all adapters together as lanes."""
    from crosstune.export.average import Score
    from crosstune.export.companions import load_saved_tokenizer
    from crosstune.model.attach import LaneSpec, attached
    from crosstune.model.base import load_base, load_config
    from crosstune.model.device import named_device
    from crosstune.train.evaluate import score_base, score_lanes

    recipe = Recipe.build({**run.stored_recipe()})
    model = recipe.model if base_name is None else recipe.model.model_copy(update={"name": base_name})
    tokenizer = load_saved_tokenizer(folder)
    tokens = tokenize(rows, tokenizer, recipe.data, cache=None, limit=longest_row(load_config(model), tokenizer))
    refuse(tokens.findings)
    place = named_device(device, recipe.device)
    base = load_base(model, tokenizer, device=place.device, precision=place.precision.value)
    every = range(len(tokens))
    untuned = score_base(base, tokens, every)
    with attached(base, [LaneSpec(lora, tuple(layers), 0) for lora, _ in adapters]) as slots:
        for k, (_, tensors) in enumerate(adapters):
            slots.load(k, tensors)
        losses = [scores.loss for scores in score_lanes(slots, tokens, [every] * len(adapters))]
    return Score(rows.name, len(rows), losses[0], untuned.loss, tuple(losses[1:]))


def chosen_fit(source: str | os.PathLike[str], trial: int | str) -> Path:
    """`source` itself, or the fit of one trial where it is a run that has several."""
    place = Path(source).expanduser()
    if not (place / "journal.jsonl").is_file():
        return place
    fits = sorted(number for number, fold in Run.read(place).finished_lanes() if fold is None)
    if len(fits) < 2 and trial == "best":
        return place
    number = Result.read(place).report["best"] if trial == "best" else trial
    if number not in fits:
        named = " or ".join(f"--trial {fit}" for fit in fits)
        if number is None:  # adapters of several recipes or seeds: no folds say which is best
            raise RunError(f"{str(place)!r} has {len(fits)} fits and no folds to choose one by", f"Name one: {named}.")
        command = f"crosstune fit {shlex.quote(str(place))} --trial {number}"
        fix = f"Fit it first: {command}" + (f"; or name another: {named}." if fits else "")
        raise RunError(f"{str(place)!r} has no fit of trial {number}", fix)
    return Run.read(place).lane_folder(number, None)


def rows_for(adapter: Path, data: Any = None, *, most: int = MOST_ROWS) -> list[EncodedRow]:
    """Rows to judge an adapter on, encoded by the adapter's own tokenizer; [] where there are none."""
    from crosstune.export.companions import has_tokenizer, load_saved_tokenizer
    from crosstune.export.verify import EncodedRow

    run = run_of(adapter)
    if not has_tokenizer(adapter) or (run is None and data is None):
        return []
    section = _data_section(run, data)
    if data is None and section.path.endswith(" in memory"):
        return []  # rows that were passed from Python and are gone
    rows = load_rows(section.path if data is None or isinstance(data, str | Path) else data, section)
    unseen = [] if run is None or data is not None else unseen_rows(adapter, run)
    kept = [row for row in rows.rows if not unseen or row.number in unseen]
    step = max(1, len(kept) // most)
    numbers = {row.number for row in kept[::step][:most]}
    few = rows.without(row.number for row in rows.rows if row.number not in numbers)
    tokens = tokenize(few, load_saved_tokenizer(adapter), section, cache=None, limit=2048)
    pairs = [tokens.row(place) for place in range(len(tokens))]
    return [EncodedRow(tuple(ids.tolist()), tuple(learn.tolist())) for ids, learn in pairs if len(ids) > 1]


def unseen_rows(adapter: Path, run: Run) -> set[int]:
    """Numbers of the rows that a lane of the run was not trained on: its fold's, or those a fit held out."""
    lane = adapter.parent
    trial = int(lane.parent.name.removeprefix("trial-"))
    if lane.name == "all":
        return set(run.finished_lanes().get((trial, None), {}).get("held_out_rows", ()))
    fold, table = int(lane.name.removeprefix("fold-")), run.read_folds()
    return set() if table is None else set(table["row"][table["fold"] == fold].tolist())


def run_of(adapter: Path) -> Run | None:
    """The run in whose lanes/trial-…/fold-… (or all) an adapter lies."""
    lanes = adapter.absolute().parent.parent.parent
    inside = lanes.name == "lanes" and (lanes.parent / "journal.jsonl").is_file()
    return Run.read(lanes.parent) if inside else None


def _data_section(run: Run | None, data: Any) -> Data:
    """How rows are read and rendered: as in the run, with another path if `data` names one."""
    path = {"path": str(data)} if isinstance(data, str | Path) else {}
    if run is None:
        return Data.model_validate({"path": "rows", **path})
    section = Recipe.build({**run.stored_recipe()}).data
    return section.model_copy(update={**path, "skip_bad_rows": True})
