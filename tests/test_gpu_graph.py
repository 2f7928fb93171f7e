"""Passes as CUDA graphs on a GPU: the same bits as launched one by one, dropout on; alone and together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.shapes import random_model
from crosstune.data.batches import collate
from crosstune.data.flat import collate_flat, flat_size
from crosstune.model import attach
from crosstune.model import lanes as model_lanes
from crosstune.model.attach import Slots, attached
from crosstune.model.base import adopt
from crosstune.model.lanes import groups_products
from crosstune.model.targets import resolve_targets
from crosstune.progress import Quiet
from crosstune.recipe.sections import Evaluate, Lora, Train
from crosstune.train import cutting, graph
from crosstune.train.lane import LaneJob
from crosstune.train.run_wave import run_wave
from crosstune.train.step import DeviceBatch, run_pass
from tests.lanes import Outcome, PlanOf, random_tokens, same_adapter, tokens_of

pytestmark = pytest.mark.gpu
ROWS = 60


@pytest.fixture(scope="module", params=["nf4", "none"])
def base(request):
    return adopt(random_model("tiny", request.param, torch.device("cuda"), vocab=512), None)


class Said(Quiet):
    def __init__(self):
        self.texts = []

    def say(self, text):
        self.texts.append(text)


def jobs(base, folds=3, **lora):
    targets = resolve_targets(base, "all-linear")
    section, train = Lora(rank=8, alpha=16, dropout=0.1, **lora), Train(epochs=2, batch_size=4, learning_rate=5e-3)
    return [
        LaneJob(0, fold, section, train, Evaluate(), tuple(r for r in range(ROWS) if r % folds != fold),
                tuple(range(fold, ROWS, folds)), targets)
        for fold in range(folds)
    ]  # fmt: skip


def train(base, lanes, tokens, **plan):
    outcome, said = Outcome(), Said()
    run_wave(base, lanes, tokens, PlanOf(**plan), report=outcome.events.append, progress=said)
    assert said.texts == []
    return outcome


def equal_lengths(length=40):
    draw = np.random.default_rng(0)
    return tokens_of([draw.integers(0, 360, length).tolist() for _ in range(ROWS)])


def need_grouped_products(base):
    if not groups_products(base.device, base.dtype):
        pytest.skip("this GPU makes the products of flat passes one lane at a time")


def counting(monkeypatch):
    replayed, real = [], graph._Graph.replay

    def replay(self, batch):
        replayed.append(batch)
        return real(self, batch)

    monkeypatch.setattr(graph._Graph, "replay", replay)
    return replayed


@pytest.mark.parametrize("checkpointed", [0, 1])
def test_a_replayed_run_is_bit_equal_to_one_that_is_launched(base, monkeypatch, checkpointed):
    tokens = equal_lengths()
    replayed = counting(monkeypatch)
    one = train(base, jobs(base), tokens, checkpointed_layers=checkpointed)
    assert len(replayed) > 20
    monkeypatch.setattr(graph, "choose_sizes", lambda *_, **__: [])
    other = train(base, jobs(base), tokens, checkpointed_layers=checkpointed)
    for fold in range(3):
        assert one.lane(fold).losses == other.lane(fold).losses
        assert same_adapter(one.lane(fold), other.lane(fold))
        np.testing.assert_array_equal(one.lane(fold).scores.nll, other.lane(fold).scores.nll)


@pytest.mark.parametrize("lengths", ["one", "many"])
def test_long_rows_give_the_same_bits_each_time(base, lengths):
    """Attention sums a query's gradient over blocks of keys: rows of several blocks tell."""
    tokens = equal_lengths(1200) if lengths == "one" else random_tokens(ROWS, longest=1500)
    one, other = (train(base, jobs(base), tokens, evaluate_tokens=16384) for _ in range(2))
    for fold in range(3):
        assert one.lane(fold).losses == other.lane(fold).losses
        assert same_adapter(one.lane(fold), other.lane(fold))


def test_rows_of_many_lengths_give_the_same_losses_padded_to_recorded_sizes(base, monkeypatch):
    need_grouped_products(base)
    tokens = random_tokens(ROWS, longest=200)
    replayed = counting(monkeypatch)
    one = train(base, jobs(base), tokens)
    assert replayed and all(batch.ends_K is not None for batch in replayed)  # they lie flat
    monkeypatch.setattr(graph, "choose_sizes", lambda *_, **__: [])
    launched = train(base, jobs(base), tokens)
    monkeypatch.setitem(cutting.FLAT_ON, "cuda", False)
    even = train(base, jobs(base), tokens)
    for fold in range(3):
        for other in (launched, even):
            np.testing.assert_allclose(one.lane(fold).losses, other.lane(fold).losses, rtol=0.02)
            np.testing.assert_allclose(one.lane(fold).scores.loss, other.lane(fold).scores.loss, rtol=0.01)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_a_flat_pass_has_the_gradients_of_an_even_one(base, monkeypatch, is_grouped):
    """Not grouped: as GPUs before Hopper make the adapters' products, one lane at a time."""
    if is_grouped:
        need_grouped_products(base)
    for module in (attach, model_lanes):
        monkeypatch.setattr(module, "groups_products", lambda device, dtype: is_grouped)
    tokens, units_K = random_tokens(), [[(0,), (1,)], [(2,), (5,)], [(3,)]]
    keys = [(seed, 5) for seed in range(3)]
    given = {"weights_K": [0.1, 0.2, 0.3], "dropout_K": keys}
    batches = [
        collate(tokens, units_K, **given),
        collate_flat(tokens, units_K, **given, size=flat_size(tokens, units_K, 30)),
    ]
    found = []
    for batch in batches:
        with attached(base, [job.spec for job in jobs(base)]) as slots:
            noise = torch.randn(slots.master_KP.shape, generator=torch.Generator().manual_seed(0)) * 0.02
            slots.master_KP.add_(noise.cuda())
            slots.refresh()
            loss_K = run_pass(slots, DeviceBatch.of(batch, base.device))
            found.append((loss_K, slots.grad_KP.clone()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.01, atol=1e-3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.linalg.vector_norm(one - other) < 0.03 * torch.linalg.vector_norm(one)


def test_a_lane_alone_and_together_agree_to_the_noise_of_bf16(base):
    tokens = equal_lengths()
    together = train(base, jobs(base), tokens)
    for fold, job in enumerate(jobs(base)):
        alone = train(base, [job], tokens)
        np.testing.assert_allclose(alone.lane(fold).losses, together.lane(fold).losses, rtol=0.02)


def test_memory_comes_back_after_a_recorded_wave(base):
    tokens = equal_lengths()
    held = []
    for _ in range(3):
        train(base, jobs(base), tokens)
        held.append(torch.cuda.memory_allocated())
    assert held[1] == held[2]


def test_what_cannot_be_recorded_is_said_and_runs(base, monkeypatch):
    real, outcome, said = graph.run_pass, Outcome(), Said()

    def asks_the_device(slots, given):
        loss_K = real(slots, given)
        loss_K.sum().item()  # not allowed while a graph is recorded
        return loss_K

    monkeypatch.setattr(graph, "run_pass", asks_the_device)
    run_wave(base, jobs(base), equal_lengths(), PlanOf(), report=outcome.events.append, progress=said)
    assert len(said.texts) == 1 and "not recorded" in said.texts[0]
    torch.rand(3, device="cuda")  # the generator is free again
    assert all(np.isfinite(outcome.lane(fold).losses).all() for fold in range(3))


def test_copies_of_a_quantised_base_change_no_bit(base, monkeypatch):
    tokens, kept = equal_lengths(), []
    real = Slots.keep_weights
    monkeypatch.setattr(Slots, "keep_weights", lambda self, keep: (kept.append(keep), real(self, keep)))
    roomy = train(base, jobs(base), tokens, copies=True)
    tight = train(base, jobs(base), tokens)
    assert kept == [True, False]
    for fold in range(3):
        assert same_adapter(roomy.lane(fold), tight.lane(fold))
