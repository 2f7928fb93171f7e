"""Answering with an adapter on its base against the merged model: prefill and decode, tokens a second, batch 1 and 16.

    python -m bench.inference [--model FOLDER_OR_GGUF | --shape llama3-8b] [--device cpu] [--rank 16] [--nf4]

Both are plain transformers (the adapter through PEFT), on one prompt length and with a key-value cache, in the same
process and in turns, the middle of several rounds. `--shape` takes random weights of that shape: times don't depend on
their values. vLLM and llama.cpp apply adapters in other ways and have other ratios.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

SHAPES = {"llama3-8b": Path(__file__).parent.parent / "tests/cases/llama3-8b"}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", help="folder, hub id or .gguf (default: the demo's model)")
    options.add_argument("--shape", choices=sorted(SHAPES))
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--dtype", default=None, choices=["bfloat16", "float32"])
    options.add_argument("--rank", type=int, default=16)
    options.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    options.add_argument("--prompt", type=int, default=256, help="tokens of the prompt")
    options.add_argument("--new", type=int, default=32, help="tokens decoded")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--cpu-time", action="store_true", help="processor time, for a CPU that others use too")
    options.add_argument("--nf4", action="store_true", help="also the adapter on the base in NF4")
    options.add_argument("--json", help="write the figures here")
    given = options.parse_args()
    device = torch.device(given.device)
    dtype = getattr(torch, given.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    models = build(given, device, dtype)
    figures = [
        {"batch": batch, **measure(models, batch, given, device), "rank": given.rank, "prompt": given.prompt}
        for batch in given.batch
    ]
    show(figures, given, device, dtype)
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1))


def build(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Name → model: with the adapter in place, merged, and (if asked) with the adapter on NF4."""
    base = plain(given, device, dtype)
    adapted = with_adapter(copy.deepcopy(base), given.rank)
    merged = with_adapter(base, given.rank).merge_and_unload()
    models = {"adapter": adapted, "merged": merged}
    if given.nf4:
        folder = Path("/tmp/crosstune-inference-nf4")
        merged.save_pretrained(folder)
        bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        quantized = AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, device_map={"": device})
        models["adapter on NF4"] = with_adapter(quantized, given.rank)
    return {name: model.eval() for name, model in models.items()}


def plain(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    if given.shape:
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SHAPES[given.shape]), dtype=dtype)
    from crosstune.demo_model import find_model
    from crosstune.model.base import DTYPES, load_base
    from crosstune.progress import Lines
    from crosstune.recipe.sections import Model

    name = given.model or find_model(Lines())
    precision = next(word for word, known in DTYPES.items() if known == dtype)
    return load_base(Model(name=name), None, device=device, precision=precision).model


def with_adapter(model: Any, rank: int) -> Any:
    torch.manual_seed(1)
    adapted = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LAYERS, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.01)
    return adapted


def measure(models: dict[str, Any], batch: int, given: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Median seconds of prefill, and of one decoded token, for each model; rounds in turns."""
    ids = torch.randint(0, 1000, (batch, given.prompt), device=device)
    times: dict[str, list[float]] = {}
    for round_number in range(given.rounds + 1):
        for name, model in models.items():
            prefill, decode = once(model, ids, given.new, time.process_time if given.cpu_time else time.perf_counter)
            if round_number:  # the first round warms up
                times.setdefault(f"{name}: prefill s", []).append(prefill)
                times.setdefault(f"{name}: s a token", []).append(decode)
    return {name: statistics.median(values) for name, values in times.items()}


@torch.inference_mode()
def once(model: Any, ids: torch.Tensor, num_new: int, clock: Callable[[], float]) -> tuple[float, float]:
    out: list[Any] = []

    def prefill() -> None:
        out.append(model(input_ids=ids, use_cache=True, logits_to_keep=1))

    def decode() -> None:
        for _ in range(num_new):
            token = out[-1].logits[:, -1:].argmax(-1)
            out[-1] = model(input_ids=token, past_key_values=out[-1].past_key_values, use_cache=True)

    return timed(prefill, clock), timed(decode, clock) / num_new


def timed(work: Callable[[], None], clock: Callable[[], float]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def show(figures: list[dict[str, Any]], given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{given.shape or given.model or 'the demo model'}, {dtype}, rank {given.rank} on all linear layers, {where}")
    clock = ", processor time" if given.cpu_time else ""
    print(f"prompt {given.prompt} tokens, {given.new} decoded, median of {given.rounds} rounds in turns{clock}\n")
    names = [name.removesuffix(": prefill s") for name in figures[0] if name.endswith(": prefill s")]
    print("| batch | model | prefill, ms | decode, ms a token | prefill / merged | decode / merged |")
    print("|--:|---|--:|--:|--:|--:|")
    for row in figures:
        for name in names:
            prefill, decode = row[f"{name}: prefill s"], row[f"{name}: s a token"]
            ratios = prefill / row["merged: prefill s"], decode / row["merged: s a token"]
            cells = (row["batch"], name, f"{1e3 * prefill:.1f}", f"{1e3 * decode:.2f}", *(f"{r:.2f}" for r in ratios))
            print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
