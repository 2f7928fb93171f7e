"""A base spread over devices trains lanes to what one device gives.

On a computer without GPUs both places are the CPU: each has its own flat tensors, optimizer and pass, which is all that
several devices differ in but the copies between them.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import crosstune
from crosstune import resources
from crosstune.errors import DeviceError
from crosstune.memory.block import Settings
from crosstune.memory.gpus import GIB
from crosstune.memory.layout import Devices, Layout, room_for
from crosstune.memory.shape import ModelShape
from crosstune.model.attach import attached
from crosstune.model.base import load_base
from crosstune.model.device import choose_device
from crosstune.model.shards import put
from crosstune.model.spread import device_map, empty_model
from crosstune.progress import Quiet
from crosstune.recipe.sections import Device, Model
from crosstune.train.checkpoint import Checkpoints
from crosstune.train.generate import Prompt, Sampling, begin, generate_lanes
from crosstune.train.run_wave import run_wave
from crosstune.train.spread_optimizer import SpreadAdamW, lane_adamw
from crosstune.train.state import Standing, pack_wave, unpack_wave
from tests.lanes import Outcome, PlanOf, fold_job, random_tokens, run
from tests.tiny import CASES, make_tiny

MUCH = 1 << 30


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("four") / "layers", layers=4, tie=request.param)


def load(folder, devices=("cpu",), kind="balanced", precision="fp32", counts=(2, 2), room=None):
    """The model with so many layers on each device."""
    layout = None
    if len(devices) > 1:
        shape, settings = ModelShape.read(folder), Settings(3, 2, 30, precision=precision)
        room = room or room_for(shape, settings, counts)
        layout = Layout(Devices(devices, (MUCH,) * len(devices), kind), room, counts)
    base = load_base(Model(name=str(folder)), None, device=torch.device(devices[0]), precision=precision, layout=layout)
    if layout is not None:
        places = [base.place_of(f"model.layers.{layer}") for layer in range(4)]
        assert places == [place for place, count in enumerate(counts) for _ in range(count)]
    return base


def jobs_of(base, **options):
    targets = {"targets": [*"qkvo", "gate", "up", "down"]}
    targets = {"targets": [f"{name}_proj" for name in targets["targets"]]}
    return [fold_job(base, fold, k=3, lora={"dropout": 0.1, **targets}, **options) for fold in range(3)]


def same_training(one, other, rtol=1e-5):
    for fold in range(3):
        np.testing.assert_allclose(one.lane(fold).losses, other.lane(fold).losses, rtol=rtol)
        np.testing.assert_allclose(one.lane(fold).scores.nll, other.lane(fold).scores.nll, rtol=rtol, atol=1e-5)
        assert list(one.lane(fold).adapter) == list(other.lane(fold).adapter)
        for name, tensor in one.lane(fold).adapter.items():
            torch.testing.assert_close(tensor, other.lane(fold).adapter[name], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_lanes_over_two_places_are_those_of_one(folder, checkpointed):
    plan = PlanOf(checkpointed_layers=checkpointed)
    outcomes = []
    for devices in (("cpu",), ("cpu", "cpu")):
        base = load(folder, devices)
        outcomes.append(
            run(base, jobs_of(base, keep="best", stop={"share": 0.2, "patience": 9}), random_tokens(), plan)
        )
    same_training(*outcomes)


def test_a_head_with_adapters_follows_too(folder):
    outcomes = []
    for devices in (("cpu",), ("cpu", "cpu")):
        base = load(folder, devices)
        if base.spread is not None:  # untied: the last layers' place; tied: that of the embeddings, the first
            assert base.place_of("lm_head") == (0 if base.model.config.tie_word_embeddings else 1)
        job = [fold_job(base, fold, k=3, lora={"targets": ["q_proj", "lm_head"]}) for fold in range(3)]
        outcomes.append(run(base, job, random_tokens()))
    same_training(*outcomes)


def test_accelerates_own_map_is_taken(folder):
    """Blocks stay whole, and places are those of accelerate, but for tables that have no weights."""
    from accelerate import infer_auto_device_map
    from transformers import AutoConfig

    model = empty_model(AutoConfig.from_pretrained(folder), torch.float32)
    total = sum(parameter.nbytes for parameter in model.parameters())
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    for room in ((total, total, total), (total // 2, total // 3, total), (total // 3, total // 4, total)):
        theirs = infer_auto_device_map(
            model,
            {0: room[0] + max(block, model.lm_head.weight.nbytes), 1: room[1], 2: room[2]},  # what they keep free
            no_split_module_classes=["LlamaDecoderLayer"],
            dtype=torch.float32,
        )
        for name, place in device_map(model, room, dtype=torch.float32).items():
            parent = next(
                key for key in sorted(theirs, key=len, reverse=True) if not key or f"{name}.".startswith(f"{key}.")
            )
            assert place == theirs[parent] or name.endswith("rotary_emb")


def test_what_does_not_fit_is_refused_by_name_and_not_off_loaded(folder):
    with pytest.raises(DeviceError, match=r"device\.layers: no GPU has room for") as error:
        load(folder, ("cpu", "cpu"), kind="sequential", room=(60_000, 60_000))
    assert "device.offload: cpu" in error.value.fix


def test_a_checkpoint_holds_the_same_bytes_whatever_the_spreading(folder):
    packed = []
    for devices in (("cpu",), ("cpu", "cpu")):
        base = load(folder, devices)
        jobs = jobs_of(base)
        with attached(base, [job.spec for job in jobs]) as slots:
            optimizer = lane_adamw(slots, [job.train for job in jobs])
            rows = torch.randn(3, slots.size, generator=torch.Generator().manual_seed(1))
            for k in range(3):
                slots.put_row(k, rows[k])
                torch.testing.assert_close(slots.row(k), rows[k], rtol=0, atol=0)
            for part, shard in zip(optimizer.parts, slots.shards, strict=True):
                part.m_KP.copy_(shard.master_KP)
            packed.append((slots.adapter(1), *pack_wave(slots, optimizer, [], Standing(steps=3))))
            # and what one kind has written, the other takes
            assert unpack_wave(slots, optimizer, [], packed[0][1:]) is not None
            assert all(torch.equal(slots.row(k), rows[k]) for k in range(3))
    (adapter, tensors, meta), (adapter2, tensors2, meta2) = packed
    assert json.dumps(meta) == json.dumps(meta2)
    assert list(tensors) == list(tensors2)
    assert all(torch.equal(tensors[name], tensors2[name]) for name in tensors)
    assert all(torch.equal(adapter[name], adapter2[name]) for name in adapter)


def test_clipping_and_skipping_are_decided_once_for_all_shards(folder):
    norms = []
    for devices in (("cpu",), ("cpu", "cpu")):
        base = load(folder, devices)
        jobs = jobs_of(base, max_grad_norm=0.3)
        with attached(base, [job.spec for job in jobs]) as slots:
            optimizer = lane_adamw(slots, [job.train for job in jobs])
            assert isinstance(optimizer, SpreadAdamW) == (len(devices) > 1)
            gradient = torch.randn(3, slots.size, generator=torch.Generator().manual_seed(2))
            gradient[1, -5] = torch.inf  # in the last shard alone
            for k in range(3):
                place = [shard.grad_KP[k] for shard in slots.shards]
                put(gradient[k], place, slots.spans)
            before = [slots.row(k) for k in range(3)]
            norm, ok = optimizer.step(torch.zeros(3), [1e-2] * 3, torch.tensor([True] * 3))
            assert ok.tolist() == [True, False, True]
            assert torch.equal(slots.row(1), before[1]) and not torch.equal(slots.row(0), before[0])
            norms.append((norm, torch.stack([slots.row(k) for k in range(3)])))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-7)


def test_a_run_goes_on_from_its_checkpoint_with_another_spreading(folder, tmp_path):
    class Stop(Exception):
        pass

    whole = run(load(folder), jobs_of(load(folder)), random_tokens())

    def kept():
        from crosstune.interrupt import Interrupts

        return Checkpoints(tmp_path / "kept", 1, Interrupts(), lambda text: None)

    class Ended(Quiet):
        steps = 0

        def advance(self, n=1, **facts):
            self.steps += "losses" in facts
            if self.steps == 3:
                raise Stop

    base = load(folder)
    with pytest.raises(Stop):
        run_wave(
            base,
            jobs_of(base),
            random_tokens(),
            PlanOf(),
            report=lambda event: None,
            progress=Ended(),
            checkpoints=(first := kept()),
        )
    first.wait()
    base, outcome = load(folder, ("cpu", "cpu")), Outcome()
    run_wave(
        base,
        jobs_of(base),
        random_tokens(),
        PlanOf(),
        report=outcome.events.append,
        progress=Quiet(),
        checkpoints=kept(),
    )
    same_training(whole, outcome)


def test_the_base_is_as_it_was_afterwards(folder):
    base = load(folder, ("cpu", "cpu"))
    before, names = base.digest(), [name for name, _ in base.model.named_modules()]
    run(base, jobs_of(base), random_tokens())
    assert (base.digest(), [name for name, _ in base.model.named_modules()]) == (before, names)


def test_lanes_write_the_same_answers(folder):
    found = []
    for devices in (("cpu",), ("cpu", "cpu")):
        base = load(folder, devices)
        jobs = jobs_of(base)
        with attached(base, [job.spec for job in jobs]) as slots:
            rows = 0.3 * torch.randn(3, slots.size, generator=torch.Generator().manual_seed(3))
            for k in range(3):
                slots.put_row(k, rows[k])
            slots.refresh()
            draw = np.random.default_rng(0)
            prompts = [Prompt(at, at + 1, draw.integers(0, 360, 5 + at).astype(np.int32)) for at in range(4)]
            found.append(generate_lanes(begin(slots), [prompts] * 3, Sampling(8), pad_id=364, stop_ids=(368,)))
    assert found[0] == found[1]


def test_a_whole_cross_validation_over_two_places(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSTUNE_CACHE", "")
    place = choose_device(Device(kind="cpu"))
    losses = []
    for name, way in (("one", None), ("two", Devices(("cpu", "cpu"), (2 * GIB, 2 * GIB)))):
        monkeypatch.setattr(resources, "_choose_place", lambda asked, way=way: replace(place, ways=(way,)))
        result = crosstune.cross_validate(
            data=str(CASES / "chat8.jsonl"), model=str(folder), output=str(tmp_path / name), folds={"k": 2},
            train={"epochs": 1, "batch_size": 4}, evaluate={"metrics": ["loss", "exact_match"]}, progress=Quiet(),
        )  # fmt: skip
        losses.append(result.mean)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    told = [json.loads(line) for line in (tmp_path / "two" / "journal.jsonl").read_text().splitlines()]
    assert not [event for event in told if event["event"] == "lane_failed"]


@pytest.mark.parametrize(
    ("device", "sections", "words"),
    [
        ({"layers": "balanced"}, {"kind": "cpu"}, "device.layers: balanced is about GPUs, and device.kind is cpu"),
        ({"layers": "balanced", "ray": "auto"}, {}, "device.layers: balanced, and device.ray gives each worker one GPU"),
        ({"layers": "sequential"}, {}, "device.layers: sequential spreads the base over several GPUs, and there is no GPU"),
        ({"offload": "cpu"}, {"quantization": "nf4"}, "device.offload: cpu with model.quantization: nf4"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_said_by_name(folder, monkeypatch, device, sections, words):
    from crosstune.interrupt import Interrupts
    from crosstune.memory import visible
    from crosstune.recipe.asked import gather
    from crosstune.resources import open_workers

    if torch.cuda.is_available():
        pytest.skip("about a computer without a GPU")
    monkeypatch.setattr(visible, "present_gpus", list)
    device = {**device, **({"kind": "cpu"} if "kind" in sections else {})}
    model = {"name": str(folder), "quantization": sections.get("quantization", "none")}
    asked = gather({"model": model, "data": "x.jsonl", "device": device}, sections={})
    with pytest.raises(DeviceError, match=re.escape(words)):
        open_workers(asked, None, Quiet(), Interrupts())


def test_auto_on_a_computer_without_gpus_is_the_cpu(folder, monkeypatch):
    from crosstune.memory import visible
    from crosstune.recipe.asked import gather
    from crosstune.resources import _choose_place

    monkeypatch.setattr(visible, "present_gpus", list)
    if torch.cuda.is_available():
        pytest.skip("about a computer without a GPU")
    asked = gather({"model": str(folder), "data": "x.jsonl", "device": {"layers": "auto"}}, sections={})
    assert _choose_place(asked).ways == (None,)


# — on GPUs —

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("checkpointed", [0, 3])
def test_a_gpu_and_the_cpu_give_what_the_gpu_gives(folder, checkpointed):
    plan, outcomes = PlanOf(checkpointed_layers=checkpointed), []
    for devices in (("cuda:0",), ("cuda:0", "cpu")):
        base = load(folder, devices)
        if len(devices) > 1:
            assert {parameter.device.type for parameter in base.model.parameters()} == {"cuda", "cpu"}
        outcomes.append(run(base, jobs_of(base), random_tokens(), plan))
    same_training(*outcomes, rtol=1e-4)


@pytest.mark.gpu
@needs_two
@pytest.mark.parametrize(("kind", "counts"), [("balanced", (2, 2)), ("sequential", (3, 1))])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus_give_what_one_gives(folder, kind, counts, precision):
    outcomes = []
    for devices in (("cuda:0",), ("cuda:0", "cuda:1")):
        base = load(folder, devices, kind=kind, counts=counts, precision=precision)
        if len(devices) > 1:
            assert {parameter.device.index for parameter in base.model.parameters()} == {0, 1}
        outcomes.append(run(base, jobs_of(base), random_tokens()))
    for fold in range(3):
        rtol = 1e-4 if precision == "fp32" else 2e-2
        np.testing.assert_allclose(outcomes[0].lane(fold).losses, outcomes[1].lane(fold).losses, rtol=rtol)
    if precision == "fp32":
        same_training(*outcomes, rtol=1e-4)


ONE_OF_TWO = """
import sys
import crosstune
result = crosstune.cross_validate(data=sys.argv[1], model=sys.argv[2], output=sys.argv[3], folds={"k": 2},
                                  train={"epochs": 1}, device={"gpus": [1]})
import pynvml
pynvml.nvmlInit()
print("USED", *(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used for gpu in (0, 1)))
"""


@pytest.mark.gpu
@needs_two
def test_gpu_1_alone_is_touched(folder, tmp_path):
    """By NVML: the other GPU's used bytes are the same while the process still holds its own."""
    import subprocess
    import sys

    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    before = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used for gpu in (0, 1)]
    command = [sys.executable, "-c", ONE_OF_TWO, str(CASES / "chat8.jsonl"), str(folder), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = [int(word) for word in done.stdout.split("USED")[1].split()]
    assert abs(used[0] - before[0]) < 16 << 20
    assert used[1] - before[1] > 200 << 20
