"""`crosstune plan`: will it fit, how must it be set, what would another setting take? Nothing is loaded for it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from crosstune.errors import CrosstuneError, DeviceError
from crosstune.memory.config import read_config
from crosstune.memory.estimate import head_chunk
from crosstune.memory.gpus import Machine, find_gpu, free_ram_bytes, parse_bytes, this_cpu
from crosstune.memory.layout import Devices, ways
from crosstune.memory.peaks import peaks
from crosstune.memory.picture import draw_parts, save_png
from crosstune.memory.plan import describe, search
from crosstune.memory.precision import attention_kernel, choose_precision
from crosstune.memory.shape import ModelShape
from crosstune.memory.spare import use_spare
from crosstune.memory.visible import best_gpu, visible_gpus
from crosstune.memory.ways import Way, ways_to_fit
from crosstune.memory.widths import Job, Plan, make_plan
from crosstune.recipe.recipe import Recipe
from crosstune.recipe.yaml_text import write_text
from crosstune.units import bytes_words, count_words, seconds_words

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Explained:
    """A plan with its reasons. `plan` is the best that fits, or the smallest there is if `fits` is false."""

    plan: Plan
    alternatives: tuple[Way, ...]
    table: tuple[Plan, ...]  # rows a lane and pass x (none, half, all) recomputed, for the same lanes
    notes: tuple[str, ...]
    peaks: Mapping[str, int]  # train, evaluate, generate; merge: of RAM

    @property
    def fits(self) -> bool:
        """The device has room for the plan."""
        return self.plan.fits

    @property
    def exit_code(self) -> int:
        """0 if it fits; 2 if nothing does."""
        return 0 if self.fits else DeviceError.exit_code

    def to_json(self) -> dict[str, Any]:
        """Plain values. Bytes are whole numbers, times are seconds."""
        plan, job = self.plan, self.plan.job
        shape, like = job.shape, job.like
        base = sum(size for name, size in plan.parts.items() if name.startswith("base"))
        larger = plan.larger
        return {
            "fits": self.fits,
            "peak_bytes": plan.peak_bytes,
            "parts": dict(plan.parts),
            "peaks": dict(self.peaks),
            "settings": plan.settings,
            "waves": plan.waves,
            "lanes_per_wave": plan.lanes,
            "alternatives": [way.to_json() for way in self.alternatives],
            "device": job.machine.name,
            "free_bytes": job.free_bytes,
            "seconds": plan.seconds,
            "lanes": job.num_lanes,
            "accumulation": plan.accumulation,
            "evaluate_tokens": plan.evaluate_tokens,
            "max_tokens": plan.max_tokens,
            "pass_tokens": plan.pass_tokens,
            "base_parameters": shape.parameters,
            "base_bytes": base,
            "trainable_parameters": shape.lane_parameters(like.targets, like.rank),
            "logits_bytes": 4 * plan.pass_tokens * shape.vocab,
            "logits": self._logits_words(),
            "next_larger": larger and {"settings": larger.settings, "peak_bytes": larger.peak_bytes},
            "layers": plan.layout and dict(zip(plan.layout.devices.names, plan.layout.layers, strict=True)),
            "table": [_row(row) for row in self.table],
            "notes": list(self.notes),
        }

    def show(self, console: Console) -> None:
        """Print verdict, parts, the table of widths and the ways to fit."""
        from rich.table import Table
        from rich.text import Text

        plan = self.plan
        verdict = ("fits", "bold green") if self.fits else ("does not fit", "bold red")
        console.print(Text.assemble(verdict, f" on {plan.job.machine.name}: {plan}"))
        if plan.larger is not None:
            console.print(f"The next larger plan: {plan.larger}", markup=False)
        parts = Table("part", "bytes", "share", box=None, pad_edge=False)
        for name, size in plan.parts.items():
            if size:
                parts.add_row(name, bytes_words(size), f"{100 * size / plan.peak_bytes:.1f}%")
        parts.add_row("in all", bytes_words(plan.peak_bytes), "", style="bold")
        console.print(parts)
        console.print(", ".join(f"{name} {bytes_words(size)}" for name, size in self.peaks.items()) + " (merge: RAM)")
        console.print(self._logits_words())
        widths = Table("rows x accumulation", "recomputed layers", "memory", "fits", "time", box=None, pad_edge=False)
        for row in self.table:
            words = "yes" if row.fits else "no"
            widths.add_row(
                f"{row.micro_batch} x {row.accumulation}", str(row.settings["device.checkpointing"]),
                bytes_words(row.peak_bytes), words, seconds_words(row.seconds), style="" if row.fits else "dim",
            )  # fmt: skip
        console.print(widths)
        if self.alternatives:
            console.print("To save memory:" if self.fits else "Ways to fit:")
        for way in self.alternatives[:3]:
            console.print(f"  {way}", highlight=False, markup=False)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False, markup=False)

    def picture(self) -> str:
        """The parts as a stacked bar with the device's limit as a line: SVG."""
        return draw_parts(self.plan.parts, self.plan.free_bytes, title=self.plan.job.machine.name)

    def save_picture(self, file: Path) -> None:
        """The picture as a file: PNG if its name says so (extra `plot`), else SVG."""
        if file.suffix.lower() == ".png":
            save_png(self.plan.parts, self.plan.free_bytes, file, title=self.plan.job.machine.name)
        else:
            write_text(file, self.picture())

    def _repr_html_(self) -> str:
        """For a notebook."""
        from html import escape

        verdict = "fits" if self.fits else "does not fit"
        ways = "".join(f"<li>{escape(str(way))}</li>" for way in self.alternatives[:3])
        return f"<p><b>{verdict}</b>: {escape(str(self.plan))}</p>{self.picture()}<ul>{ways}</ul>"

    def _logits_words(self) -> str:
        plan, vocab = self.plan, self.plan.job.shape.vocab
        chunk = min(plan.pass_tokens, head_chunk(vocab, plan.job.machine.kind))
        part, whole = bytes_words(4 * chunk * vocab), bytes_words(4 * plan.pass_tokens * vocab)
        return (
            f"Logits: the head's loss is chunked, {count_words(chunk)} targets at a time ({part} in fp32); "
            f"whole they would take {whole}."
        )


def explain(
    recipe: Recipe | str | os.PathLike[str] | Mapping[str, Any],
    *,
    gpu: str | None = None,
    memory: str | None = None,
    lanes: int | None = None,
    lengths: NDArray[np.integer] | Sequence[int] | None = None,
) -> Explained:
    """The plan for `recipe` on `gpu` (such as l4), on a device with `memory` (such as 16GiB), or on this computer.

    `lanes`: how many adapters are trained in all; default: folds x trials. `lengths`: tokens of each row; default: the
    recipe's data, tokenised. Raises CrosstuneError for mistakes; that nothing fits is an answer, not an error.
    """
    if not isinstance(recipe, Recipe):
        recipe = Recipe.build(recipe) if isinstance(recipe, Mapping) else Recipe.load(recipe)
    shape = ModelShape.from_config(read_config(recipe.model))
    machine, free, notes = choose_machine(recipe, gpu, memory)
    precision = choose_precision(recipe.device.precision, machine)
    notes.append(f"precision {precision.value}: {precision.why}")
    kernel = attention_kernel(machine, precision.value, head_dim=shape.head_dim, masked=recipe.data.packing)
    notes.append(f"attention {kernel.value}: {kernel.why}")
    if not shape.known:
        notes.append(f"the formulas don't know {shape.family or 'this architecture'}: a Llama block stands in for it")
    found, num_folds = _lengths_of(recipe, shape, notes) if lengths is None else (np.asarray(lengths), recipe.folds.k)
    trials, ranks = _trials_of(recipe)
    job = describe(
        recipe,
        shape,
        found,
        num_lanes=lanes or num_folds * trials,
        ranks=ranks,
        machine=machine,
        precision=precision.value,
    )
    for devices in _places(recipe, machine, free, named=gpu is not None or memory is not None, notes=notes):
        job = replace(job, free_bytes=free, devices=devices)
        best, least = search(job, recipe)
        if best is not None:
            break
    plan = best or least
    notes += _outlier(job)
    answer = recipe.evaluate.max_new_tokens or min(512, max(16, job.tokens))
    most = peaks(plan, new_tokens=answer, rows=math.ceil(len(found) / num_folds))
    rows = _table(job, plan, recipe.device.graphs)
    return Explained(plan, tuple(ways_to_fit(job, plan)), rows, tuple(notes), most)


plan = explain  # the name it has in the package: crosstune.plan(…)


def choose_machine(recipe: Recipe, gpu: str | None, memory: str | None) -> tuple[Machine, int, list[str]]:
    """(device, bytes free on it, notes): the one named, or of this computer the one that a run would take."""
    if gpu is not None:
        machine = find_gpu(gpu)
        free = parse_bytes(memory) if memory is not None else machine.total_bytes
        return replace(machine, total_bytes=max(free, machine.total_bytes)), free, []
    present = None if recipe.device.kind in ("cpu", "mps") else best_gpu()
    if present is None and recipe.device.kind == "cuda" and memory is None:
        raise DeviceError(
            "device-unavailable: device.kind is cuda, and this computer has no NVIDIA GPU (NVML finds none)",
            "Name the GPU to plan for with --gpu or its memory with --memory, or set device.kind to auto.",
        )
    if memory is not None:
        free = parse_bytes(memory)
        if present is not None:
            return present.machine, free, []
        if recipe.device.kind == "cpu":
            return replace(this_cpu(), total_bytes=free), free, []
        note = "planned for a GPU of compute capability 8.0 with the rates of an A100; name one with --gpu"
        return replace(find_gpu("a100-40"), name=f"a GPU with {bytes_words(free)}", total_bytes=free), free, [note]
    if present is not None:
        return present.machine, present.free_bytes, [str(present)]
    return this_cpu(), free_ram_bytes(), ["no NVIDIA GPU found: planned for this computer's CPU and RAM"]


def _places(
    recipe: Recipe, machine: Machine, free: int, *, named: bool, notes: list[str]
) -> tuple[Devices | None, ...]:
    """Where the base may lie, in the order of preference; None: on one device."""
    device = recipe.device
    if machine.kind != "cuda" or (device.layers == "one" and device.offload == "none"):
        return (None,)
    seen = visible_gpus()
    if named or not seen:
        count = 2 if device.gpus == "auto" else len(device.gpus)
        notes.append(f"device.layers: {device.layers} over {count} such GPUs (as many as device.gpus names, else 2)")
        return ways(device.layers, device.offload, [free] * count, free_ram_bytes())
    chosen = seen if device.gpus == "auto" else [seen[int(at)] for at in device.gpus if int(at) < len(seen)]
    return ways(device.layers, device.offload, [gpu.free_bytes for gpu in chosen], free_ram_bytes())


def _lengths_of(recipe: Recipe, shape: ModelShape, notes: list[str]) -> tuple[NDArray[np.integer], int]:
    """(tokens of each row, number of folds) from the data; the model's own limit where they can't be had."""
    limit, count, num_folds = recipe.data.max_tokens or shape.max_tokens or 2048, 1000, recipe.folds.k
    try:
        from crosstune.data.batches import pack_rows
        from crosstune.data.load import load_rows
        from crosstune.data.tokenizer import ready_tokenizer
        from crosstune.data.tokens import tokenize
        from crosstune.splits.splits import split_rows

        rows = load_rows(recipe.data.path, recipe.data)
        if not len(rows):
            raise DeviceError("the data has no rows", "Give rows to plan for.")
        count, num_folds = len(rows), len(split_rows(rows, recipe.folds))
        ready = ready_tokenizer(recipe.model)
        tokens = tokenize(rows, ready.tokenizer, recipe.data, cache=None, limit=limit, stop_ids=ready.stop_ids)
        lengths: NDArray[np.integer] = tokens.lengths
        if recipe.data.packing:
            packs = pack_rows(tokens.lengths, range(len(lengths)), tokens.max_tokens)
            lengths = np.array([sum(int(tokens.lengths[row]) for row in pack) for pack in packs])
        return lengths, num_folds
    except (CrosstuneError, ImportError) as error:
        first = str(error).split("\n")[0]
        notes.append(f"{count} rows of {limit} tokens are assumed, as the data's own lengths are not known ({first})")
        return np.full(count, limit), num_folds


def _trials_of(recipe: Recipe) -> tuple[int, list[int]]:
    """(number of trials, ranks that occur)."""
    if not recipe.sweep:
        return 1, [recipe.lora.rank]
    from crosstune.sweep.sweep import expand

    trials = expand(recipe)
    return len(trials), sorted({trial.recipe.lora.rank for trial in trials})


def _outlier(job: Job) -> list[str]:
    """A row far longer than the others sets the peak for all."""
    longest, rest = int(np.max(job.lengths)), float(np.percentile(job.lengths, 95))
    if longest < 4 * rest or longest < 256:
        return []
    row = int(np.argmax(job.lengths)) + 1
    return [
        f"length-outlier: row {row} has {longest} tokens, 95% of the rows have at most {rest:.0f}; "
        f"the peak is taken at it, and data.max_tokens would cut it"
    ]


def _table(job: Job, plan: Plan, graphs: bool | Literal["auto"]) -> tuple[Plan, ...]:
    """Powers of two of rows a pass, and the plan's own, each with nothing, half and all recomputed."""
    layers = job.shape.layers
    counts = {2**power for power in range(8) if 2**power <= job.batch_size} | {job.batch_size, plan.micro_batch}
    checkpointed = sorted({0, layers // 2, layers, plan.checkpointed_layers})
    rows = [make_plan(job, plan.lanes, micro, count) for micro in sorted(counts) for count in checkpointed]
    return tuple(use_spare(row, graphs) if row.fits else row for row in rows)


def _row(plan: Plan) -> dict[str, Any]:
    return {
        "micro_batch": plan.micro_batch, "accumulation": plan.accumulation, "fits": plan.fits,
        "checkpointing": plan.settings["device.checkpointing"], "peak_bytes": plan.peak_bytes, "seconds": plan.seconds,
    }  # fmt: skip
