"""Follow every tensor's birth and death while code runs on meta tensors, without a byte of data.

A meta tensor has a shape and no storage content, so an 8B model's training step runs on any computer in seconds. What a
CUDA kernel allocates inside itself can't be seen there; `kernels.py` adds it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from crosstune.memory.replay import Event

# (the operator's arguments) → what its CUDA kernel allocates and frees while it runs
Temporaries = Callable[[tuple[Any, ...], Mapping[str, Any]], "Inside"]
StandIn = Callable[..., Any]  # an operator whose results' shapes hang on values, which meta tensors lack
META = torch.device("meta")


@dataclass(frozen=True)
class Inside:
    """Sizes of a kernel's temporaries, in the order of their births; what else of the order fragments memory."""

    sizes: Sequence[int]
    first: bool = False  # born before the operator's results
    stacked: bool = False  # the last one born dies first


class Tracker(TorchDispatchMode):
    """A dispatch mode that writes `trace`. Only meta tensors count; a copy to the CPU gives zeros."""

    def __init__(
        self,
        hidden: Mapping[str, Temporaries] | None = None,
        stand_ins: Mapping[str, StandIn] | None = None,
        *,
        answer: bool = True,
    ) -> None:
        super().__init__()
        self.hidden, self.stand_ins = hidden or {}, stand_ins or {}
        self.answer = answer  # what a bool tensor says when Python code asks for its value
        self.trace: list[Event] = []
        self.live: dict[int, tuple[int, int, Any]] = {}  # storage → (key, bytes, weak reference)
        self._next = 0

    def mark(self, label: str) -> None:
        """End a phase."""
        self.trace.append(("mark", label, 0))

    def live_bytes(self) -> int:
        """Bytes alive now, unrounded."""
        return sum(count for _, count, _ in self.live.values())

    def track(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, once."""
        if tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        place, count = storage._cdata, storage.nbytes()
        if count == 0 or place in self.live:
            return
        key = self._born(count)

        def died(_: object) -> None:
            if self.live.get(place, (None,))[0] == key:
                del self.live[place]
            self.trace.append(("died", key, count))

        self.live[place] = (key, count, weakref.ref(storage, died))

    def track_module(self, module: nn.Module) -> None:
        """Count a module's parameters and buffers, and what bitsandbytes keeps beside a quantised weight."""
        for tensor in [*module.parameters(), *module.buffers()]:
            self.track(tensor)
            for extra in quantisation_tensors(tensor):
                self.track(extra)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            dtype = args[0].dtype
            return self.answer if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", META) != META and args[0].is_meta:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=kwargs["device"])
        name, overload = func._schema.name, func._schema.overload_name
        inside = self.hidden[name](args, kwargs) if name in self.hidden else Inside(())
        born = [(self._born(count), count) for count in inside.sizes] if inside.first else []
        out = self.stand_ins.get(f"{name}.{overload}" if overload else name, func)(*args, **kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self.track(tensor)
        born = born or [(self._born(count), count) for count in inside.sizes]
        for key, count in reversed(born) if inside.stacked else born:
            self.trace.append(("died", key, count))
        return out

    def _born(self, count: int) -> int:
        self._next += 1
        self.trace.append(("born", self._next, count))
        return self._next


def quantisation_tensors(weight: Tensor) -> list[Tensor]:
    """Statistics that bitsandbytes keeps with a weight: NF4's quant_state, int8's scales."""
    from_bnb = type(weight).__name__
    found: list[Any] = []
    if from_bnb == "Params4bit":
        state = weight.quant_state  # type: ignore[attr-defined]
        found = [state.absmax, state.code, state.offset]
        if state.nested:
            found += [state.state2.absmax, state.state2.code]
    elif from_bnb == "Int8Params":
        found = [weight.CB, weight.SCB]  # type: ignore[attr-defined]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]
