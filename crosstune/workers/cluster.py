"""A Ray cluster: joined or started, refused where nobody answers, and divided among workers."""

from __future__ import annotations

import logging
import socket
from typing import Any

import ray

from crosstune.errors import DeviceError
from crosstune.memory.gpus import free_ram_bytes
from crosstune.recipe.recipe import Recipe

STORE_BYTES = 8 << 30  # of Ray's object store: beyond it Ray uses the disk


def connect(address: str) -> bool:
    """Join the cluster at `address`, or start one on this machine; False where this process had joined one before."""
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address == "auto":  # Ray's own default is 30% of memory; checkpoints and adapters on their way need far less
        options |= {"include_dashboard": False, "object_store_memory": min(STORE_BYTES, free_ram_bytes() // 4)}
    else:
        refuse_silent(address)
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from None
    return True


def refuse_silent(address: str) -> None:
    """Ray itself waits for minutes where nobody listens."""
    if fault := why_silent(address):
        raise _unreachable(address, fault)


def _unreachable(address: str, fault: object) -> DeviceError:
    return DeviceError(
        f"ray-unreachable: no Ray cluster answers at {address!r}: {fault}",
        "Start one there (ray start --head), or set device.ray: auto to use this machine.",
    )


def why_silent(address: str) -> str:
    """Why nobody answers at a head node's address; empty if somebody does."""
    host, _, port = address.rpartition(":")
    if address.startswith("ray://") or not host or not port.isdigit():
        return "it isn't of the form HOST:PORT (port 6379 of the head node)"
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def shares(recipe: Recipe) -> tuple[int, float, int]:
    """GPUs a worker, CPUs a worker, number of workers."""
    whole = ray.cluster_resources()
    gpus, cpus = int(whole.get("GPU", 0)), whole.get("CPU", 1)
    wanted = recipe.device.workers
    if recipe.device.kind == "cpu" or (recipe.device.kind == "auto" and not gpus):
        count = 1 if wanted == "auto" else int(wanted)
        return 0, max(0.01, min(1.0, cpus / count)), count
    if not gpus:
        raise DeviceError("device-unavailable: no node of the Ray cluster has a GPU", "Set device.kind to auto or cpu.")
    count = gpus if wanted == "auto" else int(wanted)
    if count > gpus:
        raise DeviceError(f"device.workers is {count}, and the Ray cluster has {gpus} GPUs", "Ask for as many at most.")
    return 1, min(1.0, cpus / count), count
