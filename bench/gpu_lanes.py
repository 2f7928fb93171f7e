"""Five folds of a Llama-3 shape with random weights through the public API, on a GPU: time, peak bytes, losses.

python -m bench.gpu_lanes --shape 8b --tokens 128 512 --rows 50
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch

import crosstune
from bench.shapes import random_model, text_rows, tokenizer
from crosstune.progress import Quiet
from crosstune.store.run import Run


def main() -> None:
    """Print one JSON line a length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--quantization", default="nf4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--micro-batch", default="auto")
    parser.add_argument("--checkpointing", default="auto")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--vocab", type=int, default=128256)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    model = random_model(options.shape, options.quantization, device, vocab=options.vocab)
    print(json.dumps({"built": options.shape, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    for tokens in options.tokens:
        print(json.dumps(measure(model, tokens, options)), flush=True)


def measure(model: object, tokens: int, options: argparse.Namespace) -> dict[str, object]:
    """One cross-validation of `options.folds` folds; what its journal says."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = crosstune.cross_validate(
            model=model,
            tokenizer=tokenizer(),
            data=text_rows(options.rows, tokens),
            folds={"kind": "kfold", "k": options.folds, "duplicates": "ignore"},
            lora={"rank": 16, "alpha": 32, "dropout": options.dropout},
            train={"epochs": 1, "batch_size": 4, "learning_rate": 1e-4},
            device={"micro_batch": options.micro_batch, "checkpointing": options.checkpointing},
            output=f"{folder}/run",
            progress=Quiet(),
        )
        whole = time.monotonic() - began
        run = Run.read(result.run)
        wave, plan = run.events("wave_finished")[0], run.events("plan")[0]
    return {
        "shape": options.shape, "tokens": tokens, "lanes": plan["device.lanes"],
        "micro_batch": plan["device.micro_batch"],
        "checkpointing": plan["device.checkpointing"], "whole_s": round(whole, 2), "wave_s": round(wave["seconds"], 2),
        "tok_s": round(wave["tokens"] / wave["seconds"]), "steps": wave["steps"],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "plan_gib": round(plan["peak_bytes"] / 2**30, 2),
        "live_before": wave["live_bytes_before"], "live_after": wave["live_bytes_after"],
        "losses": [round(fold["loss"], 4) for fold in result.trials[0]["folds"]], "failed": len(result.failed),
    }  # fmt: skip


if __name__ == "__main__":
    main()
