"""Bases of random weights on the device, one at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from bench.memory.grid import MODELS
from bench.shapes import fill
from crosstune.memory.estimate import Settings
from crosstune.model.attention import attention_name
from crosstune.model.base import DTYPES, Base


class OneBase:
    """The base of one model and quantisation; another takes its place when it is gone. `clear`: done in between."""

    def __init__(self, device: torch.device, clear: Callable[[], object] = gc.collect) -> None:
        self.device, self.clear = device, clear
        self._base: Base | None = None
        self._held: tuple[str, str] | None = None

    def of(self, name: str, settings: Settings) -> Base:
        """The base that these settings are of."""
        asked = (name, settings.quantization)
        if self._base is None or self._held != asked:
            self._base = None
            self.clear()
            self._base, self._held = random_base(MODELS[name], settings, self.device), asked
        return self._base


def random_base(config: dict[str, Any], settings: Settings, device: torch.device) -> Base:
    """Random weights of this shape on the device, quantised layer by layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    dtype = DTYPES[settings.precision]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known, dtype=dtype, attn_implementation=attention_name(device, dtype))
    base = Base(fill(model, settings.quantization, device), None, device, dtype, config["model_type"])
    base.freeze()
    return base
