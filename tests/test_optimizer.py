"""Each lane's AdamW, clipping and schedule against PyTorch's and transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from crosstune.model.attach import attached
from crosstune.recipe.sections import Train
from crosstune.train.lane import learning_rate
from crosstune.train.optimizer import LaneAdamW
from tests.lanes import fold_job, fp32_base

TRAINS = [
    {"learning_rate": 1e-2, "max_grad_norm": 0.5},
    {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1e9},
    {"learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6},
]


@pytest.fixture(scope="module")
def base(tiny):
    return fp32_base(tiny)


def test_each_lane_moves_as_a_torch_adamw_of_its_own_with_clipping(base):
    jobs = [fold_job(base, fold, k=3, **train) for fold, train in enumerate(TRAINS)]
    draw = torch.Generator().manual_seed(3)
    with attached(base, [job.spec for job in jobs]) as slots:
        optimizer = LaneAdamW(slots, [job.train for job in jobs])
        theirs = [torch.nn.Parameter(slots.master_KP[k].clone()) for k in range(3)]
        plain = [
            torch.optim.AdamW(
                [p],
                lr=j.train.learning_rate,
                betas=(j.train.beta1, j.train.beta2),
                eps=j.train.epsilon,
                weight_decay=j.train.weight_decay,
            )
            for p, j in zip(theirs, jobs, strict=True)
        ]
        for step in range(5):
            slots.grad_KP.normal_(generator=draw)
            rates = [job.train.learning_rate / (1 + step) for job in jobs]
            for k, parameter in enumerate(theirs):
                parameter.grad = slots.grad_KP[k].clone()
                torch.nn.utils.clip_grad_norm_([parameter], jobs[k].train.max_grad_norm)
                plain[k].param_groups[0]["lr"] = rates[k]
                plain[k].step()
            optimizer.step(torch.zeros(3), rates, torch.ones(3, dtype=torch.bool))
            for k, parameter in enumerate(theirs):
                torch.testing.assert_close(slots.master_KP[k], parameter.detach(), rtol=2e-6, atol=1e-8)


@pytest.mark.parametrize("why", ["loss", "gradient", "inactive"])
def test_a_lane_that_must_not_step_stays_bit_for_bit_and_the_others_move_as_ever(base, why):
    def moved(stop: bool):
        jobs = [fold_job(base, fold, k=3) for fold in range(3)]
        with attached(base, [job.spec for job in jobs]) as slots:
            optimizer = LaneAdamW(slots, [job.train for job in jobs])
            for step in range(2):
                slots.grad_KP.normal_(generator=torch.Generator().manual_seed(step))
                loss, active = torch.zeros(3), torch.ones(3, dtype=torch.bool)
                if stop and step == 1:
                    if why == "loss":
                        loss[1] = torch.nan
                    elif why == "gradient":
                        slots.grad_KP[1, 7] = torch.inf
                    else:
                        active[1] = False
                before = (
                    slots.master_KP.clone(),
                    optimizer.m_KP.clone(),
                    optimizer.v_KP.clone(),
                    optimizer.taken_K.clone(),
                )
                optimizer.step(loss, [1e-3] * 3, active)
            after = slots.master_KP.clone(), optimizer.m_KP.clone(), optimizer.v_KP.clone(), optimizer.taken_K.clone()
            return before, after

    (before, stopped), (_, free) = moved(True), moved(False)
    for old, held, other in zip(before, stopped, free, strict=True):
        assert torch.equal(held[1], old[1])
        assert torch.equal(held[0], other[0]) and torch.equal(held[2], other[2])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 5])
def test_the_schedule_is_transformers_own(schedule, warmup):
    total, train = 37, Train(learning_rate=2e-3, schedule=schedule, warmup=warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    steps = int(np.ceil(warmup * total)) if warmup < 1 else int(warmup)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, num_warmup_steps=steps, num_training_steps=total)
    for step in range(total):
        assert learning_rate(train, step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        theirs.step()
