"""The mathematics of a lane against plain autograd, and dropout against its statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from crosstune.data.batches import token_keys
from crosstune.model.lora import Adapters, Dropout, LaneProduct, hashed_columns

K, S, I, O, R = 3, 11, 8, 6, 4


def random_adapters(dtype: torch.dtype = torch.float64) -> Adapters:
    draw = torch.Generator().manual_seed(0)
    a = nn.Parameter(torch.randn(K, R, I, dtype=dtype, generator=draw))
    b = nn.Parameter(torch.randn(K, O, R, dtype=dtype, generator=draw))
    return Adapters(a, b, (a.detach(), b.detach()), (torch.zeros_like(a), torch.zeros_like(b)))


def keys(seed: int = 1, step: int = 0, length: int = S) -> torch.Tensor:
    rows = [token_keys(seed + k, step, row=k, length=length).view(np.int32) for k in range(K)]
    return torch.from_numpy(np.stack(rows))


def dropout_of(rates: list[float], dtype: torch.dtype, **key) -> Dropout:
    scale = torch.tensor([1 / (1 - rate) for rate in rates], dtype=dtype)
    return Dropout(keys(**key), Dropout.thresholds(rates, torch.device("cpu")), scale)


@pytest.mark.parametrize("rates", [None, [0.5, 0.0, 0.2]])
def test_output_and_gradients_equal_plain_autograd(rates):
    adapters, draw = random_adapters(), torch.Generator().manual_seed(1)
    x = torch.randn(K, S, I, dtype=torch.float64, generator=draw, requires_grad=True)
    y = torch.randn(K, S, O, dtype=torch.float64, generator=draw, requires_grad=True)
    g = torch.randn(K, S, O, dtype=torch.float64, generator=draw)
    scale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    columns = hashed_columns("layer", I, torch.device("cpu"))
    dropout = None if rates is None else dropout_of(rates, torch.float64)
    out = LaneProduct.apply(y, x, adapters.a_KRI, adapters, scale, None if dropout is None else (dropout, columns))
    out.backward(g)

    mask = torch.ones_like(x) if dropout is None else dropout.apply(torch.ones_like(x), columns).detach()
    x2, y2 = x.detach().clone().requires_grad_(), y.detach().clone().requires_grad_()
    a2, b2 = adapters.a_KRI.detach().clone().requires_grad_(), adapters.b_KOR.detach().clone().requires_grad_()
    lanes = [y2[k] + scale[k] * (x2[k] * mask[k]) @ a2[k].T @ b2[k].T for k in range(K)]
    torch.stack(lanes).backward(g)
    torch.testing.assert_close(out, torch.stack(lanes))
    for mine, plain in (
        (x.grad, x2.grad),
        (y.grad, y2.grad),
        (adapters.grads[0], a2.grad),
        (adapters.grads[1], b2.grad),
    ):
        torch.testing.assert_close(mine, plain)


def test_dropout_drops_its_share_scales_the_rest_and_leaves_rate_zero_alone():
    x = torch.ones(K, 400, 512)
    rates = [0.0, 0.1, 0.5]
    out = dropout_of(rates, torch.float32, length=400).apply(x, hashed_columns("layer", 512, torch.device("cpu")))
    assert torch.equal(out[0], x[0])
    for k, rate in ((1, 0.1), (2, 0.5)):
        kept = (out[k] != 0).float()
        error = (rate * (1 - rate) / kept.numel()) ** 0.5
        assert abs(kept.mean() - (1 - rate)) < 5 * error
        torch.testing.assert_close(out[k][out[k] != 0], torch.full((int(kept.sum()),), 1 / (1 - rate)))


def test_dropout_masks_are_independent_over_tokens_channels_layers_steps_and_lanes():
    def mask(name: str, **key) -> torch.Tensor:
        columns = hashed_columns(name, 512, torch.device("cpu"))
        kept = dropout_of([0.5] * K, torch.float32, length=400, **key).apply(torch.ones(K, 400, 512), columns) != 0
        return kept.float() * 2 - 1

    first = mask("layer 0")
    limit = 5 / (400 * 512) ** 0.5
    for other in (
        mask("layer 1"),
        mask("layer 0", step=1),
        mask("layer 0", seed=9),
        first.roll(1, 1),
        first.roll(1, 2),
        first.roll(1, 0),
    ):
        assert all(abs((first[k] * other[k]).mean()) < limit for k in range(K))
    # pairs of channels over tokens, and pairs of tokens over channels: no pair correlates more than chance allows
    for m in (first[0], first[0].T):
        correlation = (m @ m.T) / m.shape[1]
        off = correlation[~torch.eye(len(m), dtype=torch.bool)]
        assert off.abs().max() < 6 / m.shape[1] ** 0.5
        assert abs(off.square().mean() * m.shape[1] - 1) < 0.05


def test_a_tokens_mask_does_not_depend_on_padding_or_on_its_place_in_the_batch():
    long, short = token_keys(3, 5, row=9, length=40), token_keys(3, 5, row=9, length=17)
    assert np.array_equal(long[:17], short)
    assert not np.array_equal(token_keys(3, 5, row=8, length=17), short)
