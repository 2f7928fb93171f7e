"""Losses without logits against losses with them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from crosstune.model import head
from crosstune.model.attach import attached
from tests.lanes import fold_job, fp32_base


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


def plain(base, hidden, index, target, weight, *, factor=1.0, cap=None):
    """Full logits, PyTorch's cross entropy, autograd."""
    lanes = index.shape[0]
    states = hidden.reshape(lanes, -1, hidden.shape[-1])
    chosen = torch.stack([states[k, index[k]] for k in range(lanes)])
    logits = base.head(chosen) * factor
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    nll = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    return (nll * weight).sum(), nll, logits.argmax(-1) == target


def example(base, lanes=2, rows=6, targets=7):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 5, 64, generator=draw, requires_grad=True)
    index = torch.randint(0, rows // lanes * 5, (lanes, targets), generator=draw)
    return (
        hidden,
        index,
        torch.randint(0, 384, (lanes, targets), generator=draw),
        torch.rand(lanes, targets, generator=draw),
    )


@pytest.mark.parametrize(
    "config", [{}, {"final_logit_softcapping": 2.0}, {"logit_scale": 0.5}, {"logits_scaling": 4.0}], ids=str
)
@pytest.mark.parametrize("chunk", [3, 1000])
def test_losses_hits_and_gradient_equal_full_logits(base, monkeypatch, config, chunk):
    monkeypatch.setattr(head, "chunk_rows", lambda vocab, kind: chunk)
    for key, value in config.items():
        monkeypatch.setattr(base.model.config, key, value, raising=False)
    hidden, *arguments = example(base)
    found = head.head_loss(base, hidden, *arguments)
    (mine,) = torch.autograd.grad(found.weighted, hidden)
    factor = config.get("logit_scale", 1.0) / config.get("logits_scaling", 1.0)
    total, nll, hits = plain(base, hidden, *arguments, factor=factor, cap=config.get("final_logit_softcapping"))
    (theirs,) = torch.autograd.grad(total, hidden)
    torch.testing.assert_close(found.weighted, total)
    torch.testing.assert_close(found.nll_KS, nll)
    assert torch.equal(found.hit_KS, hits)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_an_adapted_head_gives_the_losses_and_gradients_of_full_logits(base, monkeypatch, chunk):
    monkeypatch.setattr(head, "chunk_rows", lambda vocab, kind: chunk)
    jobs = [fold_job(base, fold, lora={"targets": ["lm_head", "q_proj"], "dropout": 0.0}) for fold in range(2)]
    with attached(base, [job.spec for job in jobs]) as slots:
        with torch.no_grad():
            slots.master_KP.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
        slots.begin_pass(None)
        hidden, *arguments = example(base)
        found = head.head_loss(base, hidden, *arguments)
        found.weighted.backward()
        mine, gradient = slots.grad_KP.clone(), hidden.grad.clone()
        slots.grad_KP.zero_()
        hidden.grad = None
        total, nll, hits = plain(base, hidden, *arguments)
        total.backward()
        torch.testing.assert_close(found.nll_KS, nll.detach())
        assert torch.equal(found.hit_KS, hits)
        torch.testing.assert_close(mine, slots.grad_KP)
        torch.testing.assert_close(gradient, hidden.grad)
        assert mine.any()
    assert type(base.head) is torch.nn.Linear
