"""The machine under a contestant: its base, its clock, its memory, its versions; a line as soon as there is one."""

from __future__ import annotations

import gc
import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.shapes import random_model, tokenizer

PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "liger_kernel", "unsloth",
    "unsloth_zoo",
)  # fmt: skip


def emit(kind: str, **facts: Any) -> None:
    """One JSON line on stdout, floats rounded."""
    print(json.dumps({"kind": kind, **{name: _short(value) for name, value in facts.items()}}), flush=True)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_short(item) for item in value]
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    return value


def versions() -> dict[str, str]:
    """Of what takes part, where it is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def card() -> str:
    """The device by name."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def start_peak() -> None:
    """Forget earlier peaks, and what the allocator holds of earlier work."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, float | None]:
    """Most bytes allocated and reserved since `start_peak`, in GiB."""
    if not torch.cuda.is_available():
        return {"peak_gib": None, "reserved_gib": None}
    return {
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def cap_memory(gib: float) -> None:
    """Let this process's allocator have so much; 0: all. Raises RuntimeError if the card has more free than that."""
    if gib and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if free > (gib + 1) * 2**30:  # a process that has ended since the rest was held
            raise RuntimeError(f"{free / 2**30:.1f} GiB are free, which is no cap of {gib} GiB: run it again")
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))


def build_base(shape: str, quantization: str, vocab: int) -> Any:
    """The frozen base with random weights; the same for every contestant."""
    began = now()
    model = random_model(shape, quantization, device(), vocab=vocab)
    print(f"base {shape} {quantization}: {now() - began:.1f} s", file=sys.stderr, flush=True)
    return model


def mark_quantized(model: Any, quantization: str) -> Any:
    """What from_pretrained(quantization_config=…) leaves on a model, and TRL and PEFT look for."""
    model.config.use_cache = False
    if quantization != "nf4":
        return model
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    )  # fmt: skip
    model.hf_quantizer = AutoHfQuantizer.from_config(config)
    model.config.quantization_config = config
    model.quantization_method = config.quant_method
    model.is_loaded_in_4bit = model.is_quantized = True
    return model


def write_base(folder: Path, shape: str, quantization: str, vocab: int) -> None:
    """The same base as people have it on disk, NF4 as bitsandbytes quantised it; nothing of it stays in memory."""
    model = mark_quantized(build_base(shape, quantization, vocab), quantization)
    began = now()
    model.config.use_cache = True
    model.save_pretrained(folder, max_shard_size="5GB")
    tokenizer().save_pretrained(folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"written: {size / 2**30:.2f} GiB, {now() - began:.1f} s", file=sys.stderr, flush=True)
    del model
    start_peak()


def hold_all_but(gib: float) -> None:
    """Hold the card's memory but for `gib` GiB until stdin ends: what is free is then what a small card has free."""
    if not torch.cuda.is_available():
        print("no GPU: nothing held", flush=True)
        return
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device="cuda")
    print(f"held {held.numel() / 2**30:.1f} GiB", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    hold_all_but(float(sys.argv[1]))
