"""The base's own weights as safetensors files, read one tensor at a time. Knows nothing of adapters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from crosstune.errors import ModelError, first_line
from crosstune.export.folder import read_json, sha256
from crosstune.store.files import guard

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WANTED = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STORED = FLOATS | {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
                   "BOOL": torch.bool}  # fmt: skip


@dataclass(frozen=True)
class BaseWeights:
    """Where each tensor lies, its shape and dtype. Nothing is read until `read`."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    files: Mapping[str, str]  # tensor name → file name
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]  # tensor name → safetensors' word: BF16, F32, U8 …
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def quantization(self) -> str:
        """How the stored weights are quantised: "" (not), nf4, fp4, int8, or the method's name."""
        return quantization_of(self.config)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as it is stored."""
        try:
            with safe_open(self.folder / self.files[name], "pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _broken(self.folder / self.files[name], error) from None

    def largest_file_bytes(self) -> int:
        return max((self.folder / name).stat().st_size for name in set(self.files.values()))


def find_weights(name: str, *, revision: str | None = None) -> BaseWeights:
    """The safetensors of a folder, or of a hub model (downloaded if they aren't in its cache)."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _snapshot(name, revision)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(f"there is no config.json in {name!r}", "Give the base model's hub id or folder.")
    config = read_json(config_file)
    files = _index(folder, name)
    shapes, dtypes = _headers(folder, files)
    return BaseWeights(folder, config, files, shapes, dtypes)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors; a disk that can't take them is a `RunError`."""
    with guard("writing", file):
        file.touch()
        mode = file.stat().st_mode
        save_file(dict(tensors), file, metadata={"format": "pt"})
        file.chmod(mode)  # as any new file: safetensors puts one in its place that nobody else can read


def quantization_of(config: Mapping[str, Any]) -> str:
    """The quantisation that a config.json declares, in one word; "" for 16- and 32-bit weights."""
    declared = config.get("quantization_config")
    if not declared:
        return ""
    if declared.get("load_in_4bit") or declared.get("_load_in_4bit"):
        return str(declared.get("bnb_4bit_quant_type", "nf4"))
    if declared.get("load_in_8bit") or declared.get("_load_in_8bit"):
        return "int8"
    return str(declared.get("quant_method", "unknown"))


def weights_checksums(name: str, *, revision: str | None = None) -> dict[str, str]:
    """SHA-256 of each weight file of a base: a folder, hub model or .gguf. 16 GB take some 10 s."""
    if name.endswith(".gguf"):
        file = Path(name).expanduser()
        return {file.name: sha256(file)}
    weights = find_weights(name, revision=revision)
    return {file: sha256(weights.folder / file) for file in sorted(set(weights.files.values()))}


def refuse_other_weights(weights_folder: Path, recorded: Mapping[str, str]) -> None:
    """Refuse weight files that differ from those the adapter was trained on."""
    for name, digest in recorded.items():
        file = weights_folder / name
        if file.is_file() and sha256(file) != digest:
            raise ModelError(
                f"{name} of the base is not the file that the adapter was trained on: SHA-256 {sha256(file)[:16]}…, "
                f"recorded {digest[:16]}…",
                "Fetch the base again (the file is damaged, or another version), or name the right one with base=….",
            )


def refuse_unmergeable(weights: BaseWeights, names: Iterable[str]) -> None:
    """Refuse weights that nothing can be added to: quantised, or fp8."""
    odd = sorted({weights.dtypes[name] for name in names if weights.dtypes[name] not in FLOATS})
    unknown = sorted({word for word in weights.dtypes.values() if word not in STORED})
    if odd or unknown:
        raise ModelError(
            f"the base holds weights of type {', '.join(odd or unknown)}, which an adapter can't be added to",
            "Name the 16- or 32-bit version of the base with base=….",
        )


def _snapshot(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"the base model {name!r} is neither a folder nor to be had from the hub: {first_line(error)}",
            "Give its folder with base=…, or go online (gated models: hf auth login).",
        ) from None


def _index(folder: Path, name: str) -> dict[str, str]:
    """Tensor name → file name."""
    if (folder / INDEX).is_file():
        files: dict[str, str] = read_json(folder / INDEX).get("weight_map") or {}
        if not files:
            raise ModelError(f"{INDEX} of {name!r} names no tensor", "Download the base again.")
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        if missing:
            raise ModelError(f"{', '.join(missing)} of {name!r} is missing", "Download the base again.")
        return files
    if (folder / SINGLE).is_file():
        try:
            with safe_open(folder / SINGLE, "pt") as file:
                return dict.fromkeys(file.keys(), SINGLE)
        except (SafetensorError, OSError) as error:
            raise _broken(folder / SINGLE, error) from None
    pickled = any(folder.glob("pytorch_model*.bin"))
    raise ModelError(
        f"{name!r} holds no safetensors" + (", only pickled weights, which may run code" if pickled else ""),
        "Save the model as safetensors first: model.save_pretrained(folder) in transformers.",
    )


def _headers(folder: Path, files: Mapping[str, str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    by_file: dict[str, list[str]] = {}
    for tensor, file in files.items():
        by_file.setdefault(file, []).append(tensor)
    for name, tensors in by_file.items():
        try:
            with safe_open(folder / name, "pt") as file:
                for tensor in tensors:
                    header = file.get_slice(tensor)
                    shapes[tensor], dtypes[tensor] = tuple(header.get_shape()), header.get_dtype()
        except (SafetensorError, OSError) as error:
            raise _broken(folder / name, error) from None
    return shapes, dtypes


def _broken(file: Path, error: BaseException) -> ModelError:
    return ModelError(f"{file.name} is damaged: {first_line(error)}", "Fetch or write that file again.")
