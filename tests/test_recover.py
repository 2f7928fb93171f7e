"""Out of memory, injected wherever something is allocated: nothing is lost, and nothing changes but the plan."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosstune.errors import DeviceError
from crosstune.memory.layout import Devices, Layout
from crosstune.model.attach import Slots
from crosstune.progress import Quiet
from crosstune.train import graph as graph_module
from crosstune.train import recover as recover_module
from crosstune.train import room as room_module
from crosstune.train import step as step_module
from crosstune.train import wave as wave_module
from crosstune.train.fault import WaveFault
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.recover import (
    LeakWatch,
    PlanChanged,
    compare_peak,
    is_out_of_memory,
    refuse_to_shrink,
    smaller_plan,
    survive,
)
from crosstune.train.run_wave import run_wave
from tests.lanes import Outcome, PlanOf, Shrinking, fold_job, fp32_base, random_tokens, same_adapter


class OutOfMemoryAt(TorchDispatchMode):
    """Raises at chosen allocations, counted within each phase of each step. Also counts them."""

    def __init__(self, wanted=()):
        super().__init__()
        self.wanted = set(wanted)
        self.seen = Counter()
        self.raised = []
        self.step, self.phase = 0, "setup"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not is_in_place(func):
            place = (self.step, self.phase)
            key = (*place, self.seen[place])
            self.seen[place] += 1
            if key in self.wanted and key not in self.raised:
                self.raised.append(key)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (injected)")
        return func(*args, **(kwargs or {}))


def is_in_place(func):
    """The operator's results are its arguments, or views of them, or no tensors: nothing is allocated."""
    returns = func._schema.returns
    return func.namespace == "profiler" or not returns or all(out.alias_info is not None for out in returns)


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


def train(base, monkeypatch, mode=None, plan=None, changes=None):
    """Three lanes to their end. `changes`: step → plan that is taken before it, without an error."""
    plan, changes = plan or Shrinking(), changes or {}
    tokens, outcome = random_tokens(), Outcome()
    jobs = [fold_job(base, fold, k=3, stop={"share": 0.2, "patience": 9}, keep="best", epochs=1) for fold in range(3)]
    real = {"loss": step_module.head_loss, "pass": graph_module.run_pass, "judge": LaneAdamW.judge,
            "score": wave_module.score_lanes, "train": wave_module.train_step}  # fmt: skip

    def entering(phase, function):
        def call(*args, **kwargs):
            if mode is not None:
                mode.phase = phase
            return function(*args, **kwargs)

        return call

    def loss(*args):
        out = entering("head", real["loss"])(*args)
        if mode is not None:
            mode.phase = "backward"
        return out

    with monkeypatch.context() as patch:
        patch.setattr(graph_module, "run_pass", entering("forward", real["pass"]))
        patch.setattr(step_module, "head_loss", loss)
        patch.setattr(LaneAdamW, "judge", entering("optimizer", real["judge"]))
        patch.setattr(wave_module, "score_lanes", entering("evaluation", real["score"]))
        patch.setattr(wave_module.Wave, "_train", stepping(wave_module.Wave._train, mode, changes))
        patch.setattr(room_module.Room, "_split", entering("split", room_module.Room._split))
        patch.setattr(wave_module.Wave, "_keep", entering("keep", wave_module.Wave._keep))
        patch.setattr(wave_module.Wave, "_finish", entering("finish", wave_module.Wave._finish))
        if mode is None:
            run_wave(base, jobs, tokens, plan, report=outcome.events.append, progress=Quiet())
        else:
            with mode:
                run_wave(base, jobs, tokens, plan, report=outcome.events.append, progress=Quiet())
    return outcome


def stepping(real, mode, changes):
    def call(self):
        if mode is not None:
            mode.step = self.standing.steps
        if (plan := changes.get(self.standing.steps)) is not None and self.room.plan != plan:
            self.room.take(plan)
        return real(self)

    return call


@pytest.fixture(scope="module")
def places(base):
    """Every allocation of an undisturbed run: (step, phase) → how many."""
    mode = OutOfMemoryAt()
    with pytest.MonkeyPatch.context() as patch:
        train(base, patch, mode)
    return {place: count for place, count in mode.seen.items() if place[1] != "setup"}


def test_every_phase_of_a_step_allocates(places):
    assert {phase for _, phase in places} == {
        "forward",
        "head",
        "backward",
        "optimizer",
        "evaluation",
        "keep",
        "finish",
    }


def same_results(one, other):
    for fold in range(3):
        assert same_adapter(one.lane(fold), other.lane(fold))
        assert one.lane(fold).losses == other.lane(fold).losses
        np.testing.assert_array_equal(one.lane(fold).scores.nll, other.lane(fold).scores.nll)


def check(base, monkeypatch, wanted):
    mode = OutOfMemoryAt(wanted)
    disturbed = train(base, monkeypatch, mode)
    assert len(mode.raised) == len(wanted)
    told = [event for event in disturbed.events if isinstance(event, PlanChanged)]
    assert len(told) == len(wanted)
    assert "injected" in told[0].message
    assert all(event.before != event.after for event in told)
    assert all(event.after == later.before for event, later in pairwise(told))
    # A step that failed is done again with the smaller plan; what fails after a step changes the next one.
    changes = {event.step: event.after for event in told}
    planned = train(base, monkeypatch, changes=changes)
    same_results(disturbed, planned)
    undisturbed = train(base, monkeypatch)
    for fold in range(3):
        np.testing.assert_allclose(disturbed.lane(fold).losses, undisturbed.lane(fold).losses, rtol=1e-4)


@pytest.mark.parametrize("phase", ["forward", "head", "backward", "optimizer", "evaluation", "keep", "finish"])
def test_the_result_is_that_of_a_run_that_changes_its_plan_at_the_same_step(base, monkeypatch, places, phase):
    draw = random.Random(phase)
    step = draw.choice([s for s, p in places if p == phase])
    check(base, monkeypatch, [(step, phase, draw.randrange(places[step, phase]))])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_so_it_is_at_every_phase_of_every_step(base, monkeypatch, places, seed):
    for step, phase in sorted(places):
        check(base, monkeypatch, [(step, phase, random.Random(f"{seed}{step}{phase}").randrange(places[step, phase]))])


def test_memory_may_run_out_again_and_again(base, monkeypatch, places):
    steps = sorted({step for step, phase in places if phase == "backward"})
    check(base, monkeypatch, [(steps[0], "forward", 3), (steps[1], "backward", 2), (steps[2], "head", 1)])


def test_copies_of_the_base_go_before_the_plan_shrinks(base, monkeypatch, places):
    undisturbed = train(base, monkeypatch)
    kept, real = [], Slots.keep_weights
    monkeypatch.setattr(Slots, "keep_weights", lambda self, keep: (kept.append(keep), real(self, keep)))
    monkeypatch.setattr(Shrinking, "smaller", lambda self: replace(self, copies=False))
    mode = OutOfMemoryAt([(1, "backward", 2)])
    disturbed = train(base, monkeypatch, mode, Shrinking(copies=True))
    (told,) = (event for event in disturbed.events if isinstance(event, PlanChanged))
    assert kept == [True, False]
    assert told.after == replace(told.before, copies=False)
    assert str(told) == f"out of memory in a training step after step 1: going on with {told.after}"
    same_results(undisturbed, disturbed)


def test_when_nothing_is_left_the_error_says_what_to_do(base, monkeypatch):
    mode = OutOfMemoryAt()
    mode.wanted = Always()
    with pytest.raises(
        DeviceError, match="out of memory in a training step, with nothing left to make smaller"
    ) as error:
        train(base, monkeypatch, mode)
    assert "data.max_tokens" in error.value.fix  # a single lane was tried before


class Always:
    """Memory is out in every forward pass."""

    def __contains__(self, key):
        return key[1] == "forward"


def test_after_an_error_the_next_wave_runs_as_if_nothing_had_been(base, monkeypatch):
    first = train(base, monkeypatch)
    mode = OutOfMemoryAt()
    mode.wanted = Always()
    with pytest.raises(DeviceError):
        train(base, monkeypatch, mode)
    same_results(first, train(base, monkeypatch))


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_so):
    assert is_out_of_memory(error) == is_so


def test_memory_that_runs_out_for_good_is_an_error_with_its_fix_and_holds_no_tensor():
    def told(error):
        def fail():
            raise error

        survive(fail, refuse_to_shrink, torch.device("cpu"))

    with pytest.raises(DeviceError, match="out of memory: CUDA out of memory") as error:
        told(torch.OutOfMemoryError("CUDA out of memory. (injected)"))
    assert "device.lanes" in error.value.fix
    assert error.value.__context__ is None and error.value.__cause__ is None
    with pytest.raises(RuntimeError, match="shape mismatch"):
        told(RuntimeError("shape mismatch"))


def test_other_errors_are_not_swallowed(base, monkeypatch):
    monkeypatch.setattr(step_module, "head_loss", lambda *args: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    with pytest.raises(WaveFault, match="shape mismatch"):
        run_wave(base, [fold_job(base, 0)], random_tokens(), Shrinking(), report=lambda event: None, progress=Quiet())


def test_a_real_plan_shrinks_until_the_error():
    from tests.test_memory_plan import plan

    found = plan("h200", model={"name": "x", "quantization": "nf4"})
    with pytest.raises(DeviceError, match="nothing left to make smaller"):
        for _ in range(99):
            found = smaller_plan(found, "a training step", evaluating=False)
    with pytest.raises(DeviceError, match="nothing left to make smaller"):
        for _ in range(99):
            found = smaller_plan(found, "an evaluation", evaluating=True)


@pytest.mark.parametrize(
    ("then", "now", "share", "told"),  # GiB of other programs, and what the run held of its plan's peak
    [
        (0, 0, 1.0, ""), (0, 0, 0.9, "-10%"), (0, 0, 1.1, "+10%"),
        (100, 100, 1.0, ""), (100, 100, 0.9, "-10%"), (100, 100, 1.1, "+10%"),
        (100, 0, 1.0, ""), (100, 40, 0.9, "-10%"), (0, 100, 1.0, "+"),
        (-10, 0, 1.0, ""),  # a context smaller than assumed
    ],
)  # fmt: skip
def test_the_peak_is_compared_with_the_plan_without_what_other_programs_held_all_along(
    then, now, share, told, monkeypatch
):
    from tests.test_memory_plan import plan

    found = plan("h200", model={"name": "x", "quantization": "nf4"})
    machine = found.job.machine
    found = replace(found, free_bytes=machine.total_bytes - (then << 30))
    monkeypatch.setattr(recover_module, "used_bytes", lambda _: (now << 30) + int(share * found.peak_bytes))
    monkeypatch.setattr(recover_module, "outside_allocator", lambda _: (now << 30) + machine.context_bytes)
    hint = compare_peak(found, torch.device("cuda"))
    assert told in hint if told else not hint
    assert ("other programs" in hint) == ("+" in told)


def test_the_peak_of_a_cpu_and_of_a_spread_base_is_compared_with_nothing(monkeypatch):
    from tests.test_memory_plan import plan

    found = plan("h200", model={"name": "x", "quantization": "nf4"})
    spread = Layout(Devices(("cuda:0", "cuda:1"), (found.free_bytes,) * 2, "cuda"), (found.free_bytes,) * 2, (16, 16))
    monkeypatch.setattr(recover_module, "used_bytes", lambda _: 2 * found.peak_bytes)
    monkeypatch.setattr(recover_module, "outside_allocator", lambda _: found.job.machine.context_bytes)
    assert compare_peak(found, torch.device("cuda"))
    assert not compare_peak(found, torch.device("cpu"))
    assert not compare_peak(replace(found, layout=spread), torch.device("cuda"))


def test_a_leak_is_told_once_with_the_tensors_that_grew():
    said, kept = [], []
    watch = LeakWatch(torch.device("cpu"), said.append)
    for _ in range(5):
        kept.append(torch.ones(1 << 20))
        watch.wave_ended()
    assert len(said) == 1
    assert "memory-leak" in said[0]
    assert "[1048576] float32 (+" in said[0]
    assert all(later - earlier == 4 << 20 for earlier, later in pairwise(watch.after))


def test_no_leak_is_told_where_there_is_none(base):
    said = []
    watch = LeakWatch(torch.device("cpu"), said.append)
    for fold in range(4):
        run_wave(base, [fold_job(base, fold)], random_tokens(), PlanOf(), report=lambda event: None, progress=Quiet())
        watch.wave_ended()
    assert not said
    assert len(set(watch.after[1:])) == 1  # case M01: to the byte


def test_on_a_gpu_cycles_are_collected_only_where_more_is_held_than_after_the_wave_before(monkeypatch):
    held, collected, said = iter([100, 100, 300, 100, 100, 260, 250]), [], []
    now = {"bytes": 0}

    def collect(device):
        collected.append(len(watch.after))
        now["bytes"] = next(held) << 20

    monkeypatch.setattr(recover_module, "live_bytes", lambda device: now["bytes"])
    monkeypatch.setattr(recover_module, "release", collect)
    monkeypatch.setattr(recover_module, "live_tensors", lambda kind: Counter())
    watch = LeakWatch(torch.device("cuda"), said.append)
    for _ in range(5):
        now["bytes"] = next(held) << 20
        watch.wave_ended()
    assert collected == [2, 4]  # 300 MiB after the third wave, 260 after the fifth
    assert watch.after == [count << 20 for count in (100, 100, 100, 100, 250)]


def test_case_m01_nothing_of_a_wave_outlives_it(base):
    """Weak references to what a wave trains with are dead before the next one takes its first step."""
    import weakref

    dead, refs = [], []
    real_start, real_init = wave_module.train_step, LaneAdamW.__init__

    def remember(self, *args):
        real_init(self, *args)
        refs.append(
            [weakref.ref(self), weakref.ref(self.m_KP), weakref.ref(self.slots), weakref.ref(self.slots.master_KP)]
        )

    def look(slots, optimizer, *args):
        dead.append([ref() is None for wave in refs[:-1] for ref in wave])
        return real_start(slots, optimizer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaneAdamW, "__init__", remember)
        patch.setattr(wave_module, "train_step", look)
        for fold in range(4):
            run_wave(
                base, [fold_job(base, fold)], random_tokens(), PlanOf(), report=lambda event: None, progress=Quiet()
            )
    assert len(refs) == 4
    assert all(all(step) for step in dead)


def test_the_base_is_scored_as_wide_as_the_plan_says_and_narrower_where_memory_runs_out(base, monkeypatch):
    from crosstune.train import evaluate

    tokens, real, widths, told = random_tokens(), evaluate.head_loss, [], []
    whole = evaluate.score_base(base, tokens, range(24))

    def limited(base, hidden, *given):
        widths.append(hidden.shape[0] * hidden.shape[1])
        if widths[-1] > 100 and len(widths) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return real(base, hidden, *given)

    monkeypatch.setattr(evaluate, "head_loss", limited)
    found = evaluate.score_base(base, tokens, range(24), tick=told.append, most_tokens=240)
    assert max(widths) <= 240 and widths[-1] <= 100
    assert sum(told) == 24
    np.testing.assert_allclose(found.nll, whole.nll, rtol=1e-5)
    monkeypatch.setattr(evaluate, "head_loss", lambda *given: (_ for _ in ()).throw(torch.OutOfMemoryError("gone")))
    with pytest.raises(DeviceError, match="evaluation of the base, of one row of 30 tokens"):
        evaluate.score_base(base, tokens, range(24))
