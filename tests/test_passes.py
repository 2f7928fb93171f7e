"""Which sizes of passes are recorded, and what padding a pass to one of them changes: nothing."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch

from crosstune.data.batches import PassSize, collate, pass_size, units_of_step
from crosstune.model.attach import attached
from crosstune.train.cutting import Cutting, sizes_of_wave
from crosstune.train.graph import MOST_GRAPHS, RECORDING, best_runs, choose_sizes
from crosstune.train.lane import Lane
from crosstune.train.optimizer import LaneAdamW
from crosstune.train.step import DeviceBatch, run_pass, step_batches, train_step
from tests.lanes import fold_job, fp32_base, random_tokens


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


LAUNCH = 100.0


def cost(tokens, uses, runs):
    """Tokens computed: those of recorded runs padded to their largest; others at least what their launch takes."""
    total = RECORDING * LAUNCH * len(runs)
    for place, (size, count) in enumerate(zip(tokens, uses, strict=True)):
        ends = [tokens[run.stop - 1] for run in runs if place in run]
        total += count * (ends[0] if ends else max(size, LAUNCH))
    return total


def every_choice(count):
    """All sets of runs of neighbours: each place in the run before, in one of its own, or in none."""
    for how in itertools.product(("run", "same", "none"), repeat=count):
        runs, start = [], None
        for place, word in enumerate((*how, "none")):
            if word != "same" and start is not None:
                runs.append(range(start, place))
                start = None
            if word == "run":
                start = place
        if "same" not in how[:1] and not any(a == "none" and b == "same" for a, b in itertools.pairwise(how)):
            yield runs


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_sizes_takes_less_time(seed):
    draw = random.Random(seed)
    tokens = sorted(8 * size for size in draw.sample(range(1, 30), 6))
    uses = [draw.choice((1, 2, 9, 40)) for _ in tokens]
    chosen = best_runs(tokens, uses, LAUNCH)
    assert cost(tokens, uses, chosen) == min(cost(tokens, uses, choice) for choice in every_choice(6))


def chosen(uses):
    return choose_sizes(uses, lanes=1, launch=1000)


def test_all_passes_of_a_long_job_of_one_length_share_one_size():
    assert chosen({PassSize(4, 128, 508): 40, PassSize(4, 128, 500): 3}) == [PassSize(4, 128, 508)]


def test_a_job_that_is_over_before_recording_pays_records_nothing():
    assert chosen({PassSize(4, 128, 508): 1}) == []


def test_passes_that_compute_for_longer_than_their_launch_are_not_recorded():
    assert chosen({PassSize(4, 300, 508): 1000}) == []


def test_no_more_sizes_are_chosen_than_graphs_are_kept():
    assert len(chosen({PassSize(1, 8 * width, 8): 1000 for width in range(1, 100)})) == MOST_GRAPHS


def test_a_smaller_number_of_rows_never_goes_into_a_larger_size():
    assert not PassSize(4, 128, 508).holds(PassSize(3, 64, 100))


def test_the_passes_to_come_are_those_that_the_lanes_make(base):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, k=3, epochs=2) for fold in range(3)]
    lanes = [Lane.start(job, tokens) for job in jobs]
    told = sizes_of_wave(lanes, tokens, Cutting(2))
    found: Counter[PassSize] = Counter()
    while any(lane.is_fed for lane in lanes):
        for batch in step_batches(lanes, tokens, [1.0] * 3, Cutting(2)):
            found[batch.size] += 1
        for lane in lanes:
            lane.step += lane.is_fed
    assert told == found


def test_an_epochs_order_is_drawn_once_however_often_its_steps_are_looked_at(monkeypatch):
    units, drawn, real = [(row,) for row in range(50)], [], np.random.Philox
    monkeypatch.setattr(np.random, "Philox", lambda key: drawn.append(key) or real(key=key))
    steps = [units_of_step(units, seed=90210, step=step, batch_size=8) for step in (*range(14), *range(14))]
    assert drawn == [[90210, 0], [90210, 1]]
    for epoch in (0, 1):
        plain = np.random.Generator(real(key=[90210, epoch])).permutation(50)
        assert [row for step in steps[7 * epoch : 7 * epoch + 7] for (row,) in step] == plain.tolist()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_padding_a_pass_to_a_larger_size_changes_no_gradient(base, dropout):
    tokens = random_tokens()
    job = fold_job(base, 0, k=3, lora={"dropout": dropout})
    units_K = [[(0,), (1,)], [(2,)], [(3,), (4,)]]
    needed = pass_size(tokens, units_K)
    larger = PassSize(needed.rows, needed.width + 24, needed.targets + 7)
    keys = [(seed, 5) for seed in range(3)] if dropout else None
    found = []
    for size in (needed, larger):
        batch = collate(tokens, units_K, weights_K=[0.1, 0.2, 0.3], dropout_K=keys, size=size)
        with attached(base, [job.spec] * 3) as slots:
            slots.master_KP.add_(torch.randn(slots.master_KP.shape, generator=torch.Generator().manual_seed(0)) * 0.02)
            slots.refresh()
            loss_K = run_pass(slots, DeviceBatch.of(batch, base.device))
            found.append((loss_K, slots.grad_KP.clone()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_a_step_runs_its_passes_as_it_is_told(base):
    tokens = random_tokens()
    jobs = [fold_job(base, fold, k=3) for fold in range(3)]
    lanes = [Lane.start(job, tokens) for job in jobs]
    ran = []
    with attached(base, [job.spec for job in jobs]) as slots:
        optimizer = LaneAdamW(slots, [job.train for job in jobs])
        batches = step_batches(lanes, tokens, [1.0] * 3, Cutting(2))

        def run(batch):
            ran.append(batch)
            return run_pass(slots, DeviceBatch.of(batch, base.device))

        result = train_step(slots, optimizer, lanes, batches, run)
    assert ran == batches
    assert np.isfinite(result.loss).all()
