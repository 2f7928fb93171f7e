"""Quantised copies of a plain model folder, and plain copies of a quantised one (on a CPU too)."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from crosstune.errors import MissingExtra
from crosstune.export.merger import MOST_SHARD_BYTES
from crosstune.export.verify import quiet_loading
from crosstune.model.base import DTYPES, load_base
from crosstune.recipe.sections import Model
from crosstune.store.files import guard

Quantization = Literal["none", "nf4", "int8"]


def quantized_model(folder: Path, kind: Quantization, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The plain model in `folder` with its linear layers (not the head) in NF4 with double quantisation, or int8."""
    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}, "quantization_config": _config(kind, dtype)}
    with quiet_loading():
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def write_quantized(folder: Path, out: Path, kind: Quantization, *, device: torch.device, dtype: torch.dtype) -> None:
    """Write the model of `folder` to `out`, quantised, as transformers and vLLM open it."""
    with quiet_loading():
        quantized_model(folder, kind, device=device, dtype=dtype).save_pretrained(out)


def write_plain(source: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the quantised folder or .gguf file `source` to `out` in 16 or 32 bit; the whole model is in memory."""
    is_gguf = source.suffix == ".gguf"
    with quiet_loading(), redirect_stderr(io.StringIO()):  # transformers' GGUF reader has a bar that nothing turns off
        if is_gguf:
            cpu, precision = torch.device("cpu"), _precision(dtype)
            model = load_base(Model(name=str(source)), None, device=cpu, precision=precision).model
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        else:
            need_bitsandbytes()
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map={"": "cpu"}).dequantize()
        # Not model.save_pretrained: it refuses a model that came from GGUF as "quantized" (transformers 5.24).
        state = torch.nn.Module.to(model, dtype).state_dict()
        if model.config.tie_word_embeddings:
            head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
            state.pop(f"{head}.weight", None)
        model.config.dtype = dtype
        if "quantization_config" in model.config.to_dict():
            del model.config.quantization_config
        with guard("writing", out):
            out.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(state, out, max_shard_size=MOST_SHARD_BYTES)
            for part in (model.config, model.generation_config, tokenizer if is_gguf else None):
                if part is not None:
                    part.save_pretrained(out)


def _precision(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def need_bitsandbytes() -> None:
    """Raise MissingExtra if bitsandbytes isn't there."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise MissingExtra("bitsandbytes", "quant") from None


def _config(kind: Quantization, dtype: torch.dtype) -> BitsAndBytesConfig:
    need_bitsandbytes()
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
