"""The doctor: what it says about this computer, about faked GPUs, and about what is missing."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from crosstune import doctor
from tests.test_device import FakeNvml


def test_it_starts_nothing_and_loads_no_torch():
    code = "import sys\nfrom crosstune.doctor import look\nlook()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_versions_are_those_installed():
    told = doctor.look().to_json()
    json.dumps(told)
    assert told["versions"]["torch"] == metadata.version("torch")
    assert doctor.torch_cuda() == torch.version.cuda


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_gpu_with_most_free_memory_would_be_used(gpus, monkeypatch):
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "12.8")
    found = doctor.look()
    assert found.machine.name == "NVIDIA GeForce RTX 3090"
    assert found.free_bytes == found.gpus[1].free_bytes
    assert (found.precision, found.attention, found.exit_code) == ("bf16", "flash", 0)
    assert found.to_json()["gpus"][1]["processes"] == [{"pid": 7, "bytes": 10 << 30}]


def test_a_torch_without_cuda_is_named_with_the_command(gpus, monkeypatch):
    monkeypatch.setattr(doctor, "torch_cuda", lambda: None)
    found = doctor.look()
    assert found.machine.kind == "cpu"
    assert any("built with CUDA" in thing.what and "pip install" in thing.command for thing in found.missing)


def test_an_old_driver_is_named(gpus, monkeypatch):
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(FakeNvml, "nvmlSystemGetDriverVersion", lambda self: "535.104")
    assert any("driver of at least 580" in thing.what for thing in doctor.look().missing)


def test_hidden_gpus_are_told_from_missing_ones(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(doctor, "torch_cuda", lambda: "12.8")
    found = doctor.look()
    assert (len(found.gpus), found.visible) == (2, ())
    assert any("unset CUDA_VISIBLE_DEVICES" in thing.command for thing in found.missing)


def test_a_missing_package_comes_with_its_extra(monkeypatch, capsys):
    from rich.console import Console

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: real(name) if name != "bitsandbytes" else gone(name))
    found = doctor.look()
    assert found.quantization.startswith("none")
    found.show(Console(width=200))
    assert "pip install 'crosstune[quant]'" in capsys.readouterr().out
    assert found.exit_code == 0


def test_a_missing_torch_stops(monkeypatch):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: real(name) if name != "torch" else gone(name))
    assert doctor.look().exit_code == 2


def gone(name):
    raise metadata.PackageNotFoundError(name)
