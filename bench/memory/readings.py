"""What the GPU says: every cell of the grid run and read, with the predictions made beside it."""

from __future__ import annotations

import argparse
import gc
import json
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.memory.base import OneBase
from bench.memory.grid import MODELS, grid, named
from bench.memory.predict import predict
from crosstune.memory.estimate import Settings
from crosstune.memory.gpus import find_gpu
from crosstune.memory.shape import ModelShape
from crosstune.memory.widths import evaluation_tokens
from crosstune.model.base import Base
from crosstune.model.device import machine_of, make_workspaces, outside_allocator
from crosstune.train.drill import go_through


def read_grid(options: argparse.Namespace) -> None:
    """Predict and read every cell of the grid."""
    began = time.monotonic()
    cuda = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    machine = machine_of(device) if cuda else find_gpu("h200")
    if cuda:
        make_workspaces([device])  # with the context, which `outside` is to count
    with Path(options.out).open("w") as out, ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:

        def say(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")
            out.flush()

        say(
            kind="env", gpu=machine.name, torch=torch.__version__, expandable=machine.expandable,
            machine=asdict(machine), outside=outside_allocator(device) if cuda else 0,
            allocated=torch.cuda.memory_allocated() if cuda else 0,
        )  # fmt: skip
        waiting: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []
        bases = OneBase(device)
        for name, settings in grid(["tiny"] if options.tiny else options.models, options.half):
            if options.tokens and settings.tokens not in options.tokens:
                continue
            evaluate = evaluation_tokens(ModelShape.from_config(MODELS[name]), settings, find_gpu("h200"))
            outside = outside_allocator(device) if cuda else 0
            told = (MODELS[name], settings, machine, machine.expandable, evaluate, outside)
            foretold = pool.submit(predict, *told)
            line: dict[str, Any] = {"kind": "cell", **named(name, settings), "evaluate": evaluate, "outside": outside}
            if time.monotonic() - began > options.seconds:
                line["skipped"] = True
            else:
                line |= read_or_error(bases.of(name, settings), settings, evaluate)
            waiting.append((line, foretold))
            while waiting and waiting[0][1].done():
                line, foretold = waiting.pop(0)
                say(**line, **foretold.result())
        for line, foretold in waiting:
            say(**line, **foretold.result())
        say(kind="done", seconds=round(time.monotonic() - began, 1))


def read_or_error(base: Base, settings: Settings, evaluate: int) -> dict[str, Any]:
    """What the GPU says, if only that it has too little memory."""
    try:
        return read(base, settings, evaluate)
    except torch.OutOfMemoryError as error:
        return {"error": str(error)[:200]}


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
    make_workspaces([device])
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
