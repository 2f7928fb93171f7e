"""Where the time of a training pass goes: milliseconds by pass, then the kernels that take most of it.

python -m bench.profile_step --shape 8b --cases 5x1x2048 5x4x128     (lanes x rows a lane x tokens)
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from bench.shapes import random_model
from crosstune.data.batches import collate
from crosstune.data.tokens import Tokens
from crosstune.model.attach import attached, resolve_targets
from crosstune.model.base import adopt
from crosstune.recipe import Evaluate, Lora, Train
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.step import train_step


def main() -> None:
    """Time and profile each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--quantization", default="nf4")
    parser.add_argument("--cases", nargs="+", default=["5x1x2048", "5x4x128"])
    parser.add_argument("--checkpointed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--top", type=int, default=22)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    base = adopt(random_model(options.shape, options.quantization, device), None)
    for case in options.cases:
        lanes, rows, length = map(int, case.split("x"))
        run_case(base, lanes, rows, length, options)


def run_case(base: object, lanes: int, rows: int, length: int, options: argparse.Namespace) -> None:
    """Median step time, tokens a second, share of 4 FLOP a token and base parameter at 800 TFLOP/s; kernel table."""
    tokens = _tokens(lanes * rows, length)
    job = LaneJob(0, 0, Lora(), Train(batch_size=rows), Evaluate(), (), (), resolve_targets(base, "all-linear"))
    with attached(base, [job.spec] * lanes, checkpointed_layers=options.checkpointed) as slots:
        optimizer = LaneAdamW(slots, [job.train] * lanes)
        states = [Lane(job, [], (), 10**6) for _ in range(lanes)]
        units = [[(k * rows + row,) for row in range(rows)] for k in range(lanes)]
        batches = [collate(tokens, units, weights_K=[1 / (rows * (length - 1))] * lanes)]

        def once() -> float:
            began = time.perf_counter()
            train_step(slots, optimizer, states, batches)
            return time.perf_counter() - began

        times = [once() for _ in range(options.steps + 2)][2:]
        median = statistics.median(times)
        count = lanes * rows * length
        linear = sum(site.in_features * site.out_features for site in slots.sites)
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        print(
            f"== {lanes} lanes x {rows} rows x {length}: {median * 1e3:.1f} ms, {count / median:.0f} tok/s, "
            f"share {count * linear * 4 / median / 8e14:.3f}, peak {peak:.1f} GiB",
            flush=True,
        )
        if options.top and torch.cuda.is_available():
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                once()
            print(
                profile.key_averages().table(sort_by="cuda_time_total", row_limit=options.top, max_name_column_width=70)
            )


def _tokens(count: int, length: int) -> Tokens:
    ids = np.random.default_rng(0).integers(0, 1000, count * length).astype(np.int32)
    learn = np.ones(count * length, bool)
    learn[::length] = False
    starts = np.arange(0, count * length + 1, length)
    return Tokens(ids, learn, starts, np.arange(1, count + 1), 0, (0,), length, "", ())


if __name__ == "__main__":
    main()
