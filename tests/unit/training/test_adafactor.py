"""Adafactor's factored state. test_every_optimizer.py tests the common promises."""

from functools import partial

import pytest
import torch
from torch import nn

from graphstash.training import Adafactor
from support.optimizer_cases import assert_close, shaped, train_beside

SHAPES = ((6, 4), (4, 6), (3, 2, 5, 2), (1, 7), (5,), ())

new_parameters = partial(shaped, SHAPES)


@pytest.mark.parametrize(
    ("options", "foreach"),
    [
        ({"weight_decay": 0.1, "maximize": True}, False),
        ({"lr": 0.05, "beta2_decay": -0.4, "eps": (1e-3, 0.2), "d": 2.0}, True),
    ],
    ids=str,
)
def test_parameters_of_every_rank_are_updated_as_in_torch(options, foreach):
    ours, theirs = new_parameters(), new_parameters()
    mine = Adafactor(ours, **options)
    reference = torch.optim.Adafactor(theirs, foreach=foreach, **options)
    train_beside(ours, mine, theirs, reference)
    assert_close(ours, theirs)
    assert not any(map(torch.equal, ours, new_parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(dict(mine.state[a]), dict(reference.state[b]))
    assert mine.state[ours[0]]["row_var"].shape == (6, 1)  # the parameter is 6 x 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_least_mean_square_is_that_of_the_parameters_type(dtype):
    ours = new_parameters(dtype)
    theirs = [nn.Parameter(each.detach().float()) for each in ours]
    mine = Adafactor(ours, lr=1.0)
    reference = torch.optim.Adafactor(theirs, lr=1.0, eps=(torch.finfo(dtype).eps, 1e-3))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.full_like(a, 1e-4)
        b.grad = a.grad.float()
    mine.step()
    reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squares_of_half_precision_gradients_stay_in_range(dtype):
    """The mean of the squares fits into the state; their sum over 512 rows does not."""
    parameter = nn.Parameter(torch.ones(512, 4, dtype=dtype))
    optimizer = Adafactor([parameter], lr=0.25)
    parameter.grad = torch.full_like(parameter, 200.0)
    optimizer.step()
    assert torch.equal(parameter, torch.full_like(parameter, 0.75))
    assert {value.dtype for value in optimizer.state[parameter].values()} == {torch.float32, dtype}


@pytest.mark.parametrize(
    ("dtype", "eps1", "empty"),
    [
        *((torch.float16, 0.0, "row"), (torch.float16, 1e-30, "all")),
        *((torch.float32, 1e-30, "column"), (torch.float32, 0.0, "all")),
        *((torch.float64, 0.0, "column"), (torch.float64, 1e-30, "row")),
    ],
)
def test_zeros_in_gradient_leave_parameter_finite_with_small_eps(eps1, empty, dtype):
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.ones(4, 6, dtype=dtype)),
        nn.Parameter(torch.ones(6).to(dtype)),
    ]
    mine = Adafactor(parameters, lr=0.5, eps=(eps1, 1e-3))
    for _ in range(3):
        for each in parameters:
            each.grad = torch.randn(each.shape, generator=generator).to(dtype)
            each.grad[{"row": 0, "column": (..., 0), "all": ...}[empty]] = 0
        mine.step()
    for each in parameters:
        untouched = each.grad == 0
        assert torch.equal(each[untouched], torch.ones_like(each[untouched]))
        assert torch.isfinite(each).all()
        assert bool((each[~untouched] != 1).all())
