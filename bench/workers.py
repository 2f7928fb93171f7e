"""The same run with one and with several Ray workers, each on a GPU of its own: time, and whether the bytes agree.

python -m bench.workers --shape 1b --workers 1 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import crosstune
from bench.shapes import random_model, text_rows, tokenizer
from crosstune.progress import Lines
from crosstune.store.run import Run


def main() -> None:
    """Print one JSON line a number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        build(options.shape, Path(place) / "model")
        (Path(place) / "rows.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in text_rows(options.rows, options.tokens))
        )
        first = 0.0
        for workers in options.workers:
            found = measure(Path(place), workers, options)
            first = first or found["training_seconds"]
            print(json.dumps({**found, "ratio": round(found["training_seconds"] / first, 3)}), flush=True)


def build(shape: str, folder: Path) -> None:
    """A random model of this shape, and a tokenizer, as a folder. In a process of its own: it starts CUDA."""
    import multiprocessing

    work = multiprocessing.get_context("spawn").Process(target=_build, args=(shape, folder))
    work.start()
    work.join()
    assert work.exitcode == 0


def _build(shape: str, folder: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocab = 384 if shape == "tiny" else 128256
    random_model(shape, "none", device, vocab=vocab).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def measure(place: Path, workers: int, options: Any) -> dict[str, Any]:
    """Two lanes a wave. Training: from the first order to the last wave's end, bases being loaded included."""
    output = place / f"run-{workers}"
    began = time.monotonic()
    result = crosstune.cross_validate(
        model=str(place / "model"),
        data=str(place / "rows.jsonl"),
        folds={"k": 2, "seed": 0},
        lora={"rank": 16, "alpha": 32},
        train={"epochs": options.epochs, "batch_size": 4, "learning_rate": 1e-4},
        sweep={"train.seed": list(range(options.waves))},
        device={"lanes": 2, "micro_batch": 4, "ray": "auto", "workers": workers},
        output=str(output),
        progress=Lines(),
    )
    events = Run.read(output).events("workers", "wave_finished")
    adapters = hashlib.sha256()
    for folder in sorted(result.adapters.values()):
        adapters.update((folder / "adapter_model.safetensors").read_bytes())
    return {
        "workers": workers,
        "gpus": [worker["cuda_visible_devices"] for worker in events[0]["workers"]],
        "waves": options.waves,
        "training_seconds": round(events[-1]["at"] - events[0]["at"], 1),
        "whole_seconds": round(time.monotonic() - began, 1),
        "adapters_sha256": adapters.hexdigest()[:16],
        "driver_started_cuda": torch.cuda.is_initialized(),
    }


if __name__ == "__main__":
    main()
