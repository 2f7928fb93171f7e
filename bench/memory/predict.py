"""What closed form and rehearsal say of a cell, in processes that never see the GPU's readings."""

from __future__ import annotations

import json
import logging
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.memory.grid import MODELS, grid, named
from crosstune.memory.estimate import Settings, estimate
from crosstune.memory.gpus import Machine
from crosstune.memory.shape import ModelShape
from crosstune.train.rehearse import rehearse


def quietly() -> None:
    """One thread of a process that is one of many, and no warnings among the lines."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def predict(
    config: dict[str, Any], settings: Settings, machine: Machine, expandable: bool, evaluate: int, outside: int
) -> dict[str, Any]:
    """What closed form and rehearsal say; runs in a process of its own.

    `outside`: bytes outside the allocator before the cell. One process reads all cells, and what CUDA has loaded for
    other kernels stays.
    """
    quietly()
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
