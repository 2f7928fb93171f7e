"""The memory plan against a GPU: closed form, rehearsal and reading of one grid of settings, a JSON line each.

    python -m bench.memory --out grid.jsonl                 # on the GPU: 84 cells, about 5 minutes
    python -m bench.memory --out grid.jsonl --half blind    # cells not looked at while the code was written
    python -m bench.memory --out edges.jsonl --edges        # plans that just fit under a cap, and the next larger ones
    python -m bench.memory --tiny --out /tmp/grid.jsonl     # anywhere: the script itself, with tiny shapes
    python -m bench.memory --again grid.jsonl               # anywhere: predictions of today beside the readings
    python -m bench.memory --table grid.jsonl               # what was missed, and by how much

Rehearsals run in other processes beside the GPU's own work; they never see its readings.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench.shapes import _linear, _normal
from crosstune.memory.estimate import Settings, estimate
from crosstune.memory.gpus import MIB, Machine, find_gpu
from crosstune.memory.plan import plan_memory
from crosstune.memory.shape import ModelShape
from crosstune.memory.widths import evaluation_tokens
from crosstune.model.base import DTYPES, Base
from crosstune.model.device import machine_of, outside_allocator
from crosstune.recipe import Recipe
from crosstune.train.drill import go_through
from crosstune.train.rehearse import rehearse, settle

MODELS: dict[str, dict[str, Any]] = {
    "1b": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
           "tie_word_embeddings": True},
    "8b": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
           "tie_word_embeddings": False},
    # Qwen/Qwen2.5-1.5B's config.json: biases on query, key and value, 6 query heads a key head, a wide vocabulary
    "qwen2-1.5b": {"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                   "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                   "tie_word_embeddings": True},
    "tiny": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 384,
             "tie_word_embeddings": False},
}  # fmt: skip
QUANTIZATIONS = ("none", "int8", "nf4")
LANES, RANKS = (1, 5, 8), (8, 64)
ROWS = ((1, 128), (1, 512), (2, 256), (1, 2048), (2, 1024), (4, 2048), (1, 8192), (4, 128))  # rows a lane x tokens
SPENT = ((2, 128), (4, 128))  # recorded as CUDA graphs, over copies of a 4-bit base; int8 can't be recorded
MOST_TOKENS = 40960  # a pass: a step of an 8B shape stays below 8 s
ROOM = 120 << 30  # of an H200's 140 GiB: the reading is to be of a peak, not of a refusal


def grid(models: list[str], half: str) -> Iterator[tuple[str, Settings]]:
    """8 cells for each model and quantisation: every lane count, rank, length and share of checkpointed layers occurs;
    and two whose passes are recorded, over copies of the base where it has 4 bits.

    Odd cells are the blind half: nothing in the code was chosen after looking at them.
    """
    for group, (name, quantization) in enumerate((name, q) for name in models for q in QUANTIZATIONS):
        shape = ModelShape.from_config(MODELS[name])
        spent = SPENT if quantization != "int8" else ()
        for place, (rows, tokens) in enumerate((*ROWS, *spent)):
            if half != "all" and (place % 2 == 1) != (half == "blind"):
                continue
            lanes = LANES[(place + group) % 3]
            checkpointed = (0, shape.layers // 2, shape.layers)[(place // 3 + place + group) % 3]
            settings = Settings(
                lanes, rows, tokens, checkpointed, quantization, rank=RANKS[(place // 2 + group) % 2],
                targets=shape.linears, dropout=place == 7,
            )  # fmt: skip
            settings = fitting(shape, settings)
            if place >= len(ROWS):
                settings = replace(settings, recorded=settings.pass_tokens, copies=quantization == "nf4")
            yield name, settings


def fitting(shape: ModelShape, settings: Settings) -> Settings:
    """Fewer lanes, then more checkpointed layers, until the GPU holds the cell."""
    while settings.lanes > 1 and (
        settings.pass_tokens > MOST_TOKENS or estimate(shape, settings, find_gpu("h200")).peak_bytes > ROOM
    ):
        settings = replace(settings, lanes=LANES[LANES.index(settings.lanes) - 1])
    if estimate(shape, settings, find_gpu("h200")).peak_bytes > ROOM:
        settings = replace(settings, checkpointed=shape.layers)
    return settings


def random_base(config: dict[str, Any], settings: Settings, device: torch.device) -> Base:
    """Random weights of this shape on the device, quantised layer by layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    dtype, draw = DTYPES[settings.precision], torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation="sdpa")
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        home = model.get_submodule(parent)
        if isinstance(module, nn.Linear) and module is not head:
            bias = module.bias
            made = _linear(module, settings.quantization, dtype, device, draw)
            if bias is not None:
                made.bias = nn.Parameter(torch.zeros(bias.shape, dtype=dtype, device=device), requires_grad=False)
            setattr(home, leaf, made)
        elif isinstance(module, nn.Linear | nn.Embedding):
            if not (module is head and known.tie_word_embeddings):
                module.weight = nn.Parameter(_normal(module.weight.shape, dtype, device, draw), requires_grad=False)
        elif name.endswith("norm"):
            module.weight = nn.Parameter(
                torch.ones(module.weight.shape, dtype=dtype, device=device), requires_grad=False
            )
        elif name.endswith("rotary_emb"):
            setattr(home, leaf, type(module)(known).to(device))
    model.tie_weights()
    base = Base(model, None, device, dtype, config["model_type"])
    base.freeze()
    return base


def predict(
    config: dict[str, Any], settings: Settings, machine: Machine, expandable: bool, evaluate: int, outside: int
) -> dict[str, Any]:
    """What closed form and rehearsal say; runs in a process of its own.

    `outside`: bytes outside the allocator before the cell. One process reads all cells, and what CUDA has loaded for
    other kernels stays.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    shape = ModelShape.from_config(config)
    closed = estimate(shape, replace(settings, evaluate_tokens=evaluate), machine)
    rehearsal = rehearse(config, settings, machine, evaluate_tokens=evaluate)
    shown, outside = rehearsal.replay(expandable=expandable), max(outside, rehearsal.outside_bytes)
    closed_used = closed.reserved_bytes + outside
    return {
        "closed_allocated": closed.allocated_bytes, "closed_used": closed_used, "closed_at": closed.at,
        "dry_allocated": shown.peak_allocated, "dry_reserved": shown.peak_reserved, "dry_at": shown.at,
        "dry_used": shown.peak_reserved + outside, "dry_phases": shown.by_mark,
        "dry_seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def read(base: Base, settings: Settings, evaluate: int) -> dict[str, Any]:
    """What the GPU says."""
    device = base.device
    cuda = device.type == "cuda"
    gc.collect()
    if not cuda:
        go_through(base, settings, lambda label: None, evaluate_tokens=evaluate)
        return {"allocated": 0, "reserved": 0, "used": 0, "phases": {}, "seconds": 0.0}
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # those of the stream on which the cell before recorded its passes, too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    phases: dict[str, int] = {}
    most = {"allocated": 0, "reserved": 0, "used": 0}

    def mark(label: str) -> None:
        now = torch.cuda.max_memory_allocated()
        phases[label] = max(phases.get(label, 0), now)
        most["allocated"] = max(most["allocated"], now)
        most["reserved"] = max(most["reserved"], torch.cuda.max_memory_reserved())
        free, total = torch.cuda.mem_get_info()
        most["used"] = max(most["used"], total - free)
        torch.cuda.reset_peak_memory_stats()

    began = time.monotonic()
    go_through(base, settings, mark, evaluate_tokens=evaluate)
    torch.cuda.synchronize()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return {**most, "phases": phases, "seconds": round(time.monotonic() - began, 2), "retries": retries}


def run(options: argparse.Namespace) -> None:
    """Predict and read every cell of the grid."""
    began = time.monotonic()
    cuda = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    cells = list(grid(["tiny"] if options.tiny else options.models, options.half))
    machine = machine_of(device) if cuda else find_gpu("h200")
    expandable = machine.expandable
    if cuda:  # the context, and cuBLAS's workspaces of both threads, as the first step of a process makes them
        x = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        (x @ x).sum().backward()
        x.grad = None
        del x
    with Path(options.out).open("w") as out, ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        say(
            kind="env", gpu=machine.name, torch=torch.__version__, expandable=expandable, machine=asdict(machine),
            outside=outside_allocator(device) if cuda else 0, allocated=torch.cuda.memory_allocated() if cuda else 0,
        )  # fmt: skip
        waiting: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []
        base, held = None, None
        for name, settings in cells:
            config = MODELS[name]
            evaluate = evaluation_tokens(ModelShape.from_config(config), settings, find_gpu("h200"))
            outside = outside_allocator(device) if cuda else 0
            foretold = pool.submit(predict, config, settings, machine, expandable, evaluate, outside)
            line: dict[str, Any] = {"kind": "cell", **named(name, settings), "evaluate": evaluate, "outside": outside}
            if time.monotonic() - began > options.seconds:
                line["skipped"] = True
            else:
                if held != (name, settings.quantization):
                    base = None
                    gc.collect()
                    base, held = random_base(config, settings, device), (name, settings.quantization)
                try:
                    line |= read(base, settings, evaluate)
                except torch.OutOfMemoryError as error:
                    line["error"] = str(error)[:200]
            waiting.append((line, foretold))
            while waiting and waiting[0][1].done():
                line, foretold = waiting.pop(0)
                say(**line, **foretold.result())
        for line, foretold in waiting:
            say(**line, **foretold.result())
        say(kind="done", seconds=round(time.monotonic() - began, 1))


def again(path: Path, models: list[str], processes: int) -> None:
    """Make the predictions anew beside a file's readings."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    cells = {json.dumps(named(name, settings)): (name, settings) for name, settings in grid(models, "all")}
    machine = Machine(**{**lines[0]["machine"], "capability": tuple(lines[0]["machine"]["capability"])})
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        foretold = {}
        for place, line in enumerate(lines):
            if line["kind"] == "cell":
                name, settings = cells[json.dumps({key: line[key] for key in named("", Settings(1, 1, 1))})]
                told = (MODELS[name], settings, machine, lines[0]["expandable"], line["evaluate"], line["outside"])
                foretold[place] = pool.submit(predict, *told)
        for place, found in foretold.items():
            lines[place] |= found.result()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


EDGES = (  # model, quantisation, GiB of the capped process, tokens of a row
    ("1b", "none", 8, 1024), ("1b", "nf4", 6, 2048), ("1b", "int8", 10, 512), ("qwen2-1.5b", "none", 12, 1024),
    ("qwen2-1.5b", "nf4", 10, 2048), ("8b", "nf4", 12, 512), ("8b", "nf4", 16, 1024), ("8b", "nf4", 24, 2048),
    ("8b", "int8", 16, 512), ("8b", "none", 24, 1024), ("8b", "none", 32, 2048),
)  # fmt: skip


def find_edge(name: str, quantization: str, gib: int, tokens: int, machine: Machine) -> dict[str, Any]:
    """The plan for five lanes in `gib`, then by rehearsal the fewest checkpointed layers with which it fits."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config, free = MODELS[name], gib << 30
    shape = ModelShape.from_config(config)
    recipe = Recipe.build({"model": {"name": name, "quantization": quantization}, "data": "none"})
    plan = plan_memory(
        recipe=recipe, shape=shape, lengths=np.full(200, tokens), num_lanes=5, ranks=[16], free_bytes=free,
        device_kind="cuda", precision="bf16", machine=machine,
    )  # fmt: skip
    plan = settle(plan.spending(graphs=False, copies=False), config)

    def fits(count: int) -> bool:
        widths = replace(plan.widths, checkpointed=count)
        shown = rehearse(config, widths, machine, evaluate_tokens=plan.evaluate_tokens)
        return shown.replay(limit=free - machine.context_bytes).fits

    low, high = -1, plan.checkpointed_layers  # low doesn't fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return {**named(name, plan.widths), "gib": gib, "checkpointed": high, "evaluate": plan.evaluate_tokens}


def edges(options: argparse.Namespace) -> None:
    """Run each plan at the edge under its cap, and the one with a layer less checkpointed."""
    device = torch.device("cuda", 0)
    machine = machine_of(device)
    with Path(options.out).open("w") as out, ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        found = [pool.submit(find_edge, *edge, machine) for edge in EDGES]
        base, held = None, None
        for edge in found:
            cell = edge.result()
            settings = Settings(
                cell["lanes"], cell["rows"], cell["tokens"], cell["checkpointed"], cell["quantization"], rank=16,
                targets=ModelShape.from_config(MODELS[cell["model"]]).linears,
            )  # fmt: skip
            if held != (cell["model"], cell["quantization"]):
                base = None
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(1.0)
                base, held = random_base(MODELS[cell["model"]], settings, device), (cell["model"], cell["quantization"])
            assert base is not None
            line = {"kind": "edge", **cell, "runs": runs_capped(base, settings, cell, machine)}
            if settings.checkpointed > 0:
                larger = replace(settings, checkpointed=settings.checkpointed - 1)
                line["larger_runs"] = runs_capped(base, larger, cell, machine)
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(line, flush=True)


def runs_capped(base: Base, settings: Settings, cell: dict[str, Any], machine: Machine) -> bool:
    """Whether the steps run in a process that may hold so many GiB in all."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(((cell["gib"] << 30) - machine.context_bytes) / total)
    try:
        go_through(base, settings, lambda label: None, evaluate_tokens=cell["evaluate"])
        torch.cuda.synchronize()
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def named(name: str, settings: Settings) -> dict[str, Any]:
    """The cell's settings as plain values."""
    return {
        "model": name, "quantization": settings.quantization, "lanes": settings.lanes, "rows": settings.micro_batch,
        "tokens": settings.tokens, "checkpointed": settings.checkpointed, "rank": settings.rank,
        "dropout": settings.dropout, "recorded": settings.recorded > 0, "copies": settings.copies,
    }  # fmt: skip


def table(path: str) -> None:
    """The misses, cell by cell and in all."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    cells = [line for line in lines if line["kind"] == "cell" and line.get("allocated")]
    print(f"{'cell':52} {'allocated':>10} {'dry':>7} {'closed':>7}  {'reserved':>9} {'dry':>7}", end="  ")
    print(f"{'used':>8} {'dry':>7} {'closed':>7}")
    pairs = (("allocated", "dry"), ("allocated", "closed"), ("reserved", "dry"), ("used", "dry"), ("used", "closed"))
    misses: dict[str, list[float]] = {}
    for cell in cells:
        width = f"{cell['lanes']}x{cell['rows']}x{cell['tokens']} n{cell['checkpointed']} r{cell['rank']}"
        row = []
        for real, tier in pairs:
            said = f"{tier}_{real}"
            row.append(100 * (cell[said] / cell[real] - 1))
            misses.setdefault(said, []).append(row[-1])
        width += " graphs" * cell["recorded"] + " copies" * cell["copies"]
        name = f"{cell['model']} {cell['quantization']} {width}"
        print(f"{name:52} {cell['allocated'] / MIB:10.0f} {row[0]:6.2f}% {row[1]:6.2f}%", end="  ")
        print(f"{cell['reserved'] / MIB:9.0f} {row[2]:6.2f}%", end="  ")
        print(f"{cell['used'] / MIB:8.0f} {row[3]:6.2f}% {row[4]:6.2f}%")
    for said, found in misses.items():
        print(f"{said:18} median {statistics.median(found):6.2f}%, from {min(found):.2f}% to {max(found):.2f}%")
    for line in lines:
        if line["kind"] != "cell" or "error" in line or "skipped" in line:
            print({key: value for key, value in line.items() if not key.startswith(("dry", "closed"))})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="memory.jsonl")
    parser.add_argument("--models", nargs="+", default=["1b", "qwen2-1.5b", "8b"])
    parser.add_argument("--half", choices=("all", "seen", "blind"), default="all")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--seconds", type=float, default=480, help="no new cell is read after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: tests the script")
    parser.add_argument("--edges", action="store_true", help="plans that just fit under a cap")
    parser.add_argument("--table", help="print the table of this file")
    parser.add_argument("--again", type=Path, help="make the predictions of this file anew, beside its readings")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if options.table:
        table(options.table)
    elif options.again:
        again(options.again, options.models, options.processes)
    else:
        edges(options) if options.edges else run(options)


if __name__ == "__main__":
    main()
