"""From a run to what is served: merged with the run's own rows as proof, or its folds' adapters averaged.

Knows where a run keeps its adapters and which rows each has not seen; `export` does the work.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.data.load import load_rows
from crosstune.data.tokens import tokenize
from crosstune.errors import RunError
from crosstune.progress import Progress
from crosstune.recipe import Data, Recipe
from crosstune.result import Result
from crosstune.store.run import Run

if TYPE_CHECKING:
    from crosstune.export.average import Averaged
    from crosstune.export.merge import MergeReport
    from crosstune.export.verify import EncodedRow

MOST_ROWS = 64


def merge(
    source: str | Path,
    out: str | Path,
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
        out,
        dtype=dtype,
        quantize=quantize,  # type: ignore[arg-type]  # judged there
        base=base,
        rows=rows_for(folder, data) or None,
        into_quantized=into_quantized,
        device=device,
        progress=progress,
    )


def average(
    run: str | Path, out: str | Path, *, trial: int | str = "best", rank: int | None = None, base: str | None = None
) -> Averaged:
    """Write the average of a trial's fold adapters as one adapter: exact at the sum of their ranks, or cut to `rank`.

    It carries no score: every row of the run was trained on by all of these adapters but one.
    """
    from crosstune.export.average import average_adapters

    result = Result.read(run)
    number = result.best["trial"] if trial == "best" else trial
    folders = [folder for (of, _), folder in sorted(result.adapters.items()) if of == number]
    if not folders:
        known = ", ".join(str(entry["trial"]) for entry in result.trials)
        raise RunError(f"{str(run)!r} has no trial {trial!r} with finished folds", f"Choose best, or one of {known}.")
    return average_adapters(folders, out, rank=rank, base=base)


def chosen_fit(source: str | Path, trial: int | str) -> Path:
    """`source` itself, or the fit of one trial where it is a run that has several."""
    place = Path(source).expanduser()
    if not (place / "journal.jsonl").is_file():
        return place
    fits = sorted(number for number, fold in Run.read(place).finished_lanes() if fold is None)
    if len(fits) < 2 and trial == "best":
        return place
    number = Result.read(place).report["best"] if trial == "best" else trial
    if number not in fits:
        raise RunError(
            f"{str(source)!r} has no fit of trial {trial!r}"
            + (f"; it has {', '.join(map(str, fits))}" if fits else ""),
            f"Fit it first: crosstune fit {source} --trial {trial}",
        )
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
