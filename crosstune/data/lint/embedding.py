"""Single rows of a model's embedding, read from its files (safetensors, GGUF) without loading the model.

Knows nothing of rows of data. A model that isn't on this machine is not downloaded for this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.gguf_once import parsed_once
from crosstune.errors import ModelError

INPUT_NAMES = ("model.embed_tokens.weight", "transformer.wte.weight", "gpt_neox.embed_in.weight", "token_embd.weight")
OUTPUT_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")
# Types of the safetensors format. numpy has no bfloat16: its bits are the upper half of a float32.
TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
SAMPLE = 256  # ordinary rows that say what a trained row looks like


@dataclass(frozen=True)
class Matrix:
    """A matrix in a file, one row a token."""

    name: str
    shape: tuple[int, int]
    file: Path
    offset: int
    kind: str  # key of TYPES, or "GGUF"
    tensor: Any = field(default=None, repr=False, compare=False)  # GGUF: a memory map. Parsing the file takes seconds

    def rows(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Rows `ids` as float32, reading nothing else."""
        if self.kind == "GGUF":
            return _gguf_rows(self, ids)
        width, kind = self.shape[1], np.dtype(TYPES[self.kind])
        out = np.empty((len(ids), width), np.float32)
        with self.file.open("rb") as file:
            for place, row in enumerate(ids):
                file.seek(self.offset + row * width * kind.itemsize)
                raw = np.frombuffer(file.read(width * kind.itemsize), kind)
                out[place] = (raw.astype("<u4") << 16).view("<f4") if self.kind == "BF16" else raw
        return out


@dataclass(frozen=True)
class Embedding:
    """The input embedding and, where it is another matrix, the output head."""

    inputs: Matrix
    outputs: Matrix | None

    @property
    def num_rows(self) -> int:
        return self.inputs.shape[0]

    def untrained(self, ids: Sequence[int]) -> list[int]:
        """Those of `ids` whose row, in either matrix, shows no training."""
        ids = [token for token in ids if token < self.num_rows]
        found: set[int] = set()
        for matrix in (self.inputs, self.outputs):
            if matrix is not None and ids:
                found.update(_untrained(matrix, ids))
        return sorted(found)


def _untrained(matrix: Matrix, ids: Sequence[int]) -> Iterator[int]:
    """Rows that are zero beside ordinary ones, or equal to one another to the last bit.

    Llama-3-8B's rows of unused tokens are zero to within 1e-16 (unslothai/unsloth, fix_untrained_tokens); models whose
    unused rows were set to the mean of all rows have them equal. A thousandth of the usual norm is neither.
    """
    usual = np.linalg.norm(matrix.rows(np.linspace(0, matrix.shape[0] - 1, SAMPLE).astype(int).tolist()), axis=1)
    rows = matrix.rows(ids)
    small = np.linalg.norm(rows, axis=1) < 1e-3 * np.median(usual)
    first: dict[bytes, list[int]] = {}
    for token, row in zip(ids, rows, strict=True):
        first.setdefault(row.tobytes(), []).append(token)
    for token, row, is_small in zip(ids, rows, small, strict=True):
        if is_small or len(first[row.tobytes()]) > 1:
            yield token


def find_embedding(folder: Path) -> Embedding | None:
    """The embedding of a model folder or .gguf file; None where there are no weights of a kind that can be read."""
    matrices = _gguf_matrices(folder) if folder.suffix == ".gguf" else _safetensors_matrices(folder)
    inputs = next((matrices[name] for name in INPUT_NAMES if name in matrices), None)
    outputs = next((matrices[name] for name in OUTPUT_NAMES if name in matrices), None)
    return Embedding(inputs, outputs) if inputs else None


def _safetensors_matrices(folder: Path) -> dict[str, Matrix]:
    wanted, found = {*INPUT_NAMES, *OUTPUT_NAMES}, {}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        header, start = _header(file)
        for name in wanted & header.keys():
            entry = header[name]
            if entry["dtype"] in TYPES and len(entry["shape"]) == 2:
                shape = (int(entry["shape"][0]), int(entry["shape"][1]))
                found[name] = Matrix(name, shape, file, start + int(entry["data_offsets"][0]), entry["dtype"])
    return found


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file begins with the length of its JSON header (8 bytes, little-endian) and the header."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > 100_000_000:  # the format's own limit
                raise ValueError("its header claims to be larger than 100 MB")
            return json.loads(opened.read(length)), 8 + length
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is no safetensors file: {error}", "Download the model again.") from None


def _gguf_matrices(file: Path) -> dict[str, Matrix]:
    reader = _gguf_reader(file)
    wanted = {*INPUT_NAMES, *OUTPUT_NAMES}
    # GGUF names the inner axis first: [columns, rows].
    return {
        tensor.name: Matrix(tensor.name, (int(tensor.shape[1]), int(tensor.shape[0])), file, 0, "GGUF", tensor)
        for tensor in reader.tensors
        if tensor.name in wanted
    }


def _gguf_rows(matrix: Matrix, ids: Sequence[int]) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    raw = matrix.tensor.data.reshape(matrix.shape[0], -1)[
        list(ids)
    ]  # quantised blocks lie along a row: rows stay whole
    return np.asarray(dequantize(raw, matrix.tensor.tensor_type), np.float32)


def _gguf_reader(file: Path) -> Any:
    try:
        import gguf
    except ImportError:
        from crosstune.errors import MissingExtra

        raise MissingExtra("gguf", "demo") from None
    try:
        with parsed_once():
            return gguf.GGUFReader(str(file))  # memory-mapped: nothing is read until asked for
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{file} is no GGUF file: {error}", "Download the model again.") from None


def model_folder(name: str) -> Path | None:
    """Where the model's files lie on this machine: the path itself, or the hub's cache; None if nowhere."""
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not of the form owner/name: HFValidationError is one
        return None
    return Path(cached).parent if isinstance(cached, str) else None
