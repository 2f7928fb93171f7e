"""The first values of A: each layer's from a generator of its own, so threads may draw them in any order.

Knows nothing of lanes: it is told the seed, the layer and the place.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from crosstune.model.device import pinned_memory
from crosstune.model.shards import Site

DRAWERS = min(16, os.cpu_count() or 1)


def initial_a(seed: int, site: Site, rank: int) -> Tensor:
    """A (rank, in) as PEFT draws it (kaiming_uniform_, a=√5: uniform in ±1/√in), from seed and name."""
    return _draw(torch.empty(rank, site.in_features), seed, site)


def draw_into(a_P: Tensor, seed: int, site: Site) -> None:
    """The same into an A's place in a flat tensor: drawn there on the CPU, copied there on a GPU.

    The copy is only queued. torch gives its pinned memory to no other draw before it is over.
    """
    if a_P.device.type == "cpu":
        _draw(a_P, seed, site)
    elif a_P.device.type == "cuda":
        a_P.copy_(_draw(pinned_memory(a_P.shape), seed, site), non_blocking=True)
    elif not a_P.is_meta:
        a_P.copy_(_draw(torch.empty(a_P.shape), seed, site))


def drawers(devices: Iterable[torch.device]) -> ThreadPoolExecutor:
    """Threads that queue their copies where this one queues its work, on every device."""
    streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]

    def follow() -> None:
        for stream in streams:
            torch.cuda.set_stream(stream)

    return ThreadPoolExecutor(DRAWERS, initializer=follow)


def _draw(a: Tensor, seed: int, site: Site) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{site.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") % 2**63)
    bound = 1 / math.sqrt(site.in_features)
    return a.uniform_(-bound, bound, generator=generator)
