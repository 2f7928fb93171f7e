"""The frozen base model, loaded once: hub id, folder or GGUF file; 16-bit, fp32, int8 or NF4; on one device or more.

Quirks of transformers and bitsandbytes live here and in attach.py.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crosstune.data.gguf_once import forget_parsed, parsed_once
from crosstune.errors import MissingExtra, ModelError, first_line, hub_fix
from crosstune.memory.config import NAMES_A_BASE, refuse_missing_path
from crosstune.memory.layout import Layout
from crosstune.model.attention import attention_name
from crosstune.model.decoder import FusedDecoder
from crosstune.model.device import make_workspaces
from crosstune.model.packed import Rows, can_pack
from crosstune.model.spread import Spread, device_map, empty_model, loading_map, make_current
from crosstune.recipe.sections import Model

# At import, bitsandbytes 0.50 advises CPU users to install a kernel package for 4-bit inference; we train.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Base:
    """A frozen causal language model on one device, with its tokenizer."""

    model: Any  # transformers.PreTrainedModel
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype  # compute type of hidden states and adapter copies
    name: str
    spread: Spread | None = None  # which layers lie on which device, if not all on `device`
    fused: FusedDecoder | None = None  # while lanes are attached, if the decoder is of a kind that block.py knows
    _found: dict[str, Any] = field(default_factory=dict)  # flags of a model that was passed in, to give back

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices, that of the embeddings first."""
        return (self.device,) if self.spread is None else self.spread.devices

    def place_of(self, name: str) -> int:
        """The device of a module, as an index into `devices`."""
        return 0 if self.spread is None else self.spread.place(name)

    @property
    def head_device(self) -> torch.device:
        """Where the output head is."""
        return self.devices[self.place_of(self.head_name)] if self.spread is not None else self.device

    @property
    def decoder(self) -> nn.Module:
        """The model without its output head."""
        return self.model.get_decoder()

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """The decoder's blocks, first to last: those that can be checkpointed one by one."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [module for module in self.decoder.modules() if isinstance(module, GradientCheckpointingLayer)]

    @property
    def head(self) -> Any:
        """The output head as it stands now (a LaneLinear if adapted)."""
        return self.model.get_output_embeddings()

    @property
    def head_name(self) -> str:
        """Full name of the output head."""
        head = self.head
        return next(name for name, module in self.model.named_modules() if module is head)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.model.config.get_text_config().vocab_size)

    def hidden(self, ids_NT: Tensor, position_NT: Tensor | None = None, rows: Rows | None = None) -> Tensor:
        """Last hidden states (N, T, H). Rows are padded on the right, where a causal mask hides padding by itself.

        `position_NT` restarts at 0 for each row of a packed sequence; transformers' masks then keep the rows apart
        (with no attention mask and no cache given: masking_utils.find_packed_sequence_indices). `rows` says the same of
        a flat pass, for fused blocks only.
        """
        with self._on_its_devices():
            if self.fused is not None and self.fused.takes(ids_NT, position_NT, rows):
                return self.fused(ids_NT, position_NT, rows)
            assert rows is None, "only fused blocks take rows side by side"
            return self.decoder(input_ids=ids_NT, position_ids=position_NT, use_cache=False).last_hidden_state

    @contextmanager
    def _on_its_devices(self) -> Iterator[None]:
        """Layers of a spread base make their devices the current one; afterwards the first is again."""
        try:
            yield
        finally:
            if self.spread is not None:
                make_current(self.device)

    @property
    def takes_flat(self) -> bool:
        """`hidden` takes rows side by side."""
        return self.fused is not None and can_pack(self.device, self.dtype)

    def new_cache(self) -> Any:
        """An empty key-value cache for `hidden_cached`: full or sliding, layer by layer, as the model's config says."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def hidden_cached(self, ids_NT: Tensor, position_NT: Tensor, mask_NP: Tensor, cache: Any) -> Tensor:
        """Last hidden states (N, T, H) of the next T tokens; their keys and values are added to `cache`.

        `mask_NP` is 1 for each real position so far, these T included: prompts are padded on the left.
        """
        # transformers 5.24 renames the argument, and warns of the old name at every call
        name = "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"
        with self._on_its_devices():
            out = self.decoder(
                input_ids=ids_NT, position_ids=position_NT, attention_mask=mask_NP, use_cache=True, **{name: cache}
            )
        return out.last_hidden_state.to(ids_NT.device)

    def logit_rule(self) -> tuple[float, float | None]:
        """(factor, soft cap) between the head's output and the logits: Cohere and Granite scale, Gemma 2 caps."""
        config = self.model.config.get_text_config().to_dict()
        factor = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        return factor, config.get("final_logit_softcapping")

    def digest(self) -> str:
        """SHA-256 over every tensor of the base, adapters left out: proof that training left it alone."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            sha.update(name.replace(".base.", ".").encode())
            sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def freeze(self) -> None:
        """No gradient, no training mode; remembers how a passed-in model was set."""
        self._found = {
            "training": [module for module in self.model.modules() if module.training],
            "grad": [parameter for parameter in self.model.parameters() if parameter.requires_grad],
        }
        self.model.requires_grad_(False)
        self.model.eval()
        _keep_gradients(self.model)

    def attend_as(self, name: str) -> None:
        """Let a model that takes transformers' sdpa take this attention (attention.py), a passed-in one while lent."""
        decoder: Any = self.decoder
        if decoder.config._attn_implementation == "sdpa" != name and _takes_any_name(decoder):
            self._found["attention"] = "sdpa"
            decoder.set_attn_implementation(name)

    def release(self) -> None:
        """Give a passed-in model back with the flags it had."""
        if "attention" in self._found:
            decoder: Any = self.decoder
            decoder.set_attn_implementation(self._found["attention"])
        for module in self._found.get("training", ()):
            module.training = True
        for parameter in self._found.get("grad", ()):
            parameter.requires_grad_(True)
        self._found = {}


def load_base(
    model: Model, tokenizer: Any, *, device: torch.device, precision: str, layout: Layout | None = None
) -> Base:
    """Load the base for `precision` (fp32, bf16, fp16) onto `device`, or over the devices of `layout`, frozen.

    Raises ModelError where the name leads to no model that can be used, MissingExtra where a package is missing.
    """
    from transformers import AutoModelForCausalLM

    place = hub_arguments(model)
    options: dict[str, Any] = {"dtype": DTYPES[precision], "attn_implementation": "sdpa", "device_map": {"": device}}
    if "gguf_file" in place:
        options |= _dense_gguf()
    if model.quantization != "none":
        options["quantization_config"] = _quantization(model, DTYPES[precision])
    spread = None
    try:
        with warnings.catch_warnings(), _no_bars(), parsed_once():
            warnings.simplefilter("ignore")
            if layout is not None:
                spread = _spread(model, layout, DTYPES[precision])
                options["device_map"] = loading_map(spread)
            loaded = AutoModelForCausalLM.from_pretrained(**place, **options, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"the base model {model.name!r} can't be loaded: {first_line(error)}",
            hub_fix(error, NAMES_A_BASE),
        ) from None
    finally:
        forget_parsed()
    if spread is not None:
        spread.settle(loaded)
        device = spread.devices[0]
    base = Base(loaded, tokenizer, device, DTYPES[precision], Path(model.name).name or model.name, spread)
    if spread is None:
        _refuse_spread(base)
    return _ready(base)


def _spread(model: Model, layout: Layout, dtype: torch.dtype) -> Spread:
    """Which layers go to which device: accelerate's map, from the model's config alone."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**hub_arguments(model), trust_remote_code=model.trust_remote_code)
    empty = empty_model(config, dtype)
    places = device_map(empty, layout.room, dtype=dtype, quantization=model.quantization)
    return Spread(tuple(torch.device(name) for name in layout.devices.names), places)


def adopt(model: Any, tokenizer: Any) -> Base:
    """A base from a model that is already in memory. `release` gives it back as it was."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"the model passed in is a {type(model).__name__}",
            "Pass a transformers causal language model; a PEFT model must be unloaded first (model.unload()).",
        )
    device = next(model.parameters()).device
    dtype = next((p.dtype for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)), torch.float32)
    base = Base(model, tokenizer, device, dtype, Path(model.config.name_or_path or "").name or type(model).__name__)
    _refuse_spread(base)
    return _ready(base)


def _ready(base: Base) -> Base:
    base.freeze()
    base.attend_as(attention_name(base.device, base.dtype))
    make_workspaces(base.devices)
    return base


def norm_dtype(model: Any, otherwise: torch.dtype) -> torch.dtype:
    """The type of a model's norms: some keep fp32 beside 16 bit."""
    norms = (weight.dtype for name, weight in model.named_parameters() if name.endswith("norm.weight"))
    return next(norms, otherwise)


def hub_arguments(model: Model) -> dict[str, Any]:
    """`from_pretrained` arguments that say where: a hub id, a folder, or a GGUF file in a folder."""
    if model.name.endswith(".gguf"):
        file = Path(model.name).expanduser()
        if not file.is_file():
            raise ModelError(f"there is no file {model.name!r}", "Give the path of a .gguf file in model.name.")
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    place: dict[str, Any] = {"pretrained_model_name_or_path": model.name}
    if model.revision:
        place["revision"] = model.revision
    return place


def _dense_gguf() -> dict[str, Any]:
    """From 5.24 on, transformers may keep a GGUF's weights packed and unpack them in each product: slow in training."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers' own progress bars off: there is one progress display, ours. That for GGUF has no switch."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _quantization(model: Model, dtype: torch.dtype) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise MissingExtra("bitsandbytes", "quant") from None
    from transformers import BitsAndBytesConfig

    if model.quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=model.double_quant,
        bnb_4bit_compute_dtype=dtype,
    )


def _takes_any_name(decoder: nn.Module) -> bool:
    """Its attention is looked up by name, and its code asks nowhere whether that is "sdpa".

    In transformers 5.24 Falcon asks which of its own ways to go, and DeepSeek V3.2 whether a mask or the attention
    leaves out what isn't to be seen. Gemma 4's question, marked, is about logits that are made elsewhere here.
    """
    try:
        code = inspect.getsource(sys.modules[type(decoder).__module__])
    except (OSError, TypeError, KeyError):
        return False
    asks = re.search(r'_attn_implementation (?:==|!=|in|not in) .*"sdpa"(?!.*# trf-ignore)', code)
    return "ALL_ATTENTION_FUNCTIONS" in code and asks is None


def _keep_gradients(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU with AVX-512 BF16.

    It does so at a layer's first product in eval mode that needs no gradient, for a kernel that has no backward pass:
    from then on every gradient through that layer is lost, without an error (0.49 to 0.50, nn.Linear4bit.forward).
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False


def _refuse_spread(base: Base) -> None:
    devices = {str(parameter.device) for parameter in base.model.parameters()}
    if len(devices) > 1:
        raise ModelError(
            f"the base lies on {', '.join(sorted(devices))}",
            "Load it on one device, or give its name and set device.layers: balanced.",
        )


def load_config(model: Model) -> dict[str, Any]:
    """The model's config as a dict, without its weights. Raises ModelError where there is none."""
    from transformers import AutoConfig

    refuse_missing_path(model.name)
    try:
        with parsed_once():
            config = AutoConfig.from_pretrained(**hub_arguments(model), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"the base model {model.name!r} has no config that can be read: {first_line(error)}",
            hub_fix(error, NAMES_A_BASE),
        ) from None
    return dict(config.to_dict())
