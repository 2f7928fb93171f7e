"""Plans that just fit under a cap on the process, and the next larger ones, which must not."""

from __future__ import annotations

import argparse
import gc
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.memory.base import OneBase
from bench.memory.grid import MODELS, named
from bench.memory.predict import quietly
from crosstune.memory.estimate import Settings
from crosstune.memory.gpus import Machine
from crosstune.memory.plan import plan_memory
from crosstune.memory.shape import ModelShape
from crosstune.model.base import Base
from crosstune.model.device import machine_of
from crosstune.recipe.recipe import Recipe
from crosstune.train.drill import go_through
from crosstune.train.rehearse import rehearse, settle

EDGES = (  # model, quantisation, GiB of the capped process, tokens of a row
    ("1b", "none", 8, 1024), ("1b", "nf4", 6, 2048), ("1b", "int8", 10, 512), ("qwen2-1.5b", "none", 12, 1024),
    ("qwen2-1.5b", "nf4", 10, 2048), ("8b", "nf4", 12, 512), ("8b", "nf4", 16, 1024), ("8b", "nf4", 24, 2048),
    ("8b", "int8", 16, 512), ("8b", "none", 24, 1024), ("8b", "none", 32, 2048),
)  # fmt: skip


def find_edge(name: str, quantization: str, gib: int, tokens: int, machine: Machine) -> dict[str, Any]:
    """The plan for five lanes in `gib`, then by rehearsal the fewest checkpointed layers with which it fits."""
    quietly()
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


def run_edges(options: argparse.Namespace) -> None:
    """Run each plan at the edge under its cap, and the one with a layer less checkpointed."""
    device = torch.device("cuda", 0)
    machine = machine_of(device)
    bases = OneBase(device, clear)
    with Path(options.out).open("w") as out, ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        out.write(json.dumps({"kind": "env", "gpu": machine.name, "torch": torch.__version__}) + "\n")
        for edge in [pool.submit(find_edge, *edge, machine) for edge in EDGES]:
            cell = edge.result()
            settings = Settings(
                cell["lanes"], cell["rows"], cell["tokens"], cell["checkpointed"], cell["quantization"], rank=16,
                targets=ModelShape.from_config(MODELS[cell["model"]]).linears,
            )  # fmt: skip
            base = bases.of(cell["model"], settings)
            line = {"kind": "edge", **cell, "runs": runs_capped(base, settings, cell, machine)}
            if settings.checkpointed > 0:
                larger = replace(settings, checkpointed=settings.checkpointed - 1)
                line["larger_runs"] = runs_capped(base, larger, cell, machine)
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(line, flush=True)


def clear() -> None:
    """Nothing of the last base is left, and the cap is off."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


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
