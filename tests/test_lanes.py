"""What must be true of lanes (docs/architecture.md), each with an oracle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from crosstune.data.batches import collate
from crosstune.model import block, repeatable
from crosstune.model.attach import PEFT_PREFIX, attached
from crosstune.model.base import Base, load_base
from crosstune.model.initial import initial_a
from crosstune.recipe.sections import Model
from crosstune.train.cutting import Cutting
from crosstune.train.evaluate import score_base, score_lanes
from crosstune.train.lane import Lane, Status
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.step import DeviceBatch, run_pass, step_batches, train_step
from tests.lanes import PlanOf, fold_job, fp32_base, random_tokens, run, same_adapter

MIXED = [
    {"rank": 4, "dropout": 0.1},
    {"rank": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"], "rslora": True},
    {"rank": 2, "dropout": 0.3, "targets": ["down_proj"]},
    {"rank": 16, "dropout": 0.5, "alpha": 32},
]


@pytest.fixture(scope="module", params=["transformers' blocks", "fused blocks"])
def base(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Base]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(block.FUSED_ON, "cpu", request.param == "fused blocks")
        yield fp32_base(tiny)


@pytest.mark.parametrize("groups", [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 1, 0], [2]]], ids=str)
def test_lanes_together_equal_each_alone_with_dropout_and_mixed_ranks_and_targets(base, groups):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, lora=lora) for fold, lora in enumerate(MIXED)]
    together = run(base, jobs, tokens)
    for group in groups:
        apart = run(base, [jobs[fold] for fold in group], tokens)
        for fold in group:
            one, other = together.lane(fold), apart.lane(fold)
            np.testing.assert_allclose(one.losses, other.losses, rtol=1e-5)
            np.testing.assert_allclose(one.scores.nll, other.scores.nll, rtol=1e-5)
            for name, tensor in one.adapter.items():
                assert torch.linalg.norm(tensor - other.adapter[name]) <= 1e-4 * torch.linalg.norm(tensor)


def test_the_same_grouping_is_bit_identical_whatever_the_global_generators_did(base):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, lora=lora) for fold, lora in enumerate(MIXED)]
    first = run(base, jobs, tokens)
    torch.rand(1000), np.random.rand(1000)
    second = run(base, jobs, tokens)
    assert all(same_adapter(first.lane(fold), second.lane(fold)) for fold in range(4))
    assert all(first.lane(fold).losses == second.lane(fold).losses for fold in range(4))


@pytest.mark.parametrize("plan", [PlanOf(1), PlanOf(3), PlanOf(4), PlanOf(2, 1), PlanOf(2, 2)], ids=str)
def test_how_a_step_is_cut_into_passes_and_recomputed_changes_only_rounding(base, plan):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, lora=lora) for fold, lora in enumerate(MIXED)]
    usual, other = run(base, jobs, tokens), run(base, jobs, tokens, plan)
    for fold in range(4):
        np.testing.assert_allclose(usual.lane(fold).losses, other.lane(fold).losses, rtol=1e-5)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_exactly_the_checkpointed_layers_are_computed_twice(base, layers, monkeypatch):
    # attention, not the MLP: a recomputation stops as soon as it has all that was saved
    attend, calls = torch.nn.functional.scaled_dot_product_attention, []

    def count(*given, **options):
        calls.append(torch.is_inference_mode_enabled())
        return attend(*given, **options)

    for place in (torch.nn.functional, repeatable):  # transformers' attention, or ours
        monkeypatch.setattr(place, "scaled_dot_product_attention", count)
    run(base, [fold_job(base, 0, max_steps=1)], random_tokens(), PlanOf(4, layers))
    assert calls.count(False) == 2 + layers


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_lanes_loss_has_exactly_zero_gradient_on_the_other_lanes(base, lane):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, k=3, lora={"rank": 4, "dropout": 0.2}) for fold in range(3)]
    with attached(base, [job.spec for job in jobs]) as slots:
        with torch.no_grad():  # B away from zero, so that every path carries a gradient
            slots.master_KP.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
        weights = [0.0, 0.0, 0.0]
        weights[lane] = 1.0
        units = [[(row,) for row in job.train_rows[:2]] for job in jobs]
        batch = collate(tokens, units, weights_K=weights, dropout_K=[(job.seed, 0) for job in jobs])
        run_pass(slots, DeviceBatch.of(batch, base.device))
        for other in range(3):
            assert bool(slots.grad_KP[other].any()) == (other == lane)


def test_held_out_tokens_cannot_reach_the_lane_that_is_scored_on_them(base):
    """Other contents in the held-out rows leave the trained adapter bit-identical, whatever the other lanes see."""
    tokens, job = random_tokens(), fold_job(base, 1)
    other = random_tokens()
    for row in job.held_out:
        other.ids[other.starts[row] : other.starts[row + 1]] = 5
    assert same_adapter(run(base, [job], tokens).lane(1), run(base, [job], other).lane(1))


def test_an_untrained_lane_answers_as_the_base_and_a_reused_slot_starts_from_zero(base):
    tokens = random_tokens()
    jobs = [fold_job(base, fold) for fold in range(2)]
    rows = list(range(12))
    plain = score_base(base, tokens, rows)
    with attached(base, [job.spec for job in jobs]) as slots:
        fresh = slots.master_KP.clone()
        for scores in score_lanes(slots, tokens, [rows, rows]):
            np.testing.assert_allclose(scores.nll, plain.nll, rtol=1e-6)
        slots.master_KP.normal_(), slots.grad_KP.normal_()
        slots.reset({k: job.spec for k, job in enumerate(jobs)})
        assert torch.equal(slots.master_KP, fresh) and not slots.grad_KP.any()


def test_lanes_are_drawn_by_threads_as_one_after_another(base):
    specs = [fold_job(base, fold, lora=lora).spec for fold, lora in enumerate(MIXED)]
    with attached(base, specs) as slots:
        for site in slots.sites:
            a_KRI, b_KOR = slots.views(slots.master_KP, site)
            for k, spec in enumerate(specs):
                rank = spec.lora.rank if site.name in spec.targets else 0
                assert rank == 0 or torch.equal(a_KRI[k, :rank], initial_a(spec.seed, site, rank))
                assert not a_KRI[k, rank:].any()
            assert not b_KOR.any()


def test_lanes_values_are_drawn_where_they_lie_and_none_for_a_rehearsal(base, monkeypatch):
    drawn, real = [], torch.Tensor.uniform_

    def uniform(self, *args, **how):
        drawn.append(self.untyped_storage().data_ptr())
        return real(self, *args, **how)

    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    job = fold_job(base, 0)
    with attached(base, [job.spec] * 2) as slots:
        assert drawn == [slots.master_KP.untyped_storage().data_ptr()] * 2 * len(job.targets)
        slots.shards[0].master_KP = slots.shards[0].copy_KP = slots.master_KP.to("meta")
        slots.reset({0: job.spec})
        assert len(drawn) == 2 * len(job.targets)


def test_each_tensor_of_an_adapter_is_a_storage_of_its_own_so_that_writing_it_need_not_look_for_shared_ones(base):
    spec = fold_job(base, 0).spec
    with attached(base, [spec, fold_job(base, 1, lora=MIXED[3]).spec]) as slots:
        for k in range(2):
            slots.master_KP[k].normal_(generator=torch.Generator().manual_seed(k))
            tensors = slots.adapter(k)
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == len(tensors)
            rank = slots.specs[k].lora.rank
            for site in slots.sites:
                a_KRI, b_KOR = slots.views(slots.master_KP, site)
                name = f"{PEFT_PREFIX}{site.name}.lora"
                assert torch.equal(tensors[f"{name}_A.weight"], a_KRI[k, :rank])
                assert torch.equal(tensors[f"{name}_B.weight"], b_KOR[k, :, :rank])
                assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.gpu
def test_lanes_begin_on_a_gpu_as_on_the_cpu_whatever_its_stream_has_still_to_do(base, tiny):
    specs = [fold_job(base, fold % 4, lora=MIXED[fold % 4]).spec for fold in range(40)]
    there = load_base(Model(name=str(tiny)), None, device=torch.device("cuda"), precision="bf16")
    with attached(base, specs) as slots, torch.cuda.stream(torch.cuda.Stream()), attached(there, specs) as others:
        for _ in range(3):
            others.master_KP.normal_()
            torch.cuda._sleep(10**9)
            others.reset(dict(enumerate(specs)))
            assert torch.equal(others.master_KP.cpu(), slots.master_KP)


def test_padding_of_smaller_ranks_and_missing_targets_stays_zero(base):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, lora=lora, weight_decay=0.1) for fold, lora in enumerate(MIXED)]
    lanes = [Lane.start(job, tokens) for job in jobs]
    with attached(base, [job.spec for job in jobs]) as slots:
        used = torch.zeros_like(slots.master_KP, dtype=torch.bool)
        for site in slots.sites:
            a, b = slots.views(used, site)
            for k, job in enumerate(jobs):
                if site.name in job.targets:
                    a[k, : job.lora.rank], b[k, :, : job.lora.rank] = True, True
        optimizer = LaneAdamW(slots, [job.train for job in jobs])
        for _ in range(6):
            train_step(slots, optimizer, lanes, step_batches(lanes, tokens, [1.0] * 4, Cutting(2)))
            for lane in lanes:
                lane.step += 1
        assert slots.master_KP[used].count_nonzero() > 0.99 * used.sum()
        assert not slots.master_KP[~used].any() and not optimizer.m_KP[~used].any()


def test_the_base_is_byte_for_byte_the_same_after_a_wave_and_keeps_its_type(base):
    before, kind = base.digest(), {name: type(module) for name, module in base.model.named_modules()}
    run(base, [fold_job(base, fold) for fold in range(3)], random_tokens(), PlanOf(2, 2))
    assert base.digest() == before
    assert {name: type(module) for name, module in base.model.named_modules()} == kind
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_memory_is_flat_over_waves_to_the_byte(base):
    tokens = random_tokens()

    def live_bytes() -> int:
        gc.collect()
        tensors = {
            o.untyped_storage().data_ptr(): o.untyped_storage().nbytes() for o in gc.get_objects() if torch.is_tensor(o)
        }
        return sum(tensors.values())

    after = []
    for fold in range(5):
        run(base, [fold_job(base, fold % 4), fold_job(base, (fold + 1) % 4)], tokens)
        after.append(live_bytes())
    assert after[1:] == after[:1] * 4


def test_a_non_finite_lane_is_retired_and_the_others_are_bit_equal(base):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, lora={"dropout": 0.1}, epochs=3) for fold in range(4)]
    clean = run(base, jobs, tokens)
    calls = {"train": 0}

    def poison(module, inputs, output):
        if torch.is_grad_enabled() or not torch.is_inference_mode_enabled():
            calls["train"] += 1
            passes_a_step = 2  # batch_size 4, micro-batch 2
            if (calls["train"] - 1) // passes_a_step == 1:
                rows = output.shape[0] // 4
                output = output.clone()
                output[2 * rows : 3 * rows] *= torch.inf
        return output

    handle = base.model.get_input_embeddings().register_forward_hook(poison)
    try:
        poisoned = run(base, jobs, tokens)
    finally:
        handle.remove()
    assert [(event.job.fold, event.reason, event.step) for event in poisoned.retired] == [(2, "non-finite-loss", 2)]
    for fold in (0, 1, 3):
        assert poisoned.lane(fold).status is Status.DONE
        assert poisoned.lane(fold).losses == clean.lane(fold).losses
        assert same_adapter(poisoned.lane(fold), clean.lane(fold))
        assert np.array_equal(poisoned.lane(fold).scores.nll, clean.lane(fold).scores.nll)


def test_a_lanes_seed_depends_on_seed_and_fold_only(base):
    tokens = random_tokens()
    alone, late = (
        run(base, [fold_job(base, 2)], tokens),
        run(base, [fold_job(base, 0), fold_job(base, 2, trial=5)], tokens),
    )
    np.testing.assert_allclose(alone.lane(2).losses, late.lane(2, trial=5).losses, rtol=1e-5)
    other = run(base, [fold_job(base, 2, seed=12)], tokens).lane(2)
    assert other.losses != alone.lane(2).losses and not same_adapter(other, alone.lane(2))
