"""Kernels compiled ahead: all that passes launch, in the order of need; a failure is silent, an early end waits for none."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from crosstune import resources
from crosstune.crossval import cross_validate
from crosstune.interrupt import Interrupted
from crosstune.memory.shape import ModelShape
from crosstune.model import attention, base, repeatable, warm
from crosstune.model import launches as ahead
from crosstune.model.launches import Launches
from crosstune.model.repeatable import FLASH
from crosstune.model.warm import WarmUp, warm_up
from crosstune.workers import local
from tests.tiny import CASES

PATIENCE = 20  # seconds; no test waits as long unless it fails
CPU = torch.device("cpu")


def begin(scoring, training=(), libraries=((lambda: None),)):
    every = {"libraries": libraries, "scoring": scoring, "training": training}
    return WarmUp(SimpleNamespace(device=CPU, **{f"of_{name}": lambda it=it: it for name, it in every.items()}))


def finishes(work) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kernels")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in threads():
        thread.join(PATIENCE)
    assert not threads()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_what_is_launched_ahead_is_what_passes_launch_whatever_their_lengths(tmp_path, tiny):
    pytest.importorskip("bitsandbytes")
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch_keys", str(tiny)],
        cwd=Path(__file__).parent.parent, env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ahead"] == found["passes"]
    several = {name: len(keys) for name, keys in found["passes"].items() if len(keys) > 1}
    assert several == {"_rms_norm_backward": 2, "_rotate_back": 3, "_judge": 2, "_nf4": 2}
    from tests.launch_keys import launched

    assert found["ahead"].keys() == launched().keys()
    assert found["counts"] == [0, 2, 2, 4]  # variants of a kernel, counted as the GPU's test counts them


def test_scoring_is_waited_for_and_training_is_not():
    go, seen = threading.Event(), []
    warming = begin([lambda: seen.append("scoring")] * 2, [lambda: go.wait(PATIENCE) and seen.append("training")])
    warming.until_scoring()
    assert seen == ["scoring"] * 2
    go.set()
    warming.until_training()
    assert seen[2:] == ["training"]


def test_scoring_waits_for_the_first_library_and_training_for_the_others():
    go, seen = threading.Event(), []
    libraries = [lambda: seen.append("first"), lambda: go.wait(PATIENCE) and seen.append("other")]
    warming = begin([], [], libraries)
    warming.until_scoring()
    assert seen == ["first"]
    go.set()
    warming.until_training()
    assert seen == ["first", "other"]


def test_no_setting_of_pytorchs_changes_while_others_compute(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "set_deterministic_debug_mode", seen.append)
    monkeypatch.setattr(attention, "takes_groups", lambda query: True)
    monkeypatch.setattr(repeatable, "kernel_of", lambda *_: FLASH)
    back, real = [], ahead.fused_gradients
    monkeypatch.setattr(ahead, "fused_gradients", lambda *given: back.append(real(*given)))
    for launch in replace(launches(), device=torch.device("meta")).of_libraries():
        launch()
    assert len(back) == 2 and not seen


def test_training_begins_when_all_of_scoring_is_over():
    go, seen = threading.Event(), []
    warming = begin([lambda: go.wait(PATIENCE) and seen.append("scoring")], [lambda: seen.append("training")])
    go.set()
    warming.until_training()
    assert seen == ["scoring", "training"]


class Sizeable:
    """Stands for a tensor: something that can be watched go."""


def test_a_failure_is_silent_and_keeps_nothing_alive():
    kept = []

    def fail():
        tensor = Sizeable()
        kept.append(weakref.ref(tensor))
        raise RuntimeError("ptxas fell over")

    warming = begin([fail], [fail])
    warming.until_scoring()
    warming.until_training()
    assert len(kept) == 2 and not any(tensor() for tensor in kept)


def test_an_early_end_waits_for_nothing_and_begins_nothing():
    go, begun, seen = threading.Event(), threading.Event(), []

    def long():
        begun.set()
        go.wait(PATIENCE)

    warming = begin([long], [lambda: seen.append("training")] * 20)
    assert begun.wait(PATIENCE)
    assert finishes(warming.end)
    go.set()
    assert finishes(warming.until_training)
    assert not seen


def launches(model_type="llama"):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape = ModelShape.from_config({"model_type": model_type, "vocab_size": 384, **sizes})
    return Launches(CPU, shape, torch.bfloat16, torch.bfloat16, True, True)


def test_there_is_nothing_to_compile_without_a_gpu():
    assert warm_up(launches()) is None


def test_there_is_nothing_to_compile_where_blocks_are_not_fused(monkeypatch):
    monkeypatch.setattr(warm, "runs_triton", lambda _: True)
    assert warm_up(launches("qwen3")) is None


def test_where_no_kernel_compiles_nothing_is_said(monkeypatch):
    monkeypatch.setattr(warm, "runs_triton", lambda _: True)
    warming = warm_up(launches())  # this computer has no GPU
    warming.until_scoring()
    warming.until_training()


def test_where_no_thread_can_be_started_there_is_no_warm_up(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(warm, "runs_triton", lambda _: True)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert warm_up(launches()) is None


def test_where_threads_run_out_those_that_were_started_are_over(monkeypatch):
    begun, go, seen, submit, given = threading.Event(), threading.Event(), [], ThreadPoolExecutor.submit, []

    def refuse_later(self, *work):
        if len(given) == 2:
            threading.Timer(0.2, go.set).start()
            assert begun.wait(PATIENCE)
            raise RuntimeError("can't start new thread")
        given.append(work)
        return submit(self, *work)

    def long():
        begun.set()
        go.wait(PATIENCE)
        seen.append("over")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse_later)
    monkeypatch.setattr(warm.os, "cpu_count", lambda: 1)
    with pytest.raises(RuntimeError, match="thread"):
        begin([], [], [long, lambda: seen.append("another")])
    assert seen == ["over"]


@pytest.fixture
def told(monkeypatch):
    """What is asked of a run's warm-up and of its base, in order; and what was to be launched."""
    seen, asked, load = [], [], base.load_base

    def begin(launches):
        seen.append("begin")
        asked.append(launches)
        waits = {f"until_{name}": lambda name=name: seen.append(name) for name in ("scoring", "training")}
        return SimpleNamespace(**waits, end=lambda: seen.append("end"))

    monkeypatch.setattr(local, "warm_up", begin)
    monkeypatch.setattr(base, "load_base", lambda *given, **more: seen.append("load") or load(*given, **more))
    return seen, asked


def run(tmp_path, model, **sections):
    settings = {"lora": {"rank": 2, "dropout": 0.1}, "train": {"max_steps": 1}, **sections}
    device = {"kind": "cpu", "precision": "fp32"}
    cross_validate(
        data=str(CASES / "chat8.jsonl"), folds=2, device=device, output=tmp_path / "run", **model, **settings
    )


def test_a_run_begins_with_it_and_loads_its_base_meanwhile(told, tiny, tmp_path):
    run(tmp_path, {"model": str(tiny)})
    seen, asked = told
    assert seen[:3] == ["begin", "load", "scoring"] and seen[-1] == "end" and seen.count("training") == 1
    assert (asked[0].dtype, asked[0].norm_dtype) == (torch.float32, torch.float32)
    assert asked[0].dropout and asked[0].nested is None and asked[0].shape.vocab == 384


def test_a_run_that_is_interrupted_ends_it_and_norms_of_a_model_in_memory_are_as_found(
    told, tiny, tmp_path, plain, monkeypatch
):
    def interrupt(*_):
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(resources, "settle_plan", interrupt)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data = weight.data.float()
    with pytest.raises(Interrupted):
        run(tmp_path, {"model": model, "tokenizer": plain}, lora={"rank": 2})
    seen, asked = told
    assert seen == ["begin", "end"]
    assert (asked[0].dtype, asked[0].norm_dtype, asked[0].dropout) == (torch.bfloat16, torch.float32, False)
