"""One contestant in its own process: the base built once, then every job."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.folds.job import BATCH, Job, prepare
from bench.folds.machine import build_base, cap_memory, card, device, emit, mark_quantized, versions, write_base


def jobs(options: argparse.Namespace) -> list[Job]:
    """What the command line asks for."""
    lengths = [0] if options.mixed else options.tokens
    return [Job(tokens, options.rows, options.folds, options.learning_rate) for tokens in lengths]


def run_child(options: argparse.Namespace) -> None:
    """Run the contestant `options.child`."""
    options.vocab = options.vocab or (384 if options.shape == "tiny" else 128256)
    cap_memory(options.cap)
    if options.child == "floor":
        run_floor(options)
    elif options.child == "crosstune":
        run_crosstune(options)
    else:
        run_loop(options)


def run_crosstune(options: argparse.Namespace) -> None:
    """Its calls, with the base in memory or by the name of a folder."""
    from bench.folds.ours import run_ours

    base = options.shape, options.quantization, options.vocab
    with tempfile.TemporaryDirectory() as folder:
        if options.by_name:
            write_base(Path(folder), *base)
            model: Any = {"name": folder, "quantization": options.quantization}
        else:
            model = build_base(*base)
        for job in jobs(options):
            for lanes in options.lanes:
                run_ours(model, job, lanes, options)


def run_floor(options: argparse.Namespace) -> None:
    """Counted operations over the rate of a large product."""
    from bench.step import matrix_rate

    rate = matrix_rate(device())
    for job in jobs(options):
        flops = job.flops(options.shape, options.vocab)
        emit(
            "floor", contestant="floor", tokens=job.name, flops=flops, tflops_a_second=rate / 1e12,
            seconds=flops / rate, card=card(), versions=versions(),
        )  # fmt: skip


def run_loop(options: argparse.Namespace) -> None:
    """A loop over folds; a job that runs out of memory is said so, and the next one tried."""
    name, kind = options.child, options.child.partition("-")[0]
    from bench.folds.peer import STYLES, run_peer

    style = STYLES[name]
    if options.mixed:  # ten rows of unlike lengths would be padding for the most part
        style = replace(style, evaluation_batch=min(style.evaluation_batch, BATCH))
    with tempfile.TemporaryDirectory() as folder:
        if kind == "unsloth":
            from bench.folds.unsloth_loop import UnslothPeer, load_unsloth

            longest = max(max(job.lengths()) for job in jobs(options))
            model = load_unsloth(
                Path(folder), options.shape, options.quantization, options.vocab, longest=longest,
                checkpointing=style.checkpointing,
            )  # fmt: skip
            peer = UnslothPeer(model, style)
        else:
            model = mark_quantized(build_base(options.shape, options.quantization, options.vocab), options.quantization)
            if kind == "trl":
                from bench.folds.trl_loop import TrlPeer

                peer = TrlPeer(model, style)
            else:
                from bench.folds.peft_loop import PeftPeer

                peer = PeftPeer(model, style)
        base = model.get_base_model() if kind == "unsloth" else model
        for job in jobs(options):
            try:
                run_peer(peer, name, prepare(job, base), options.peer_folds)
            except torch.OutOfMemoryError as error:
                emit("failed", contestant=name, tokens=job.name, said=str(error)[:300])
                return
