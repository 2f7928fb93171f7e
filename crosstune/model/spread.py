"""A base whose layers lie on several devices: which lies where, and hidden states that follow.

accelerate decides what goes where (`infer_auto_device_map`: decoder blocks stay whole, tied weights together). Its own
hooks are not used beyond loading: they sit on the blocks that attach.py replaces, and don't make a module's device the
current one, which Triton's kernels need.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.errors import DeviceError

_SKIPPED = ["cache", "past_key_values"]  # a key-value cache holds each layer's part where that layer is


@dataclass(frozen=True)
class Spread:
    """Devices, and the place (index of a device) of each module that accelerate's map names. First: where ids go in.

    The same device may stand there more than once: lanes are then kept apart as on several.
    """

    devices: tuple[torch.device, ...]
    places: Mapping[str, int]

    def place(self, name: str) -> int:
        """The place of a module or of what it is part of."""
        while name not in self.places:
            name = name.rpartition(".")[0]
        return self.places[name]

    def follow(self, name: str, module: nn.Module) -> None:
        """Let what goes into a module that the map names come to its device first."""
        if name not in self.places:
            return
        device = self.devices[self.places[name]]

        def move(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            from accelerate.utils import send_to_device

            make_current(device)
            return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=_SKIPPED)

        module.register_forward_pre_hook(move, with_kwargs=True)

    def settle(self, model: Any) -> None:
        """Put each module of a loaded model where it belongs, and let what goes into it follow."""
        from accelerate.hooks import remove_hook_from_submodules

        remove_hook_from_submodules(model)
        for name, place in self.places.items():
            module = model.get_submodule(name)
            if any(tensor.device != self.devices[place] for tensor in (*module.parameters(), *module.buffers())):
                module.to(self.devices[place])
            self.follow(name, module)


def loading_map(spread: Spread) -> dict[str, Any]:
    """transformers' `device_map`. A CPU among GPUs means off-loading to it: then all is loaded there first."""
    kinds = {device.type for device in spread.devices}
    if len(kinds) > 1:
        return {"": torch.device("cpu")}
    return {name: spread.devices[place] for name, place in spread.places.items()}


def make_current(device: torch.device) -> None:
    """Kernels that are launched by address go to CUDA's current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_map(model: Any, room: Sequence[int], *, dtype: torch.dtype, quantization: str = "none") -> dict[str, int]:
    """accelerate's map of a model (on meta tensors): module → place. `room`: bytes of weights that each place may hold.

    Even spreading is a matter of the room, too: accelerate's own balancing weighs weights alone, and lanes and
    activations follow the layers (it gives three GPUs 8, 18 and 6 layers of an 8B base in NF4).
    Raises DeviceError if the weights don't fit.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import CustomDtype, compute_module_sizes, get_max_layer_size

    whole = list(model._no_split_modules or ())
    small = {"nf4": CustomDtype.INT4, "int8": torch.int8}.get(quantization)
    special = {} if small is None else {f"{name}.weight": small for name in quantized_linears(model)}
    most: dict[int | str, int] = dict(enumerate(room))
    # accelerate keeps as much free on the first device, in case a layer were off-loaded and had to be fetched there
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special)
    most[0] += int(get_max_layer_size(list(model.named_children()), sizes, whole)[0])
    with _no_warnings():
        found = infer_auto_device_map(
            model, most, no_split_module_classes=whole, dtype=dtype, special_dtypes=special, clean_result=False
        )
    outside = [name for name, place in found.items() if not isinstance(place, int)]
    if outside:
        raise DeviceError(
            f"device.layers: no GPU has room for {len(outside)} of the base's {len(found)} parts: {outside[0]} …",
            "Name more GPUs in device.gpus, set model.quantization: nf4, or device.offload: cpu.",
        )
    return _by_module(model, {name: int(place) for name, place in found.items()})


def quantized_linears(model: nn.Module) -> list[str]:
    """The linear layers that bitsandbytes quantises: all but the output head."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]


def _by_module(model: Any, found: dict[str, int]) -> dict[str, int]:
    """Only modules that are called, and rotary tables beside the embeddings, from which they are made."""
    names = {module: name for name, module in model.named_modules()}
    embeddings = names[model.get_input_embeddings()]
    first = next(place for name, place in found.items() if not name or f"{embeddings}.".startswith(f"{name}."))
    places: dict[str, int] = {}
    for name, place in found.items():
        module = model.get_submodule(name)
        called = [f"{name}.{i}" for i in range(len(module))] if isinstance(module, nn.ModuleList) else [name]
        places |= dict.fromkeys(called, first if name.endswith("rotary_emb") else place)
    return places


@contextmanager
def _no_warnings() -> Iterator[None]:
    """accelerate says of each place that is no GPU that it isn't available."""
    logger = logging.getLogger("accelerate.utils.modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """The model on meta tensors: sizes without data."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model
