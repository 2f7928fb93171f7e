"""Flat passes, without padding, compute what even ones do: lanes apart, rows apart, dropout and scores the same."""

import random

import numpy as np
import pytest
import torch

from crosstune.data.batches import PassSize, collate
from crosstune.data.flat import ALIGNED, collate_flat, cut_flat, flat_size
from crosstune.model import block
from crosstune.model.attach import Slots, attached
from crosstune.model.base import load_base
from crosstune.model.lanes import Lanes
from crosstune.recipe.sections import Model
from crosstune.train import cutting
from crosstune.train import wave as wave_module
from crosstune.train.cutting import Cutting, choose_cutting
from crosstune.train.evaluate import score_base, score_lanes
from crosstune.train.lane import Lane
from crosstune.train.step import DeviceBatch, run_pass
from tests.lanes import PlanOf, fold_job, fp32_base, random_tokens, run, tokens_of

UNITS = [[(0,), (1,)], [(2,), (5, 6)], [(3,)]]


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


@pytest.fixture(autouse=True)
def _fused(monkeypatch):
    monkeypatch.setitem(block.FUSED_ON, "cpu", True)
    monkeypatch.setitem(cutting.FLAT_ON, "cpu", True)


def gradients(base, batch, dropout=0.0, poison=None):
    jobs = [fold_job(base, fold, k=3, lora={"dropout": dropout}) for fold in range(3)]
    with attached(base, [job.spec for job in jobs]) as slots:
        slots.master_KP.add_(torch.randn(slots.master_KP.shape, generator=torch.Generator().manual_seed(0)) * 0.05)
        if poison is not None:
            slots.master_KP[poison] = torch.inf
        slots.refresh()
        loss_K = run_pass(slots, DeviceBatch.of(batch, base.device))
        return loss_K, slots.grad_KP.clone()


def flat(tokens, units_K=UNITS, *, more=0, dropout_K=None, longest=30):
    needed = flat_size(tokens, units_K, longest)
    size = PassSize(needed.rows + more, needed.width + 64 * more, needed.targets + 3 * more, longest)
    return collate_flat(tokens, units_K, weights_K=[0.1, 0.2, 0.3], dropout_K=dropout_K, size=size)


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_and_gradients_are_those_of_an_even_pass(base, dropout, more):
    tokens = random_tokens()
    keys = [(seed, 5) for seed in range(3)] if dropout else None
    apart = [[(row,) for unit in units for row in unit] for units in UNITS]  # an even pass would pack (5, 6) in one row
    even = gradients(base, collate(tokens, apart, weights_K=[0.1, 0.2, 0.3], dropout_K=keys), dropout)
    found = gradients(base, flat(tokens, more=more, dropout_K=keys), dropout)
    torch.testing.assert_close(found[0], even[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1], even[1], rtol=1e-4, atol=1e-6)


def test_nothing_crosses_lanes_even_where_one_is_not_finite(base):
    batch = flat(random_tokens())
    clean, poisoned = gradients(base, batch), gradients(base, batch, poison=1)
    assert not torch.isfinite(poisoned[0][1])
    for lane in (0, 2):
        assert torch.equal(clean[0][lane], poisoned[0][lane])
        assert torch.equal(clean[1][lane], poisoned[1][lane])


def test_a_lane_without_rows_in_a_pass_gets_no_gradient(base):
    loss_K, grad_KP = gradients(base, flat(random_tokens(), [[(0,)], [], [(3,)]]))
    assert loss_K[1] == 0 and not grad_KP[1].any()


def test_products_of_one_lane_at_a_time_ask_the_device_for_nothing():
    """`ends_K` on the meta device holds no numbers."""
    ends, draw = [5, 5, 12, 20], torch.Generator().manual_seed(0)
    lanes = Lanes(4, torch.empty(4, dtype=torch.int32, device="meta"), ends=ends)
    x_NI, m_KIO = (torch.randn(shape, generator=draw) for shape in ((20, 6), (4, 6, 3)))
    wide_NO = torch.zeros(20, 7)
    lanes.times_into(wide_NO[:, 2:5], x_NI, m_KIO)
    outer_KOI = torch.zeros(4, 3, 6)
    for token in range(20):
        lane = sum(token >= end for end in ends)
        y_O = x_NI[token] @ m_KIO[lane]
        torch.testing.assert_close(lanes.times(x_NI, m_KIO)[token], y_O)
        torch.testing.assert_close(wide_NO[token], torch.cat([torch.zeros(2), y_O, torch.zeros(2)]))
        outer_KOI[lane] += torch.outer(y_O, x_NI[token])
    torch.testing.assert_close(lanes.outer(lanes.times(x_NI, m_KIO), x_NI), outer_KOI)


@pytest.mark.parametrize("seed", range(10))
def test_a_step_is_cut_into_passes_that_hold_each_unit_once_and_are_of_like_size(seed):
    draw = random.Random(seed)
    lengths = np.array([draw.randint(20, 300) for _ in range(20)])
    units_K = [[(row,) for row in range(lane * 5, lane * 5 + draw.randint(1, 5))] for lane in range(4)]
    passes = cut_flat(units_K, lengths, 800)
    for lane, units in enumerate(units_K):
        assert sorted(unit for of_pass in passes for unit in of_pass[lane]) == sorted(units)
    held = [sum(int(lengths[row]) for units in of_pass for unit in units for row in unit) for of_pass in passes]
    assert max(held) <= 800
    total = sum(held) + ALIGNED * 20
    assert len(passes) <= total / 800 + 2 and max(held) - min(held) <= 300


def test_padding_forms_rows_of_its_own_no_longer_than_the_longest():
    batch = flat(random_tokens(), more=3)
    rows = np.diff(batch.cuts_R)
    assert batch.cuts_R[-1] == batch.ends_K[-1] == batch.ids_NT.shape[1]
    assert (rows >= 0).all() and rows.max() <= 30
    assert batch.num_tokens == sum(
        int(random_tokens().lengths[row]) for units in UNITS for unit in units for row in unit
    )


def cutting_of(base, tokens, **train):
    jobs = [fold_job(base, fold, k=3, **train) for fold in range(3)]
    with attached(base, [job.spec for job in jobs]) as slots:
        return choose_cutting(slots, [Lane.start(job, tokens) for job in jobs], tokens, 2)


def test_rows_of_one_length_stay_even_and_rows_of_many_lie_flat(base):
    one_length = tokens_of([[row] * 16 for row in range(24)])
    assert cutting_of(base, one_length) == Cutting(2, 1)
    found = cutting_of(base, random_tokens())
    assert found.most_tokens == 3 * 2 * 32 and found.longest == random_tokens().lengths.max()


def test_flat_passes_that_are_short_are_not_taken_where_only_even_ones_are_recorded(base, monkeypatch):
    """A flat pass here has some 60 tokens, padded to an even one 90."""
    tokens = random_tokens()
    monkeypatch.setattr(Slots, "is_recordable", lambda self, *, flat: not flat)
    for least, is_flat in ((0, True), (50, True), (200, False)):
        monkeypatch.setattr(cutting, "launch_of", lambda slots, *, lanes_apart, least=least: least)
        assert bool(cutting_of(base, tokens).most_tokens) == is_flat
    monkeypatch.setattr(Slots, "is_recordable", lambda self, *, flat: True)
    assert cutting_of(base, tokens).most_tokens


def test_flat_passes_compute_fewer_tokens_than_even_ones(base):
    draw = np.random.default_rng(0)
    tokens = tokens_of([draw.integers(0, 360, int(length)).tolist() for length in draw.lognormal(3.5, 0.8, 24) + 8])
    jobs = [fold_job(base, fold, k=3) for fold in range(3)]
    with attached(base, [job.spec for job in jobs]) as slots:
        lanes = [Lane.start(job, tokens) for job in jobs]
        wide = choose_cutting(slots, lanes, tokens, 4)
        assert wide.most_tokens
        computed = {
            name: sum(
                size.width * count * (1 if size.longest else 3 * size.rows)
                for size, count in cutting.sizes_of_wave(lanes, tokens, how).items()
            )
            for name, how in (("flat", wide), ("even", Cutting(4)))
        }
    real = sum(
        int(tokens.lengths[row]) for lane in lanes for step in range(lane.last_step) for (row,) in lane.units_at(step)
    )
    assert computed["even"] > 1.4 * real
    assert computed["flat"] < 1.2 * real  # 64 tokens a pass are much of these small ones


def test_a_wave_ends_with_the_same_adapters_and_scores(base, monkeypatch):
    tokens, jobs = random_tokens(), [fold_job(base, fold, k=3) for fold in range(3)]
    made, real = [], wave_module.train_step

    def train_step(slots, optimizer, lanes, batches, *given):
        made.extend(batches)
        return real(slots, optimizer, lanes, batches, *given)

    monkeypatch.setattr(wave_module, "train_step", train_step)
    found = run(base, jobs, tokens, PlanOf(micro_batch=2))
    assert made and all(batch.ends_K is not None for batch in made)
    monkeypatch.setitem(cutting.FLAT_ON, "cpu", False)
    even = run(base, jobs, tokens, PlanOf(micro_batch=2))
    for fold in range(3):
        np.testing.assert_allclose(found.lane(fold).losses, even.lane(fold).losses, rtol=1e-4)
        np.testing.assert_allclose(found.lane(fold).scores.nll, even.lane(fold).scores.nll, rtol=1e-4)


def test_the_bare_base_scores_the_same_in_fused_blocks_and_is_left_as_it_was(base, monkeypatch):
    tokens, before = random_tokens(), base.digest()
    kinds = [type(module) for module in base.model.modules()]
    found = score_base(base, tokens, range(24), most_tokens=200)
    monkeypatch.setitem(block.FUSED_ON, "cpu", False)
    own = score_base(base, tokens, range(24))
    np.testing.assert_allclose(found.nll, own.nll, rtol=1e-5)
    assert base.fused is None and base.digest() == before
    assert [type(module) for module in base.model.modules()] == kinds


@pytest.mark.parametrize("most_tokens", [40, 150, 4096])
def test_scores_do_not_depend_on_how_evaluation_is_batched(base, most_tokens, monkeypatch):
    tokens, jobs = random_tokens(), [fold_job(base, fold, k=3) for fold in range(3)]
    rows_K = [job.held_out for job in jobs]
    with attached(base, [job.spec for job in jobs]) as slots:
        slots.master_KP.add_(torch.randn(slots.master_KP.shape, generator=torch.Generator().manual_seed(0)) * 0.05)
        slots.refresh()
        found = score_lanes(slots, tokens, rows_K, most_tokens=most_tokens)
        monkeypatch.setitem(cutting.FLAT_ON, "cpu", False)
        even = score_lanes(slots, tokens, rows_K)
    for one, other in zip(found, even, strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)
        np.testing.assert_array_equal(one.hits, other.hits)
        np.testing.assert_allclose(one.nll, other.nll, rtol=1e-5)


def test_an_evaluation_copies_only_what_scoring_reads_to_the_device(base, monkeypatch):
    copied, real = [], DeviceBatch.of
    monkeypatch.setattr(DeviceBatch, "of", lambda *given: copied.append(real(*given)) or copied[-1])
    score_base(base, random_tokens(), range(24), most_tokens=200)
    assert len(copied) > 1 and all(batch.ends_K is not None and batch.spot_KS is None for batch in copied)


@pytest.mark.parametrize("lies_flat", [False, True])
@pytest.mark.parametrize("name", ["out", "down"])
def test_a_small_adapter_is_not_rounded_away_beside_a_large_residual(tiny, name, lies_flat):
    """In bf16 numbers near 12 are 1/16 apart. What a young adapter adds is far less: it must count on the average."""
    base = load_base(Model(name=str(tiny)), None, device=torch.device("cpu"), precision="bf16")
    draw, count = torch.Generator().manual_seed(0), 24_000
    with attached(base, [fold_job(base, fold, k=3, lora={"dropout": 0.0}).spec for fold in range(3)]) as slots:
        bundle = getattr(base.decoder_layers[0].parts, name)
        ends = [count // 2, count // 4 * 3, count]
        lanes = Lanes.flat(torch.tensor(ends, dtype=torch.int32), ends, count)
        slots.begin_pass(None, lanes if lies_flat else None)
        x_NI = torch.randn(1, bundle.inputs, generator=draw).abs().expand(count, -1).to(base.dtype).contiguous()
        x_NI += torch.randn(count, bundle.inputs, generator=draw).to(base.dtype)  # rows alike: what is added is, too
        h_NH = 12 * torch.randn(count, bundle.outputs, generator=draw).to(base.dtype)
        without, _ = bundle.forward(x_NI, None, h_NH)
        for _, layer in bundle.adapted:
            layer.adapters.copies[1].fill_(5e-3)
        added, low_NR = bundle.forward(x_NI, None, h_NH)
        wanted_NH = low_NR.float().sum(1, keepdim=True) * 5e-3
    found = (added.float() - without.float()).mean()
    assert wanted_NH.abs().mean() < 1 / 32  # less than half of a last bit
    assert abs(found - wanted_NH.mean()) < 0.15 * wanted_NH.mean().abs()
