"""Every optimizer moves every parameter, whatever kernel torch would use for it."""

import itertools

import pytest
import torch

from graphstash.training import LAMB, SGD, Adafactor, Adam, AdamW, Lion, ScheduleFreeAdamW
from graphstash.training.optimizers import cohort

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4096, 4097]
FUSED = [None, True, False]
OPTIMIZERS = {
    "SGD": (SGD, torch.optim.SGD, {}),
    "SGD with momentum": (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD with Nesterov": (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam with AMSGrad": (Adam, torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (AdamW, torch.optim.AdamW, {}),
}
LAYOUTS = {
    "contiguous": torch.empty,
    "transposed": lambda size: torch.empty(size, 3).t(),
    "strided": lambda size: torch.empty(size, 2)[:, 0],
}


def values(like, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(like.shape, generator=generator, dtype=torch.float64) + 0.5
    return numbers * torch.where(torch.rand(like.shape, generator=generator) < 0.5, -1, 1)


def parameters_of(layout, dtype):
    made = [LAYOUTS[layout](size).to(dtype) for size in SIZES]
    for number, each in enumerate(made):
        each.copy_(values(each, number))
    return [torch.nn.Parameter(each) for each in made]


# Every pair of an optimizer, a layout, a type and a way; in `make test-all` every combination.
USUAL = {
    (name, FUSED[(n + d) % 3], list(LAYOUTS)[(n + d + n // 2) % 3], dtype)
    for n, name in enumerate(OPTIMIZERS)
    for d, dtype in enumerate(DTYPES)
}
CASES = [
    pytest.param(*case, marks=() if case in USUAL else pytest.mark.extended)
    for case in itertools.product(OPTIMIZERS, FUSED, LAYOUTS, DTYPES)
]


@pytest.mark.parametrize(("name", "fused", "layout", "dtype"), CASES)
def test_every_size_follows_the_formula_in_every_dtype_and_layout(name, fused, layout, dtype):
    ours_class, reference_class, options = OPTIMIZERS[name]
    ours = parameters_of(layout, dtype)
    wide = [torch.nn.Parameter(each.detach().double().contiguous()) for each in ours]
    optimizer = ours_class(ours, lr=0.125, fused=fused, **options)
    reference = reference_class(wide, lr=0.125, foreach=False, **options)
    for step in range(3):
        for number, (our, their) in enumerate(zip(ours, wide, strict=True)):
            gradient = values(our, 100 * step + number).to(dtype)
            our.grad = torch.empty_like(our).copy_(gradient)
            their.grad = gradient.double()
        optimizer.step(found_inf=torch.tensor(0.0) if step % 2 else None)
        reference.step()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2}.get(dtype, 6e-2)
    for our, their in zip(ours, wide, strict=True):
        torch.testing.assert_close(our.double(), their, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "optimizer_class", [SGD, Adam, AdamW, LAMB, Lion, Adafactor, ScheduleFreeAdamW]
)
def test_one_step_changes_every_element_in_every_size_and_dtype(optimizer_class):
    for dtype in DTYPES:
        sizes = [torch.ones(size, dtype=dtype) for size in (1, 15, 16, 64, 4097)]
        parameters = [torch.nn.Parameter(each) for each in sizes]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer_class(parameters, lr=0.5).step()
        assert all(bool((parameter != 1).all()) for parameter in parameters), dtype


@pytest.mark.parametrize(
    ("name", "fault"),
    list(
        itertools.product(
            ["SGD", "AdamW"],
            ["no store", "no store beyond 16", "moves on a bad step", "wrong sign"],
        )
    ),
)
def test_kernel_with_wrong_result_is_not_used(name, fault, monkeypatch):
    optimizer_class, reference_class, _ = OPTIMIZERS[name]
    calls = []

    def faulty(parameters, gradients, *state, lr, found_inf=None, **_):
        calls.append(len(parameters))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if fault == "no store" or (fault == "no store beyond 16" and parameter.numel() >= 16):
                continue
            if found_inf is not None and found_inf != 0 and fault != "moves on a bad step":
                continue
            parameter.sub_(gradient, alpha=-lr if fault == "wrong sign" else lr)

    monkeypatch.setattr(torch, "_fused_sgd_" if name == "SGD" else "_fused_adamw_", faulty)
    ours, theirs = parameters_of("contiguous", torch.float32), []
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    optimizer, reference = optimizer_class(ours, lr=0.1), reference_class(theirs, lr=0.1)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        our.grad = values(our, number).float()
        their.grad = our.grad.clone()
    optimizer.step(found_inf=torch.tensor(0.0))
    reference.step()
    assert calls  # it was tried
    torch.testing.assert_close(ours, theirs)


def test_kernel_is_checked_once_for_each_case(monkeypatch):
    tried = []
    check = cohort.computes_the_same

    def counted(kernel, formula, like):
        tried.append({"select": like.found_inf is not None, "unscale": like.grad_scale is not None})
        return check(kernel, formula, like)

    monkeypatch.setattr("graphstash.training.optimizers.base.computes_the_same", counted)
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = SGD([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = torch.ones(64)
        optimizer.step()
        optimizer.step(found_inf=torch.tensor(0.0))
    assert tried == [{"select": False, "unscale": False}, {"select": True, "unscale": False}]
