"""Devices: names, precision, what a process may see. No GPU is needed: NVML is faked where it is asked."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from crosstune.errors import DeviceError
from crosstune.memory import gpus as gpus_module
from crosstune.memory.gpus import GIB, GPUS, find_gpu, free_ram_bytes, parse_bytes, present_gpus
from crosstune.memory.precision import attention_kernel, choose_precision
from crosstune.memory.visible import best_gpu, choose_gpu, show_gpus, visible_gpus
from crosstune.model import base as base_module
from crosstune.model.device import (
    choose_device,
    free_bytes,
    live_bytes,
    live_tensors,
    make_workspaces,
    named_device,
    peak_bytes,
    pinned_memory,
)
from crosstune.recipe.sections import Device, Model


@pytest.mark.parametrize("name", ["4090", "RTX 4090", "NVIDIA GeForce RTX 4090", "rtx4090", "rtx-4090"])
def test_a_gpu_is_found_under_the_names_people_give_it(name):
    assert find_gpu(name) is GPUS["rtx-4090"]


def test_an_unknown_gpu_lists_the_known_ones():
    with pytest.raises(DeviceError, match="'k80' is not known") as error:
        find_gpu("k80")
    assert "t4" in error.value.fix


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GiB", 16 * GIB), ("16 GB", 16 * GIB), ("500mib", 500 << 20), ("1.5T", 1536 * GIB), ("4194304", 4 << 20)],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0", "16 GiB free", "16"])
def test_no_amount_of_memory(text):
    with pytest.raises(DeviceError, match="no amount of memory"):
        parse_bytes(text)


def test_case_p01_bf16_is_refused_below_capability_8_and_auto_takes_fp16():
    with pytest.raises(DeviceError, match=r"bf16-unsupported: NVIDIA T4 has compute capability 7\.5") as error:
        choose_precision("bf16", find_gpu("t4"))
    assert error.value.exit_code == 2
    assert choose_precision("auto", find_gpu("t4")).value == "fp16"
    assert "7.5" in choose_precision("auto", find_gpu("t4")).why
    assert choose_precision("auto", find_gpu("a100-40")).value == "bf16"


def test_gpus_that_were_named_are_never_a_silent_cpu_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"device.gpus is \[0, 1\]"):
        choose_device(Device(gpus=(0, 1)))
    assert choose_device(Device(kind="cpu", gpus=(0,))).device.type == "cpu"


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "CPU", ""])
def test_a_word_that_is_no_device_is_refused_with_those_that_are(name):
    with pytest.raises(DeviceError, match="is not known") as error:
        named_device(name)
    assert "cuda" in error.value.fix and error.value.exit_code == 2


def test_a_word_for_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "cuda:1"):
        with pytest.raises(DeviceError, match="device-unavailable"):
            named_device(name)
    assert named_device("cpu", Device(precision="bf16")).precision.value == "bf16"


def test_a_cpu_computes_in_fp32_unless_told_otherwise():
    cpu = choose_device(Device(kind="cpu"))
    assert (cpu.device.type, cpu.precision.value) == ("cpu", "fp32")
    assert choose_device(Device(kind="cpu", precision="bf16")).precision.value == "bf16"
    with pytest.raises(DeviceError):
        choose_device(Device(kind="cpu", precision="fp16"))


def test_attention_kernels():
    assert attention_kernel(find_gpu("h100"), "bf16").value == "flash"
    assert attention_kernel(find_gpu("h100"), "fp32").value == "memory-efficient"
    assert attention_kernel(find_gpu("t4"), "fp16").value == "memory-efficient"
    assert attention_kernel(find_gpu("h100"), "bf16", masked=True).value == "memory-efficient"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a computer without a GPU")
def test_case_x01_cuda_without_a_gpu_is_an_error_and_not_a_cpu_run():
    with pytest.raises(DeviceError, match="device-unavailable") as error:
        choose_device(Device(kind="cuda"))
    assert error.value.exit_code == 2
    assert not torch.cuda.is_initialized()


WORKER = """
import os, sys
from crosstune.memory.visible import show_gpus
shown = show_gpus([{gpu}])
print(shown.value, shown.torch_was_imported, os.environ["CUDA_VISIBLE_DEVICES"])
import torch
print(torch.cuda.is_initialized())
"""


@pytest.mark.parametrize("gpu", [0, 1])
def test_case_x01_a_worker_hides_the_other_gpus_before_torch_is_imported(gpu):
    done = subprocess.run([sys.executable, "-c", WORKER.format(gpu=gpu)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(gpu), "False", str(gpu), "False"]


def test_gpu_numbers_count_among_those_shown_from_outside():
    environ = {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert show_gpus([1], environ).value == "6"
    assert environ["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(DeviceError, match="shows 2 GPUs"):
        show_gpus([2], environ)


def test_other_gpus_are_refused_once_cuda_has_started(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    assert show_gpus([0], environ).value == "0"  # nothing changes
    with pytest.raises(DeviceError, match="already started CUDA"):
        show_gpus([1], {"CUDA_VISIBLE_DEVICES": "0,1"})


class FakeNvml:
    """Two GPUs, the second with more free memory; the first doesn't say who uses it."""

    NVMLError = RuntimeError

    def nvmlInit(self):
        pass

    nvmlShutdown = nvmlInit

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, index):
        return SimpleNamespace(total=24 * GIB, free=(4 + 10 * index) * GIB, used=(20 - 10 * index) * GIB)

    def nvmlDeviceGetName(self, index):
        return b"NVIDIA GeForce RTX 3090"

    def nvmlDeviceGetCudaComputeCapability(self, index):
        return [8, 6]

    def nvmlDeviceGetUUID(self, index):
        return f"GPU-{index}"

    def nvmlDeviceGetComputeRunningProcesses(self, index):
        if index == 0:
            raise self.NVMLError("not permitted")
        return [SimpleNamespace(pid=7, usedGpuMemory=10 * GIB)]


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_read_through_nvml(two_gpus):
    first, second = present_gpus()
    assert (first.free_bytes, first.processes, first.driver) == (4 * GIB, (), "580.65.06")
    assert second.processes == ((7, 10 * GIB),)
    assert second.machine.capability == (8, 6)
    assert second.machine.flops == GPUS["rtx-3090"].flops  # rates by name


def test_the_gpu_with_most_free_memory_is_taken(two_gpus, monkeypatch):
    assert best_gpu().index == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert best_gpu().index == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    assert [gpu.index for gpu in visible_gpus()] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert best_gpu() is None


def test_case_x01_one_gpu_is_shown_and_it_is_the_one_asked_for(two_gpus, monkeypatch):
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert choose_gpu("cpu", "auto") is None
    assert choose_gpu("auto", "auto").index == 1  # most free memory
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert choose_gpu("auto", "auto").index == 1  # and again, in the same process
    assert choose_gpu("cuda", [1]).index == 1
    assert choose_gpu("cuda", [0]).index == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_gpus_that_are_not_there_are_refused(two_gpus, monkeypatch):
    with pytest.raises(DeviceError, match="no such GPU") as error:
        choose_gpu("auto", [7])
    assert "1 (NVIDIA GeForce RTX 3090)" in error.value.fix
    with pytest.raises(DeviceError, match="names 2 GPUs"):
        choose_gpu("auto", [0, 1])


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    nvml = FakeNvml()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(RuntimeError("driver not loaded"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert present_gpus() == []


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    numbers = {"/sys/fs/cgroup/memory.max": 2 * GIB, "/sys/fs/cgroup/memory.current": GIB}
    monkeypatch.setattr(gpus_module, "_read_number", numbers.get)
    assert free_ram_bytes() <= GIB


def test_bytes_of_this_process():
    cpu = torch.device("cpu")
    block = torch.ones(32 << 20)
    assert live_bytes(cpu) > block.nbytes
    assert peak_bytes(cpu) >= live_bytes(cpu) * 0.5
    assert free_bytes(cpu) > block.nbytes
    assert live_tensors("cpu")[(32 << 20,), "float32"] >= block.nbytes
    del block
    assert ((32 << 20,), "float32") not in live_tensors("cpu")


def test_tensors_without_storage_are_passed_over():
    sparse, dense = torch.ones(3, 3).to_sparse(), torch.ones(3, 4711)
    with pytest.raises(RuntimeError):
        sparse.untyped_storage()
    assert live_tensors("cpu")[(3, 4711), "float32"] == dense.nbytes


def test_where_no_more_memory_can_be_pinned_plain_memory_is_taken(monkeypatch):
    real, asked = torch.empty, []

    def full(*size, pin_memory=False, **more):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return real(*size, **more)

    monkeypatch.setattr(torch, "empty", full)
    found = pinned_memory(7, torch.int64)
    assert (found.shape, found.dtype) == ((7,), torch.int64)
    assert asked == [True, False]


def test_workspaces_are_made_by_both_passes_of_a_product_on_each_gpu_even_without_gradients(monkeypatch):
    made, ones = [], torch.ones

    def on_the_cpu(*size, device, **kinds):
        made.append((device, ones(*size, **kinds)))
        return made[-1][1]

    monkeypatch.setattr(torch, "ones", on_the_cpu)
    devices = [SimpleNamespace(type="cuda"), torch.device("cpu"), SimpleNamespace(type="cuda")]
    with torch.no_grad():
        make_workspaces(devices)
    assert [device for device, _ in made] == [devices[0], devices[2]]
    assert all(x.grad is not None for _, x in made)


def test_workspaces_are_made_as_soon_as_a_base_is_loaded_or_adopted(tiny, monkeypatch):
    made, cpu = [], torch.device("cpu")
    monkeypatch.setattr(base_module, "make_workspaces", made.append)
    base = base_module.load_base(Model(name=str(tiny)), None, device=cpu, precision="fp32")
    base_module.adopt(base.model, None)
    assert made == [(cpu,), (cpu,)]
