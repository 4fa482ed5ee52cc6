"""Each optimizer equals torch's or a public implementation's, with every kernel of torch."""

import copy
import inspect
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from graphstash.training.optimizers import (
    LAMB,
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    ScheduleFreeAdamW,
    Shampoo,
    SyncFreeOptimizer,
)
from graphstash.training.optimizers.gradients import LossScale
from support.device_reads import Reads
from support.optimizer_cases import (
    BY_HAND,
    CASES,
    FORMS,
    NOT_IN_TORCH,
    SCHEDULES,
    assert_close,
    give_gradients,
    gradients,
    loss_of,
    new_parameters,
    public,
    train_scheduled,
)

BAD = {0: math.inf, 5: -math.inf, 7: math.nan}
MISSING = {1: (1,), 2: (0, 2), 3: (3,), 5: (1, 2), 9: (0, 1, 2)}
STEPS = 12

both_ways = pytest.mark.parametrize("fused", [None, False])


def train(parameters, optimizer, scaler, *, missing=MISSING, dtype=torch.float32):
    """Train with a loss scale and bad steps; return the scales and the number of host reads."""
    history, count = [], 0
    for step in range(STEPS):
        factors = gradients(step, bad=BAD.get(step), missing=missing.get(step, ()), dtype=dtype)
        with Reads() as reads:
            optimizer.zero_grad()
            scaler.scale(loss_of(parameters, factors)).backward()
            scaler.step(optimizer)
            scaler.update()
        history.append(scaler.get_scale())
        count += reads.count
    return history, count


def plain_steps(parameters, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(parameters, gradients(step)).backward()
        optimizer.step()


def torchs_scaler():
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


# The trajectory.


@pytest.mark.parametrize(
    ("name", "fused", "dtype"),
    [  # both forms of a case in different types; the types alternate between cases
        (name, fused, (torch.float32, torch.float64)[(number // 2 + number) % 2])
        for number, (name, fused) in enumerate(FORMS)
    ],
    ids=str,
)
def test_trajectory_equals_torch_with_skipped_steps_and_missing_gradients(name, fused, dtype):
    ours, theirs = new_parameters(dtype=dtype), new_parameters(dtype=dtype)
    optimizer, reference = CASES[name].ours(ours, fused=fused), CASES[name].reference(theirs)
    history, reads = train(ours, optimizer, LossScale(8.0, growth_interval=3), dtype=dtype)
    expected, their_reads = train(theirs, reference, torchs_scaler(), dtype=dtype)
    assert_close(ours, theirs, atol=1e-6 if dtype == torch.float32 else 1e-10)
    assert history == expected
    assert reads == 0 < their_reads
    for number, (parameter, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.isfinite(parameter).all()
        counted = sum(s not in BAD and number not in MISSING.get(s, ()) for s in range(STEPS))
        assert optimizer.state[parameter]["step"] == counted
        assert reference.state[other].get("step", counted) == counted


@both_ways
def test_nonzero_found_inf_skips_the_step(fused):
    for value in (1.0, 2.0, math.nan, math.inf, True, 3, [1.0], 0.0, False, 0, [0.0]):
        parameters = new_parameters()
        optimizer = SGD(parameters, lr=0.1, fused=fused)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(found_inf=torch.tensor(value))
        moved = 0.1 if value in (0, [0.0]) else 0.0
        assert_close(parameters, [parameter - moved for parameter in new_parameters()])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(torch.zeros(2), ValueError, "single number"), (True, TypeError, "must be a tensor")],
)
def test_a_found_inf_that_is_not_one_number_on_the_device_is_refused(value, error, text):
    with pytest.raises(error, match=text):
        SGD(new_parameters()).step(found_inf=value)


# Changes between two steps.


@pytest.mark.parametrize(
    ("schedule", "name", "fused"),
    [
        (schedule, ("SGD", "AdamW")[number % 2], (None, False)[number // 2 % 2])
        for number, schedule in enumerate([*SCHEDULES, *BY_HAND])
    ],
)
def test_schedule_works_as_with_torchs_optimizer(name, fused, schedule, recwarn):
    options = {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    results = []
    for optimizer, more in (
        ({"SGD": SGD, "AdamW": AdamW}[name], {"fused": fused}),
        (getattr(torch.optim, name), {"foreach": False}),
    ):
        parameters = new_parameters()
        mine = optimizer(parameters, **options, **more)
        train_scheduled(mine, (SCHEDULES | BY_HAND)[schedule](mine), parameters)
        results.append(parameters)
    assert_close(*results)


def tensor_rate(optimizer, _):
    optimizer.param_groups[0]["lr"] *= 0.1


def momentum(optimizer, _):
    optimizer.param_groups[0]["momentum"] = 0.9


def group(optimizer, parameters):
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})


@pytest.mark.parametrize(
    ("change", "name", "options"),
    [
        (tensor_rate, "AdamW", {"lr": torch.tensor(0.1)}),
        (momentum, "SGD", {"lr": 0.1, "dampening": 0.2}),
        (group, "AdamW", {"lr": 0.1}),
    ],
)
@both_ways
def test_option_or_group_changed_between_steps_acts_as_in_torch(change, name, options, fused):
    ours, theirs = new_parameters(), new_parameters()
    for parameters, module, more in (
        (ours, {"SGD": SGD, "AdamW": AdamW}, {"fused": fused}),
        (theirs, vars(torch.optim), {"foreach": False}),
    ):
        taken = parameters[:2] if change is group else parameters
        optimizer = module[name](taken, **copy.deepcopy(options), **more)
        plain_steps(parameters, optimizer, range(3))
        change(optimizer, parameters)
        plain_steps(parameters, optimizer, range(3, 6))
    assert_close(ours, theirs)


def moved(optimizer):
    """Move all but two parameters to a group of their own."""
    (first,) = optimizer.param_groups
    optimizer.param_groups.append(first | {"params": first["params"][2:], "lr": 0.01})
    del first["params"][2:]


def paused(optimizer):
    """Leave out the first group's last parameter, which has state."""
    optimizer.paused = optimizer.param_groups[0]["params"].pop()


def resumed(optimizer):
    optimizer.param_groups[0]["params"].append(optimizer.paused)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.extended)])
@both_ways
def test_a_parameter_keeps_its_step_count_when_it_changes_groups(fused, is_compiled):
    ours, theirs = new_parameters(), new_parameters()
    mine = AdamW(ours, lr=0.1, fused=fused)
    if is_compiled:
        torch._dynamo.reset()
        mine.step = torch.compile(mine.step, backend="eager")
    other = torch.optim.AdamW(theirs, lr=0.1, foreach=False)
    for parameters, optimizer in ((ours, mine), (theirs, other)):
        for number, change in enumerate((moved, paused, resumed), 1):
            plain_steps(parameters, optimizer, range(3 * number - 3, 3 * number))
            change(optimizer)
        plain_steps(parameters, optimizer, range(9, 12))
    assert_close(ours, theirs)
    pairs = zip(ours, theirs, strict=True)
    assert all(mine.state[a]["step"] == other.state[b]["step"] for a, b in pairs)


def test_a_model_may_change_its_memory_format_between_steps():
    ours, theirs = nn.Conv2d(3, 4, 2), nn.Conv2d(3, 4, 2)
    theirs.load_state_dict(ours.state_dict())
    for model, optimizer in (
        (ours, AdamW(ours.parameters(), lr=0.1)),
        (theirs, torch.optim.AdamW(theirs.parameters(), lr=0.1, foreach=False)),
    ):
        for step in range(4):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(2, 3, 4, 4)).square().sum().backward()
            optimizer.step()
            if step == 1:
                model.to(memory_format=torch.channels_last)
    assert_close(ours.parameters(), theirs.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), AdamW])
def test_model_can_be_converted_to_lower_precision_in_part(make, dtype):
    def trained(**options):
        parameters = [nn.Parameter(torch.linspace(-1, 1, 20)) for _ in range(2)]
        optimizer = make(parameters, lr=0.1, **options)
        for step in range(4):
            if step == 2:
                parameters[0].data = parameters[0].data.to(dtype)
            for parameter in parameters:
                parameter.grad = torch.linspace(step, 2, 20).to(parameter.dtype)
            optimizer.step()
        return parameters

    assert_close(trained(), trained(fused=False), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), AdamW])
def test_parameter_gets_the_same_bits_beside_a_converted_one_as_alone(make, dtype):
    def trained(count):
        parameters = [nn.Parameter(torch.linspace(-1, 1, 67)) for _ in range(count)]
        optimizer = make(parameters, lr=0.1)
        for step in range(6):
            if step == 2:
                for parameter in parameters[:-1]:
                    parameter.data = parameter.data.to(dtype)
            for parameter in parameters:
                parameter.grad = torch.linspace(step, 2, 67).to(parameter.dtype)
            optimizer.step()
        return parameters[-1]

    assert trained(2).equal(trained(1))


# State.


IN_TORCH = [name for name in CASES if CASES[name].name not in NOT_IN_TORCH]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for number, name in enumerate(IN_TORCH)
        for kind in (("foreach", "fused", None)[number % 3], ("fused", None, "foreach")[number % 3])
        if kind != "fused" or not name.startswith("Adafactor")  # Adafactor has no fused form
    ],
)
def test_state_is_exchanged_with_torch_both_ways_and_after_a_skipped_first_step(name, kind):
    more = {} if kind is None else {kind: True}
    through, alone = new_parameters(), new_parameters()
    ours = CASES[name].ours(through)
    loss_of(through, gradients(0, bad=math.inf)).backward()
    ours.step(found_inf=torch.tensor(1.0))
    for turn in range(3):
        theirs = CASES[name].reference(through, **more)
        theirs.load_state_dict(ours.state_dict())
        plain_steps(through, theirs, range(4 * turn, 4 * turn + 2))
        ours = CASES[name].ours(through)
        ours.load_state_dict(theirs.state_dict())
        plain_steps(through, ours, range(4 * turn + 2, 4 * turn + 4))
    plain_steps(alone, CASES[name].reference(alone), range(12))
    assert_close(through, alone)


def test_a_learning_rate_that_is_a_tensor_is_loaded_as_a_number():
    parameters = new_parameters()
    theirs = torch.optim.AdamW(parameters, lr=torch.tensor(0.5), foreach=False)
    ours = AdamW(parameters)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5


NO_MOMENTS = r"not one of {mine}: .*begin with new state"
NO_OPTIONS = r"not one of {mine}: its options are those of {given}; "
NO_ROOTS = r"not one of {mine}: its groups have no"
NO_AVERAGES = r"load only the model, and begin with new state"


@pytest.mark.parametrize(
    ("given", "mine", "cause"),
    [
        *((each, AdamW, NO_MOMENTS) for each in (Lion, SGD, Shampoo, Muon, AdamW8bit)),
        *((getattr(torch.optim, n), AdamW, NO_MOMENTS) for n in ("SGD", "Adagrad", "RMSprop")),
        *((AdamW, SGD, NO_MOMENTS), (AdamW, Muon, NO_MOMENTS), (AdamW8bit, Lion, NO_MOMENTS)),
        *((Adafactor, AdamW, r"not one of {mine}: its eps"), (AdamW, Adafactor, r"its eps")),
        *((each, AdamW, NO_OPTIONS) for each in (SOAP, LAMB, torch.optim.NAdam)),
        *((each, Lion, NO_OPTIONS) for each in (SOAP, AdamW, torch.optim.AdamW, torch.optim.Adam)),
        (AdamW, LAMB, NO_OPTIONS),
        *((torch.optim.AdamW, each, NO_ROOTS) for each in (Shampoo, SOAP)),
        *((each, ScheduleFreeAdamW, NO_AVERAGES) for each in (AdamW, torch.optim.AdamW)),
        (public().ScheduleFreeAdamW, ScheduleFreeAdamW, NO_AVERAGES),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}" if isinstance(kind, type) else "",
)
def test_state_of_another_optimizer_is_refused_and_changes_nothing(given, mine, cause):
    parameter = nn.Parameter(torch.randn(64, 64))
    other, optimizer = (
        kind([parameter], lr=0.01, **({"momentum": 0.9} if kind.__name__ == "SGD" else {}))
        for kind in (given, mine)
    )
    for each in (other, optimizer):
        parameter.grad = torch.randn(64, 64)
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=cause.format(mine=mine.__name__, given=given.__name__)):
        optimizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [None, False])
def test_negated_view_is_a_gradient_as_any_other(fused):
    results = []
    for make in (partial(AdamW, fused=fused), torch.optim.AdamW):
        parameter = nn.Parameter(torch.ones(5))
        optimizer = make([parameter])
        parameter.grad = torch.complex(torch.zeros(5), torch.arange(5.0)).conj().imag
        assert parameter.grad.is_neg()
        optimizer.step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results)


def test_custom_optimizer_with_options_of_another_loads_its_state():
    class Mine(Lion):
        def __init__(self, params):
            of_adamw = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 0, "weight_decay": 0, "amsgrad": 0}
            SyncFreeOptimizer.__init__(self, params, {**of_adamw, "maximize": False, "mine": 1})

    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer, other = Mine([parameter]), Mine([parameter])
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.state[parameter]["step"] == 1


@pytest.mark.parametrize(
    ("make", "option"), [(SGD, {"momentum": 0.9}), (AdamW, {"amsgrad": True})], ids=["SGD", "AdamW"]
)
def test_option_enabled_right_before_saving_is_saved(make, option):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = make([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0].update(option)
    other = make([parameter], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[parameter]["step"] == 1


def test_a_state_of_another_lion_is_kept_although_it_has_no_step():
    parameter = nn.Parameter(torch.ones(2))
    given = {"state": {0: {"exp_avg": torch.full((2,), 0.5)}}, "param_groups": [{"params": [0]}]}
    optimizer = Lion([parameter], lr=0.25)
    optimizer.load_state_dict(given)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], torch.full((2,), 0.5))
    assert optimizer.param_groups[0]["lr"] == 0.25


# Overflow and underflow.


@pytest.mark.parametrize("make", [partial(AdamW, fused=False), LAMB, ScheduleFreeAdamW])
def test_moments_that_underflow_in_float16_leave_parameters_finite(make):
    parameters = [nn.Parameter(torch.ones(8, 8, dtype=torch.float16))]
    optimizer = make(parameters, lr=1e-2)
    for step in range(5):
        give_gradients(parameters, step, scale=1e-3)
        optimizer.step()
    assert torch.isfinite(parameters[0]).all()


@pytest.mark.parametrize(("shape", "scale"), [((8, 8), None), ((8,), 2.0**16)])
@pytest.mark.parametrize("make", [Adafactor, Shampoo, SOAP])
def test_a_finite_gradient_whose_squares_overflow_changes_nothing(make, shape, scale):
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, generator=generator))
    optimizer = make([parameter], lr=1e-2)
    given = {} if scale is None else {"grad_scale": torch.tensor(scale)}
    for step in range(12):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(shape, generator=generator) * (scale or 1.0)
        if step == 6:
            parameter.grad.flatten()[3] = 1e20 * (scale or 1.0)
        kept = copy.deepcopy(optimizer.state_dict()["state"].get(0, {}))
        optimizer.step(found_inf=torch.tensor(0.0) if scale else None, **given)
        if step == 6:
            assert torch.equal(parameter, before)
            now = optimizer.state_dict()["state"][0]
            for name in kept.keys() - {"calls", "pending", "step"}:
                torch.testing.assert_close(now[name], kept[name], rtol=0, atol=0)
        elif step:  # the first step of SOAP only computes its basis
            assert torch.isfinite(parameter).all()
            assert not torch.equal(parameter, before)


@pytest.mark.parametrize("make", [Adafactor, Shampoo, SOAP])
def test_a_gradient_that_overflows_leaves_the_other_parameters_their_bits(make):
    together, alone = ([nn.Parameter(torch.ones(4, 4)) for _ in range(2)] for _ in range(2))
    for parameters in (together, alone[:1], alone[1:]):
        optimizer = make(parameters, lr=1e-2)
        for step in range(4):
            for parameter in parameters:
                parameter.grad = torch.full((4, 4), 0.5)
                if step == 2 and any(parameter is each for each in (together[0], alone[0])):
                    parameter.grad[0, 0] = 1e20
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert not torch.equal(*together)


@pytest.mark.parametrize("make", [Adafactor, Shampoo, SOAP])
def test_a_loss_scale_alone_makes_no_squares_overflow(make):
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    for parameter, scale in zip(parameters, (None, torch.tensor(2.0**66)), strict=True):
        optimizer = make([parameter], lr=1e-2)
        for _ in range(2):
            parameter.grad = torch.full((4, 4), 0.5 if scale is None else 2.0**65)
            optimizer.step(grad_scale=scale)
    assert torch.equal(*parameters)
    assert not torch.equal(parameters[0], torch.ones(4, 4))


# Torch's kernels.

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4096, 4097]
WITH_KERNELS = {
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
    return [nn.Parameter(each) for each in made]


@pytest.mark.parametrize(
    ("name", "fused", "layout", "dtype"),
    [
        (name, (None, True, False)[(n + d) % 3], list(LAYOUTS)[(n + d + n // 2) % 3], dtype)
        for n, name in enumerate(WITH_KERNELS)
        for d, dtype in enumerate(DTYPES)
    ],
)
def test_every_size_follows_the_formula_in_every_dtype_and_layout(name, fused, layout, dtype):
    ours_class, reference_class, options = WITH_KERNELS[name]
    ours = parameters_of(layout, dtype)
    wide = [nn.Parameter(each.detach().double().contiguous()) for each in ours]
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
    assert_close([each.double() for each in ours], wide, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "fault", ["no store", "no store beyond 16", "moves on a bad step", "wrong sign"]
)
def test_kernel_with_wrong_result_is_not_used(name, fault, monkeypatch):
    optimizer_class, reference_class, _ = WITH_KERNELS[name]
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
    ours = parameters_of("contiguous", torch.float32)
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    optimizer, reference = optimizer_class(ours, lr=0.1), reference_class(theirs, lr=0.1)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        our.grad = values(our, number).float()
        their.grad = our.grad.clone()
    optimizer.step(found_inf=torch.tensor(0.0))
    reference.step()
    assert calls  # the kernel was tried
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("optimizer_class", [AdamW, partial(SGD, momentum=0.9)])
def test_no_kernel_writes_past_the_end_of_smaller_state(optimizer_class):
    parameter = nn.Parameter(torch.ones(20))
    optimizer = optimizer_class([parameter])
    parameter.grad = torch.ones(20)
    optimizer.step()
    parameter.data, parameter.grad = torch.ones(4000), None
    parameter.grad = torch.ones(4000)

    with pytest.raises(RuntimeError, match=r"size of tensor a \(\d+\) must match"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4000))


# Further features of torch's optimizers.


@pytest.mark.parametrize("optimizer", [SGD, AdamW, Lion])
def test_complex_parameter_and_sparse_gradient_are_refused_and_leave_no_trace(optimizer):
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match="real parameters"):
        optimizer([parameter]).step()
    embedding = nn.Embedding(4, 2, sparse=True)
    mine = optimizer(embedding.parameters())
    for gradient in (torch.ones(4, 2).to_sparse(), None, torch.ones(4, 2)):
        embedding.weight.grad = gradient
        if gradient is not None and gradient.is_sparse:
            with pytest.raises(RuntimeError, match="dense gradients"):
                mine.step()
            assert mine.state_dict()["state"] == {}
        else:
            mine.step()
    embedding.weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        mine.step()


@both_ways
def test_backward_through_updated_parameter_is_an_error(fused):
    parameter = nn.Parameter(torch.ones(20))
    optimizer = AdamW([parameter], fused=fused)
    (parameter * parameter.detach()).sum().backward()
    before = (parameter * parameter).sum()
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


@pytest.mark.parametrize("ours", [SGD, Adam, AdamW, Adafactor])
def test_arguments_have_torchs_names_and_order(ours):
    theirs = getattr(torch.optim, ours.__name__)
    taken = inspect.signature(theirs).parameters.values()
    positional = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
    arguments = [p.default for p in positional[1:]]
    mine = ours(new_parameters(), *arguments).param_groups[0]
    group = theirs(new_parameters(), *arguments).param_groups[0]
    assert {name: mine[name] for name in group if name != "params"} == {
        name: value for name, value in group.items() if name != "params"
    }
    assert {p.name for p in taken} <= mine.keys()


def test_torchs_gradscaler_may_unscale_and_skip_steps():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter], amp_scaling=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(parameter.sum() * math.inf).backward()
    scaler.step(optimizer)
    assert optimizer.state == {}  # step was not called
    assert not pickle.loads(pickle.dumps(optimizer))._step_supports_amp_scaling
    assert AdamW([parameter])._step_supports_amp_scaling


@pytest.mark.extended
def test_a_compiled_step_follows_a_schedule_and_is_compiled_once():
    case = next(each for each in reversed(CASES.values()) if each.name == "AdamW")
    ours, theirs = new_parameters(), new_parameters()
    optimizer, reference = case.ours(ours), case.reference(theirs)
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, backend=backend)
    counts = []
    for step in range(10):
        for parameters, mine in ((ours, optimizer), (theirs, reference)):
            mine.param_groups[0]["lr"] = 0.1 / (step + 1)
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient
        compiled()
        reference.step()
        counts.append(len(compiles))
    assert_close(ours, theirs)
    # Five more learning rates. The garbage collector may delete an object that a guard refers to.
    assert counts[-1] - counts[4] <= 1
