"""The base to merge into, whatever it is given as: plain weights, and what base + adapter is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from crosstune.errors import ModelError
from crosstune.export.quantize import write_plain
from crosstune.export.weights import BaseWeights, find_weights


@dataclass(frozen=True)
class Origin:
    """Plain weights, and where they came from."""

    weights: BaseWeights  # 16 or 32 bit
    reference: Path  # folder of the model that the adapter was made for
    named_folder: Path  # where the files lie whose checksums an adapter may have recorded
    notes: tuple[str, ...] = ()


def find_origin(name: str, scratch: Path, *, into_quantized: bool, dtype: torch.dtype | None) -> Origin:
    """The base by hub id, folder or .gguf file. Quantised weights are first written to `scratch` in 16 bit."""
    if not name:
        raise ModelError("the adapter names no base model", "Name it with base=….")
    if name.endswith(".gguf"):
        file = Path(name).expanduser()
        if not file.is_file():
            raise ModelError(f"there is no file {name!r}", "Name the base with base=….")
        write_plain(file, scratch, dtype or torch.bfloat16)
        note = f"{file.name} was dequantised; its training saw the same weights"
        return Origin(find_weights(str(scratch)), scratch, file.parent, (note,))
    weights = find_weights(name)
    if not weights.quantization:
        return Origin(weights, weights.folder, weights.folder)
    if not into_quantized:
        raise ModelError(
            f"the base {name!r} is stored in {weights.quantization}: merging into rounded weights loses quality",
            "Name its 16-bit version with base=…, or ask for it: into_quantized=True (--into-quantized).",
        )
    write_plain(weights.folder, scratch, dtype or torch.bfloat16)
    note = (
        f"warning: merged into weights that were rounded to {weights.quantization}; "
        "what the 16-bit base would have answered is not known here"
    )
    return Origin(find_weights(str(scratch)), weights.folder, weights.folder, (note,))
