"""A merged model, or an adapter alone, as a GGUF file for llama.cpp and Ollama: Llama's architecture, through `gguf`.

llama.cpp's own converter is no package; `gguf` is its writer and its table of names. Other architectures are refused
with the converter's command.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from crosstune.errors import MissingExtra, ModelError
from crosstune.export.adapter import CONFIG
from crosstune.export.changes import Change, LowRank
from crosstune.export.companions import load_saved_tokenizer
from crosstune.export.gguf_tokens import CONVERTER, add_tokenizer
from crosstune.export.saved import SavedAdapter, adapter_config, adapter_folder, model_config, read_adapter
from crosstune.export.weights import BaseWeights, find_weights
from crosstune.model.base import hub_arguments
from crosstune.recipe.sections import Model
from crosstune.store.files import write_file

try:
    import gguf
except ImportError:
    raise MissingExtra("gguf", "gguf") from None

Kind = tuple[gguf.GGMLQuantizationType, gguf.LlamaFileType]
ARCHITECTURE = "llama"
TYPES: dict[str, Kind] = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
KNOWN = ("llama", "mistral")  # model_type in config.json; both are "llama" to llama.cpp


def write_gguf(source: str | Path, out: str | Path | None = None, *, kind: str = "", base: str | None = None) -> Path:
    """Write `source` as one GGUF file and return its path.

    source  a merged folder → model.gguf in it, or an adapter's folder or a run with a fit → adapter.gguf
    kind    f32, f16, bf16 or q8_0; default: f16 for a model, f32 for an adapter
    base    adapter only: hub id, folder or .gguf of its base; default: the one that it names
    """
    place = Path(source).expanduser()
    if (place / "config.json").is_file() and not (place / CONFIG).is_file():
        return _write_model(place, Path(out) if out else place / "model.gguf", _type(kind or "f16"))
    folder = adapter_folder(source)
    name = base or adapter_config(folder).base_model_name_or_path or ""
    config = model_config(hub_arguments(Model(name=name)))
    adapter = read_adapter(folder, config)
    return _write_adapter(adapter, config, Path(out) if out else folder / "adapter.gguf", _type(kind or "f32"))


def _type(kind: str) -> Kind:
    if kind not in TYPES:
        raise ModelError(f"there is no GGUF type {kind!r} here", f"Choose one of {', '.join(TYPES)}.")
    return TYPES[kind]


def _write_model(folder: Path, out: Path, kind: Kind) -> Path:
    weights = find_weights(str(folder))
    if weights.quantization:
        raise ModelError(
            f"{folder.name} is quantised ({weights.quantization})", "Merge without quantize, then convert."
        )
    config = model_config({"pretrained_model_name_or_path": folder})
    layout = Layout.of(config)
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    _add_settings(writer, config)
    writer.add_name(folder.name)
    writer.add_file_type(kind[1])
    add_tokenizer(writer, folder, load_saved_tokenizer(folder), int(config.vocab_size))
    tied_head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    reads: dict[str, Callable[[], Tensor]] = {
        layout.name(name): partial(_permuted, layout, name, weights) for name in weights.files if name not in tied_head
    }
    shapes = {layout.name(name): weights.shapes[name] for name in weights.files if name not in tied_head}
    factors = rope_factors(config)
    if factors is not None:
        shapes["rope_freqs.weight"], reads["rope_freqs.weight"] = tuple(factors.shape), lambda: factors
    _write(writer, out, shapes, reads, kind[0])
    return out


def _permuted(layout: Layout, name: str, weights: BaseWeights) -> Tensor:
    return layout.permuted(name, weights.read(name).float())


def _write_adapter(adapter: SavedAdapter, config: PretrainedConfig, out: Path, kind: Kind) -> Path:
    layout = Layout.of(config)
    changes = {name: change for name, change in adapter.changes.items() if _is_plain(change)}
    odd = sorted(set(adapter.changes) - set(changes))
    alphas = {change.scale * change.a_RI.shape[0] for change in changes.values() if isinstance(change, LowRank)}
    if odd or len(alphas) != 1:
        what = f"more than low-rank matrices of linear layers ({odd[0]})" if odd else "layers of several scales"
        raise ModelError(f"the adapter holds {what}, which llama.cpp's adapters can't", "Merge it, then convert.")
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp scales by alpha / rank, whatever the adapter was trained with: this alpha gives rsLoRA's scale too.
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alphas.pop())
    writer.add_file_type(kind[1])
    sides: dict[str, Tensor] = {}
    for name, change in changes.items():
        assert isinstance(change, LowRank)
        sides[f"{layout.name(name)}.lora_a"] = change.a_RI.float()
        sides[f"{layout.name(name)}.lora_b"] = layout.permuted(name, change.b_OR.float())
    shapes = {name: tuple(side.shape) for name, side in sides.items()}
    _write(writer, out, shapes, {name: partial(sides.__getitem__, name) for name in sides}, kind[0])
    return out


def _is_plain(change: Change) -> bool:
    return isinstance(change, LowRank) and change.magnitude_O is None and not change.is_transposed


@dataclass(frozen=True)
class Layout:
    """Where llama.cpp wants each weight, and in which order of its rows."""

    names: gguf.TensorNameMap
    num_heads: int
    num_kv_heads: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Layout:
        """The layout of a model with this config; refuses other architectures than Llama's."""
        if config.model_type not in KNOWN:
            raise ModelError(
                f"GGUF files of {config.model_type!r} models aren't written here",
                f"Convert the merged folder with {CONVERTER}.",
            )
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        heads = config.num_attention_heads
        return cls(names, heads, config.num_key_value_heads or heads)

    def name(self, name: str) -> str:
        """model.layers.0.self_attn.q_proj.weight → blk.0.attn_q.weight."""
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"llama.cpp has no place for {name}", f"Convert the merged folder with {CONVERTER}.")
        return str(found)

    def permuted(self, name: str, tensor: Tensor) -> Tensor:
        """Rows of q and k as interleaved rotary pairs (0 1 0 1 …); transformers keeps them as halves (0 0 … 1 1 …)."""
        module = name.rpartition(".")[0]
        if not module.endswith(("q_proj", "k_proj")):
            return tensor
        heads = self.num_heads if module.endswith("q_proj") else self.num_kv_heads
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def rope_factors(config: PretrainedConfig) -> Tensor | None:
    """Llama 3.1's stretched rotary frequencies as llama.cpp takes them: what each plain frequency is divided by."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rotary scaling {kind!r} isn't written here", f"Convert the merged folder with {CONVERTER}.")
    plain, _ = ROPE_INIT_FUNCTIONS["llama3"](_without_scaling(config), torch.device("cpu"))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return plain / scaled


def _without_scaling(config: PretrainedConfig) -> PretrainedConfig:
    plain = copy.deepcopy(config)
    plain.rope_parameters["factor"] = 1.0
    return plain


def _add_settings(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write(
    writer: gguf.GGUFWriter,
    out: Path,
    shapes: Mapping[str, tuple[int, ...]],
    reads: Mapping[str, Callable[[], Tensor]],
    kind: gguf.GGMLQuantizationType,
) -> None:
    """Write header, settings and one tensor after another; the file appears whole or not at all."""
    kinds = {name: _stored(shape, kind) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
        num_bytes = math.prod(shape) // block * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, kinds[name])

    def fill(part: Path) -> None:
        with closing(writer):
            writer.write_header_to_file(part)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name in shapes:
                writer.write_tensor_data(gguf.quants.quantize(reads[name]().contiguous().numpy(), kinds[name]))

    write_file(out, fill)


def _stored(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """Norms and biases stay fp32, as in llama.cpp's converter; rows that no block of 32 divides stay 16-bit."""
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return kind if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16
