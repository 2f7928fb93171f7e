"""One training step over lanes x rows x tokens: milliseconds, share of the card's matrix rate, and where the time goes.

    python -m bench.step --cases 5x1x2048 5x4x128 1x1x128 --modes fused fused+graph transformers --profile 20
    python -m bench.step --cases 5x2x2048 5x4x512 5x4x128 --modes fused+copies+graph fused+copies+graph+torch

A case is lanes x rows of a lane x tokens of a row; with `:8` behind it, 8 blocks are checkpointed. Modes:
`transformers` (its own blocks), `fused` (crosstune's); behind them `+graph` (forward and backward replayed as a CUDA
graph), `+copies` (of the 4-bit weights in 16 bit, kept), `+torch` (PyTorch's own backward pass of attention, whose
gradients differ from one time to the next). The share counts 4 FLOP a token and base parameter that takes part in a
product, head included, over the rate of a large product in this process.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.shapes import random_model
from crosstune.data.batches import Batch, collate
from crosstune.data.tokens import Tokens
from crosstune.model import block
from crosstune.model.attach import Slots, attached
from crosstune.model.attention import attention_name
from crosstune.model.base import Base, adopt
from crosstune.model.targets import resolve_targets
from crosstune.recipe.sections import Evaluate, Lora, Train
from crosstune.train.lane import Lane, LaneJob
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.step import DeviceBatch, run_pass, train_step

GROUPS = {
    "attention": r"sdpa|flash|fmha|attention",
    "4 bits to 16": r"_nf4|[Dd]equantize",
    "products": r"nvjet|gemm|cutlass|splitK",
    "fused kernels": r"^_(rms_norm|rotate|swiglu|dropout|judge)",
    "optimizer": r"adam|multi_tensor",
    "copies": r"Memcpy|Memset|copy",
}


def matrix_rate(device: torch.device) -> float:
    """FLOP/s of an 8192 x 8192 x 8192 bf16 product (tiny on a CPU), median of 10 after 10 to warm up."""
    size = 8192 if device.type == "cuda" else 256
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [seconds(lambda: one @ other, device) for _ in range(20)][10:]
    return 2 * size**3 / statistics.median(times)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `work` until the device has done it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def run_case(base: Base, case: str, mode: str, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Median step time of one case and what follows from it."""
    blocks, *ways = mode.split("+")
    block.FUSED_ON[base.device.type] = blocks == "fused"
    decoder: Any = base.decoder
    decoder.set_attn_implementation("sdpa" if "torch" in ways else attention_name(base.device, base.dtype))
    sizes, _, checkpointed = case.partition(":")
    lanes, rows, length = map(int, sizes.split("x"))
    lora = Lora(rank=options.rank, dropout=options.dropout)
    train = Train(batch_size=rows, learning_rate=1e-4, warmup=0)
    jobs = [
        LaneJob(0, k, lora, train, Evaluate(), (0,), (), resolve_targets(base, options.targets)) for k in range(lanes)
    ]
    tokens = _tokens(lanes * rows, length, base.vocab_size)
    with attached(base, [job.spec for job in jobs], checkpointed_layers=int(checkpointed or 0)) as slots:
        slots.keep_weights("copies" in ways)
        states = [Lane(job, [], (), 10**6) for job in jobs]
        units = [[(k * rows + row,) for row in range(rows)] for k in range(lanes)]
        keys = [(job.seed, 0) for job in jobs] if options.dropout else None
        batch = collate(tokens, units, weights_K=[1 / (rows * (length - 1))] * lanes, dropout_K=keys)
        if base.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step, losses = _step(slots, LaneAdamW(slots, [train] * lanes), states, batch, graph="graph" in ways)
        times = [seconds(step, base.device) for _ in range(options.steps + 3)][3:]
        count, linear = lanes * rows * length, sum(site.in_features * site.out_features for site in slots.sites)
        median = statistics.median(times)
        with_head = linear + base.vocab_size * base.model.config.get_text_config().hidden_size
        line = {
            "case": case, "mode": mode, "ms": round(median * 1e3, 1), "least_ms": round(min(times) * 1e3, 1),
            "tokens_per_s": round(count / median), "share": round(4 * count * with_head / median / rate, 3),
            "share_of_blocks": round(4 * count * linear / median / rate, 3),
            "losses": [round(x, 4) for x in losses[:4]],
        }  # fmt: skip
        if base.device.type == "cuda":
            line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
            if options.profile:
                line["gpu_ms"], table = _profile(step, options.profile)
                print(table)
    return line


def _step(
    slots: Slots, optimizer: LaneAdamW, states: list[Lane], batch: Batch, *, graph: bool
) -> tuple[Callable[[], None], list[float]]:
    losses: list[float] = []
    if not graph:

        def step() -> None:
            losses.append(float(train_step(slots, optimizer, states, [batch]).loss[0]))

        return step, losses
    given, active = (
        DeviceBatch.of(batch, slots.base.device),
        torch.ones(slots.num_lanes, dtype=torch.bool, device="cuda"),
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run_pass(slots, given)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        slots.grad_KP.zero_()
        loss_K = run_pass(slots, given)

    def replay(_kept: DeviceBatch = given) -> None:  # the graph reads its tensors, and doesn't hold them
        captured.replay()
        optimizer.step(loss_K, [state.learning_rate() for state in states], active)
        slots.refresh()
        losses.append(loss_K[0].item())

    return replay, losses


def _profile(step: Callable[[], None], top: int) -> tuple[dict[str, float], str]:
    """Milliseconds of the GPU by group, and the kernels that take most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    for kernel in kernels:
        group = next((name for name, wanted in GROUPS.items() if re.search(wanted, kernel.key)), "other")
        found[group] = found.get(group, 0.0) + kernel.self_device_time_total / 1e3
    lines = [f"{k.self_device_time_total / 1e3:9.2f} ms {k.count:6d}  {k.key[:150]}" for k in kernels[:top]]
    total = sum(found.values())
    return {name: round(ms, 1) for name, ms in {**found, "all": total}.items()}, "\n".join(lines)


def _tokens(count: int, length: int, vocab: int) -> Tokens:
    ids = np.random.default_rng(0).integers(0, min(vocab, 1000), count * length).astype(np.int32)
    learn = np.ones(count * length, bool)
    learn[::length] = False
    starts = np.arange(0, count * length + 1, length)
    return Tokens(ids, learn, starts, np.arange(1, count + 1), 0, (0,), length, "", ())


def main() -> None:
    """Command line: one JSON line a case and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--quantization", default="nf4")
    parser.add_argument("--cases", nargs="+", default=["5x1x2048", "5x4x128"])
    parser.add_argument("--modes", nargs="+", default=["fused"])
    parser.add_argument("--targets", default="all-linear")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--profile", type=int, default=0, help="kernels to list, by time")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = matrix_rate(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(json.dumps({"device": name, "torch": torch.__version__, "TFLOP/s": round(rate / 1e12, 1)}), flush=True)
    base = adopt(random_model(options.shape, options.quantization, device, vocab=options.vocab), None)
    for case in options.cases:
        for mode in options.modes:
            print(json.dumps(run_case(base, case, mode, options, rate)), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
