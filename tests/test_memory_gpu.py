"""On a GPU: memory runs out for real, fp16 lanes overflow alone, one GPU is touched and no other."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from crosstune.model.base import load_base
from crosstune.model.device import choose_device, free_bytes, machine_of, used_bytes
from crosstune.recipe.sections import Device, Model
from crosstune.train import wave as wave_module
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.recover import PlanChanged
from tests.lanes import Shrinking, fold_job, random_tokens, run, same_adapter

pytestmark = pytest.mark.gpu


def base_of(tiny, precision):
    return load_base(Model(name=str(tiny)), None, device=torch.device("cuda", 0), precision=precision)


def before_step(patch, at, act):
    """Call `act` once, right before optimizer step `at`, with nothing cached."""
    real = wave_module.Wave._train

    def train(self):
        if self.standing.steps == at and not hasattr(self, "acted"):
            self.acted = True
            torch.cuda.empty_cache()
            act()
        return real(self)

    patch.setattr(wave_module.Wave, "_train", train)


def test_a_real_out_of_memory_is_survived(tiny, monkeypatch):
    base = base_of(tiny, "bf16")
    tokens = random_tokens(48, longest=1500)
    jobs = [fold_job(base, fold, k=3, num_rows=48, batch_size=16, epochs=1) for fold in range(3)]
    wide = Shrinking(micro_batch=16, evaluate_tokens=8192, recorded=0)  # a replayed pass allocates nothing
    narrow = Shrinking(micro_batch=4, evaluate_tokens=8192, recorded=0)

    def room_of(plan):
        """What is reserved at most from the second step on, beyond what is then."""
        found = []

        def note():
            torch.cuda.reset_peak_memory_stats()
            found.append(torch.cuda.memory_reserved())

        with monkeypatch.context() as patch:
            before_step(patch, 1, note)
            run_of_plan = run(base, jobs, tokens, plan)
        return torch.cuda.max_memory_reserved() - found[0], run_of_plan

    (needed, _), (wanted, free_run) = room_of(narrow), room_of(wide)
    assert needed < 0.7 * wanted

    def starve():
        room, total = (needed + wanted) // 2, torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)

    try:
        with monkeypatch.context() as patch:
            before_step(patch, 1, starve)
            starved = run(base, jobs, tokens, wide)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any(isinstance(event, PlanChanged) for event in starved.events)
    for fold in range(3):
        np.testing.assert_allclose(starved.lane(fold).losses, free_run.lane(fold).losses, rtol=2e-2)
    assert "out of memory" in next(e.message for e in starved.events if isinstance(e, PlanChanged)).lower()


def test_one_lane_overflows_in_fp16_and_the_others_do_not_notice(tiny, monkeypatch):
    base = base_of(tiny, "fp16")
    tokens = random_tokens()
    jobs = [fold_job(base, fold, k=5, epochs=3) for fold in range(5)]
    calm = run(base, jobs, tokens)
    real = LaneAdamW.__init__

    def overflowing(self, *args):
        real(self, *args)
        self.scale_K[2] = 2.0**30

    scales = []
    real_judge = LaneAdamW.judge

    def judge(self, *args):
        scales.append(self.scale_K.tolist())
        return real_judge(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LaneAdamW, "__init__", overflowing)
        patch.setattr(LaneAdamW, "judge", judge)
        disturbed = run(base, jobs, tokens)
    assert scales[-1][2] < 2.0**30  # halved until its gradient is finite
    assert all(scale == scales[0][0] for step in scales for lane, scale in enumerate(step) if lane != 2)
    for fold in (0, 1, 3, 4):
        assert same_adapter(calm.lane(fold), disturbed.lane(fold))
        assert calm.lane(fold).losses == disturbed.lane(fold).losses


def test_what_the_device_says_of_itself():
    place = choose_device(Device(kind="cuda"))
    assert place.machine.total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert place.precision.value == ("bf16" if place.machine.capability >= (8, 0) else "fp16")
    assert 0 < free_bytes(place.device) <= place.machine.total_bytes + machine_of(place.device).context_bytes
    assert used_bytes(place.device) >= torch.cuda.memory_reserved()


TOUCH = """
from crosstune.memory.visible import choose_gpu
print(choose_gpu("cuda", [1]).index)
import torch, os
torch.ones(1 << 20, device="cuda").sum().item()
import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    print(index, os.getpid() in pids, pynvml.nvmlDeviceGetMemoryInfo(handle).used)
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_only_the_gpu_asked_for_is_touched():
    import pynvml

    pynvml.nvmlInit()
    idle = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used
    done = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True, check=True)
    chosen, first, second = done.stdout.splitlines()[:3]
    assert chosen == "1"
    assert int(first.split()[2]) <= idle + (16 << 20)
    assert int(second.split()[2]) > 200 << 20
