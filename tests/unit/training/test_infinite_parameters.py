"""A parameter that holds infinity, such as a mask, keeps it; its other elements are trained."""

import inspect
import math

import pytest
import torch
from torch import nn

from graphstash import training

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD with momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.1},
    "Adam with amsgrad": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.0},
    "LAMB": {"lr": 0.1, "weight_decay": 0.0},
    "Lion": {"lr": 0.1},
    "Adafactor": {"lr": 0.1},
    "Muon": {"lr": 0.1, "weight_decay": 0.0},
    "ScheduleFreeAdamW": {"lr": 0.1},
    "Shampoo": {"lr": 0.1, "delay": 0},
    "SOAP": {"lr": 0.1, "weight_decay": 0.0, "delay": 0},
    "Adam8bit": {"lr": 0.1},
    "AdamW8bit": {"lr": 0.1, "weight_decay": 0.0},
}


def made(name, parameter, module=training, **more):
    options = OPTIMIZERS[name] | more
    kind = getattr(module, name.split()[0])
    known = inspect.signature(kind).parameters
    options = {each: value for each, value in options.items() if each in known or each == "fused"}
    return kind([parameter], **options)


def run(optimizer, parameter, steps=3):
    """The gradient is that of scores with an additive mask: none where the mask is -inf."""
    for step in range(steps):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient.masked_fill(parameter.detach().isinf(), 0)
        optimizer.step()


def mask():
    values = torch.ones(4, 5).triu() * 0.5 + 0.25
    return values.masked_fill(torch.ones(4, 5).triu(1).bool(), -math.inf)


@pytest.mark.parametrize("fused", [None, False], ids=["as it is", "by the formula"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_decay_leaves_infinity_where_it_is(name, fused):
    parameter = nn.Parameter(mask())
    run(made(name, parameter, fused=fused), parameter)
    assert torch.equal(parameter.isinf(), mask().isinf())
    assert not parameter.isnan().any()
    finite = ~mask().isinf()
    assert (parameter != mask())[finite].all()


@pytest.mark.parametrize("name", ["SGD", "SGD with momentum", "Adam", "Adam with amsgrad", "AdamW"])
def test_infinity_changes_nothing_that_torch_does_not_change(name):
    ours, theirs = nn.Parameter(mask()), nn.Parameter(mask())
    run(made(name, ours, fused=False), ours)
    run(made(name, theirs, torch.optim, foreach=False), theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["LAMB", "Adafactor"])
def test_elements_beside_infinity_stay_finite_with_a_decay(name):
    parameter = nn.Parameter(mask())
    run(made(name, parameter, weight_decay=0.1), parameter, steps=1)
    assert parameter[~mask().isinf()].isfinite().all()


def test_averages_of_infinity_are_infinite():
    parameter = nn.Parameter(mask())
    optimizer = made("ScheduleFreeAdamW", parameter)
    run(optimizer, parameter)
    before = parameter.detach().clone()
    optimizer.eval()
    assert torch.equal(parameter.isinf(), mask().isinf())
    assert not parameter.isnan().any()
    optimizer.train()
    assert torch.equal(parameter, before)
