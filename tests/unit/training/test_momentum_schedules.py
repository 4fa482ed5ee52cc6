"""OneCycleLR and CyclicLR cycle the momentum of an optimizer as they do in torch."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from graphstash import training

SCHEDULES = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
}
SHAPES = ((4, 3), (3, 4))


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(values, step):
    generator = torch.Generator().manual_seed(step)
    for each in values:
        each.grad = torch.randn(each.shape, generator=generator)


def values_of(schedule_of):
    """What the schedule makes of lr and momentum of an optimizer that has no betas."""
    optimizer = torch.optim.SGD(parameters(), lr=0.01, momentum=0.9)
    schedule = schedule_of(optimizer)
    for _ in range(10):
        yield optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        optimizer.step()
        schedule.step()


def by_hand(schedule_of):
    values = parameters()
    optimizer = training.Muon(values, lr=0.01)
    for step, (lr, momentum) in enumerate(values_of(schedule_of)):
        optimizer.param_groups[0].update(lr=lr, momentum=momentum)
        set_gradients(values, step)
        optimizer.step()
    return values


@pytest.mark.parametrize("name", SCHEDULES)
def test_muon_takes_the_momentum_of_a_schedule(name):
    values = parameters()
    optimizer = training.Muon(values, lr=0.01)
    schedule = SCHEDULES[name](optimizer)
    for step in range(10):
        set_gradients(values, step)
        optimizer.step()
        schedule.step()

    torch.testing.assert_close(values, by_hand(SCHEDULES[name]), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("of_torch", [False, True], ids=["ours", "of torch.optim.Muon"])
def test_muon_resumes_in_the_middle_of_a_schedule(name, of_torch):
    values = parameters()
    optimizer = training.Muon(values, lr=0.01)
    schedule = SCHEDULES[name](optimizer)
    for step in range(10):
        if step == 4:
            saved = copy.deepcopy(optimizer.state_dict())
            if of_torch:
                for group in saved["param_groups"]:
                    del group["betas"]  # torch's has none, and keeps the momentum of the schedule
            progress = schedule.state_dict()
            optimizer = training.Muon(values, lr=0.01)
            optimizer.load_state_dict(saved)
            schedule = SCHEDULES[name](training.Muon(parameters(), lr=0.01))
            schedule.load_state_dict(progress)
            schedule.optimizer = optimizer
        set_gradients(values, step)
        optimizer.step()
        schedule.step()

    torch.testing.assert_close(values, by_hand(SCHEDULES[name]), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_adamw_groups_of_muon_cycle_their_first_beta(name):
    matrices, values = parameters()
    groups = [
        {"params": [matrices], "use_muon": True},
        {"params": [values], "use_muon": False, "weight_decay": 0.01},
    ]
    optimizer = training.Muon(groups, lr=0.01, betas=(0.9, 0.999))
    other = parameters()[1]
    alone = training.AdamW([other], lr=0.01)
    both = [SCHEDULES[name](optimizer), SCHEDULES[name](alone)]
    for step in range(10):
        set_gradients([matrices, values], step)
        other.grad = values.grad.clone()
        optimizer.step()
        alone.step()
        for schedule in both:
            schedule.step()

    torch.testing.assert_close(values, other, rtol=0.0, atol=0.0)


def test_an_average_whose_beta_is_cycled_is_refused():
    values = parameters()
    optimizer = training.ScheduleFreeAdamW(values, lr=0.01)
    SCHEDULES["OneCycleLR"](optimizer)
    set_gradients(values, 0)
    with pytest.raises(ValueError, match=r"cycle_momentum=False"):
        optimizer.step()
