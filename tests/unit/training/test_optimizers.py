import copy
import inspect
import math
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphstash.errors import ConfigError
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
from graphstash.training.optimizers.gradients import LossScale, clip_grad_norm_
from support.device_reads import Reads
from support.optimizer_cases import (
    BY_HAND,
    CASES,
    NOT_IN_TORCH,
    SCHEDULES,
    SHAPES,
    USUAL,
    WITH_KERNELS,
    gradients,
    loss_of,
    new_parameters,
    train_scheduled,
)

OPTIMIZERS = [SGD, Adam, AdamW, LAMB, Lion, Adafactor, ScheduleFreeAdamW]


BAD = {0: math.inf, 5: math.inf, 7: math.nan}


both_ways = pytest.mark.parametrize("fused", [None, False])


def selected(cases):
    """Parameters for these cases with kernels; what is not usual is extended."""
    extended = pytest.mark.extended
    return pytest.mark.parametrize(
        ("name", "fused"),
        [pytest.param(*each, marks=() if each in USUAL else extended) for each in cases],
    )


every_case = selected(WITH_KERNELS)
every_exchanged = selected(
    [each for each in WITH_KERNELS if CASES[each[0]].name not in NOT_IN_TORCH]
)
EVERY_SCHEDULE = [*SCHEDULES, *BY_HAND]
SCHEDULED = [
    pytest.param(
        schedule,
        ("SGD", "AdamW")[(number + other) % 2],
        (None, False)[(number // 2 + of) % 2],
        marks=pytest.mark.extended if other or of else (),
    )
    for number, schedule in enumerate(EVERY_SCHEDULE)
    for other in range(2)
    for of in range(2)
]
"""Each schedule with one optimizer and one form of it; in `make test-all` with each."""


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def train(parameters, optimizer, scaler, *, steps=range(12), bad=BAD, missing=(), after=None):
    """Trains with a loss scale; gives the scale after every step."""
    history = []
    for step in steps:
        lacking = missing[step] if step < len(missing) else ()
        optimizer.zero_grad()
        factors = gradients(step, bad=bad.get(step), missing=lacking)
        scaler.scale(loss_of(parameters, factors)).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
        if after:
            after(step)
    return history


def plain_steps(parameters, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(parameters, gradients(step)).backward()
        optimizer.step()


def torchs_scaler(growth_interval):
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=growth_interval)


# The semantics of a bad step.


@every_case
def test_trajectory_equals_torch_with_its_scaler(name, fused):
    ours, theirs = new_parameters(), new_parameters()
    history = train(ours, CASES[name].ours(ours, fused=fused), LossScale(8.0, growth_interval=3))
    expected = train(theirs, CASES[name].reference(theirs), torchs_scaler(3))
    assert_close(ours, theirs)
    assert history == expected
    assert all(torch.isfinite(p).all() for p in ours)


STEP_KINDS = st.tuples(
    st.sampled_from([None, None, math.inf, -math.inf, math.nan]),
    st.sets(st.integers(0, len(SHAPES) - 1), max_size=len(SHAPES) - 1),
)


@settings(max_examples=60)
@given(
    name=st.sampled_from(list(CASES)),
    fused=st.sampled_from([None, False]),
    kinds=st.lists(STEP_KINDS, min_size=1, max_size=10),
    growth_interval=st.integers(1, 4),
)
def test_skipped_steps_and_missing_gradients_are_handled_as_in_torch(
    name, fused, kinds, growth_interval
):
    bad = {step: value for step, (value, _) in enumerate(kinds) if value is not None}
    missing = [tuple(lacking) for _, lacking in kinds]
    arguments = {"steps": range(len(kinds)), "bad": bad, "missing": missing}
    ours, theirs = new_parameters(), new_parameters()
    optimizer, reference = CASES[name].ours(ours, fused=fused), CASES[name].reference(theirs)
    scale = LossScale(8.0, growth_interval=growth_interval)
    history = train(ours, optimizer, scale, **arguments)
    assert history == train(theirs, reference, torchs_scaler(growth_interval), **arguments)
    assert_close(ours, theirs)
    for number, (parameter, other) in enumerate(zip(ours, theirs, strict=True)):
        counted = sum(s not in bad and number not in missing[s] for s in range(len(kinds)))
        assert optimizer.state[parameter].get("step", 0) == counted
        if "step" in reference.state[other]:
            assert reference.state[other]["step"] == counted


BAD_VALUES = [1.0, 2.0, math.nan, math.inf, True, 3, [1.0]]


@pytest.mark.parametrize("value", [*BAD_VALUES, 0.0, False, 0, [0.0]], ids=str)
@both_ways
def test_nonzero_found_inf_skips_the_step(value, fused):
    parameters = new_parameters()
    optimizer = SGD(parameters, lr=0.1, fused=fused)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(found_inf=torch.tensor(value))
    moved = 0.0 if value in BAD_VALUES else 0.1
    assert_close(parameters, [parameter - moved for parameter in new_parameters()])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(torch.zeros(2), ValueError, "single number"), (True, TypeError, "must be a tensor")],
)
def test_a_found_inf_that_is_not_one_number_on_the_device_is_refused(value, error, text):
    with pytest.raises(error, match=text):
        SGD(new_parameters()).step(found_inf=value)


# Nobody reads the device.


@pytest.mark.parametrize("clipped", [False, True])
@every_case
def test_no_step_reads_the_device(name, fused, clipped):
    parameters = new_parameters()
    optimizer, scale = CASES[name].ours(parameters, fused=fused), LossScale(8.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with Reads() as reads:
        for step in range(6):
            optimizer.zero_grad()
            factors = gradients(step, bad=BAD.get(step))
            scale.scale(loss_of(parameters, factors)).backward()
            if clipped:
                scale.unscale_(optimizer)
                clip_grad_norm_(parameters, 0.5)
            scale.step(optimizer)
            scale.update()
            schedule.step()
    assert reads.count == 0


def test_counter_of_device_reads_counts_reads_of_torch_optimizers():
    parameters = new_parameters()
    with Reads() as reads:
        train(parameters, torch.optim.SGD(parameters), torchs_scaler(3), steps=range(1))
    assert reads.count > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torchs_scaler_works_without_device_read(optimizer):
    parameters = new_parameters()
    mine, scaler = optimizer(parameters, lr=0.1), torchs_scaler(3)
    for step in range(6):
        mine.zero_grad()
        factors = gradients(step, bad=BAD.get(step))
        scaler.scale(loss_of(parameters, factors)).backward()
        with Reads() as reads:
            scaler.step(mine)
        scaler.update()
        assert reads.count == 0
    other = new_parameters()
    train(other, optimizer(other, lr=0.1), LossScale(8.0, growth_interval=3), steps=range(6))
    assert_close(parameters, other)


# Schedules.


@pytest.mark.parametrize(("schedule", "name", "fused"), SCHEDULED)
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


@both_ways
def test_a_learning_rate_may_be_a_tensor_on_the_host(fused):
    ours, theirs = new_parameters(), new_parameters()
    for parameters, optimizer in (
        (ours, AdamW(ours, lr=torch.tensor(0.1), fused=fused)),
        (theirs, torch.optim.AdamW(theirs, lr=torch.tensor(0.1), foreach=False)),
    ):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        train_scheduled(optimizer, schedule, parameters)
    assert_close(ours, theirs)


@both_ways
def test_momentum_can_be_enabled_later(fused):
    ours, theirs = new_parameters(), new_parameters()
    for parameters, optimizer in (
        (ours, SGD(ours, lr=0.1, dampening=0.2, fused=fused)),
        (theirs, torch.optim.SGD(theirs, lr=0.1, dampening=0.2, foreach=False)),
    ):
        plain_steps(parameters, optimizer, range(3))
        optimizer.param_groups[0]["momentum"] = 0.9
        plain_steps(parameters, optimizer, range(3, 6))
    assert_close(ours, theirs)


# State.


@every_exchanged
def test_state_is_exchanged_with_torch_both_ways(name, fused):
    through = new_parameters()
    theirs = CASES[name].reference(through)
    plain_steps(through, theirs, range(4))
    ours = CASES[name].ours(through, fused=fused)
    ours.load_state_dict(theirs.state_dict())
    plain_steps(through, ours, range(4, 8))
    theirs = CASES[name].reference(through)
    theirs.load_state_dict(ours.state_dict())
    plain_steps(through, theirs, range(8, 12))
    alone = new_parameters()
    plain_steps(alone, CASES[name].reference(alone), range(12))
    assert_close(through, alone)


@every_exchanged
def test_torch_loads_our_state_after_skipped_first_step(name, fused):
    parameters = new_parameters()
    ours = CASES[name].ours(parameters, fused=fused)
    train(parameters, ours, LossScale(8.0), steps=[0])
    theirs = CASES[name].reference(parameters)
    theirs.load_state_dict(ours.state_dict())
    plain_steps(parameters, theirs, range(1, 5))
    alone = new_parameters()
    plain_steps(alone, CASES[name].reference(alone), range(1, 5))
    assert_close(parameters, alone)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("name", ["SGD-lr=0.1-momentum=0.5", "AdamW-lr=0.01-amsgrad=True"])
def test_state_is_exchanged_with_every_form_of_torchs(name, kind):
    through, alone = new_parameters(), new_parameters()
    theirs, ours = CASES[name].reference(through, **{kind: True}), CASES[name].ours(through)
    plain_steps(through, theirs, range(3))
    ours.load_state_dict(theirs.state_dict())
    plain_steps(through, ours, range(3, 6))
    theirs.load_state_dict(ours.state_dict())
    plain_steps(through, theirs, range(6, 9))
    plain_steps(alone, CASES[name].reference(alone), range(9))
    assert_close(through, alone)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_parameter_has_a_step_of_its_own_in_a_state_dictionary(optimizer):
    parameters = new_parameters()
    mine = optimizer(parameters)
    plain_steps(parameters, mine, range(2))
    steps = [state["step"] for state in mine.state_dict()["state"].values()]
    assert [float(step) for step in steps] == [2.0] * 4
    assert len({step.data_ptr() for step in steps}) == 4


def test_a_learning_rate_that_is_a_tensor_is_loaded_as_a_number():
    parameters = new_parameters()
    theirs = torch.optim.AdamW(parameters, lr=torch.tensor(0.5), foreach=False)
    ours = AdamW(parameters)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 0.5


@both_ways
def test_a_group_may_be_added_later(fused):
    ours, theirs = new_parameters(), new_parameters()
    for parameters, optimizer in (
        (ours, AdamW(ours[:2], lr=0.1, fused=fused)),
        (theirs, torch.optim.AdamW(theirs[:2], lr=0.1, foreach=False)),
    ):
        plain_steps(parameters, optimizer, range(3))
        optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})
        plain_steps(parameters, optimizer, range(3, 6))
    assert_close(ours, theirs)


# Parameters of all kinds.


def test_a_step_on_a_slice_leaves_the_rest_of_its_memory_alone():
    whole = torch.zeros(4, 8)
    parameter = nn.Parameter(whole[:, :4])
    parameter.grad = torch.ones(4, 4)
    SGD([parameter], lr=0.1).step()
    assert not whole[:, 4:].any()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_model_may_change_its_memory_format_between_steps(memory_format):
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
                model.to(memory_format=memory_format)
    assert_close(ours.parameters(), theirs.parameters())


@every_case
def test_float64_parameters_are_updated_in_float64(name, fused):
    results = []
    for optimizer in (lambda p: CASES[name].ours(p, fused=fused), CASES[name].reference):
        parameters = new_parameters(dtype=torch.float64)
        mine = optimizer(parameters)
        for step in range(6):
            for parameter, g in zip(parameters, gradients(step, dtype=torch.float64), strict=True):
                parameter.grad = g
            mine.step()
        results.append(parameters)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@both_ways
def test_dtypes_may_be_mixed_in_a_group(fused):
    parameters = [
        nn.Parameter(torch.ones(shape, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for shape in ((), (2,))
    ]
    optimizer = AdamW(parameters, lr=0.5, weight_decay=0.0, fused=fused)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        expected = torch.full_like(parameter, 0.5)
        torch.testing.assert_close(parameter, expected, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), AdamW])
def test_model_can_be_converted_to_lower_precision_in_part(make, dtype):
    def trained(**options):
        parameters = [nn.Parameter(torch.linspace(-1, 1, 20)) for _ in range(2)]
        optimizer = make(parameters, lr=0.1, **options)
        for step in range(4):
            if step == 2:
                parameters[1].data = parameters[1].data.to(dtype)
            for parameter in parameters:
                parameter.grad = torch.linspace(step, 2, 20).to(parameter.dtype)
            optimizer.step()
        return parameters

    for ours, expected in zip(trained(), trained(fused=False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 1.0])
@pytest.mark.parametrize("make", [partial(AdamW, fused=False), LAMB, ScheduleFreeAdamW])
def test_float16_parameters_stay_finite_and_near_those_in_float32(make, size):
    generator = torch.Generator().manual_seed(0)
    wide = nn.Parameter(torch.randn(8, 8, generator=generator).half().float())
    half = nn.Parameter(wide.detach().half())
    optimizers = [make([parameter], lr=1e-2) for parameter in (wide, half)]
    for _ in range(5):
        half.grad = (torch.randn(8, 8, generator=generator) * size).half()
        wide.grad = half.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.isfinite(half).all()
    if size == 1:  # else moments that are kept in float16 become 0
        torch.testing.assert_close(half.detach().float(), wide.detach(), rtol=0, atol=0.02)


@pytest.mark.parametrize("scale", [None, 2.0**16])
@pytest.mark.parametrize("make", [Adafactor, Shampoo, SOAP])
@pytest.mark.parametrize("shape", [(8, 8), (8,)])
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
        elif step:  # the first step of SOAP only begins
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
            optimizer.step(found_inf=None if scale is None else torch.tensor(0.0), grad_scale=scale)
    assert torch.equal(*parameters)
    assert not torch.equal(parameters[0], torch.ones(4, 4))


def moments_of(kind, parameters):
    options = {"momentum": 0.9} if kind in {SGD, torch.optim.SGD} else {}
    return kind(parameters, lr=0.01, **options)


@pytest.mark.parametrize(
    ("given", "mine"),
    [
        *((kind, AdamW) for kind in (Lion, SGD, Shampoo, Muon, AdamW8bit, Adafactor)),
        *((kind, AdamW) for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)),
        *((AdamW, kind) for kind in (SGD, Muon, Adafactor)),
        (AdamW8bit, Lion),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_state_without_its_moments_is_refused_and_changes_nothing(given, mine):
    parameter = nn.Parameter(torch.randn(64, 64))
    other, optimizer = moments_of(given, [parameter]), moments_of(mine, [parameter])
    for each in (other, optimizer):
        parameter.grad = torch.randn(64, 64)
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"not one of {mine.__name__}: .*begin with new state"):
        optimizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


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


@pytest.mark.parametrize(
    ("given", "mine"),
    [
        *((kind, AdamW) for kind in (SOAP, LAMB, torch.optim.NAdam)),
        *((kind, Lion) for kind in (SOAP, AdamW, torch.optim.AdamW, torch.optim.Adam)),
        (AdamW, LAMB),
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_state_with_the_same_names_is_refused_by_the_options_of_its_maker(given, mine):
    parameter = nn.Parameter(torch.randn(8, 8))
    other, optimizer = given([parameter]), mine([parameter])
    for each in (other, optimizer):
        parameter.grad = torch.randn(8, 8)
        each.step()
    before = copy.deepcopy(optimizer.state_dict())
    expected = rf"not one of {mine.__name__}: its options are those of {given.__name__}; "
    with pytest.raises(ConfigError, match=expected):
        optimizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


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


@pytest.mark.parametrize(("given", "mine"), [(Adafactor, AdamW), (AdamW, Adafactor)])
def test_options_of_another_kind_are_refused_before_the_first_step(given, mine):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = mine([parameter])
    with pytest.raises(ValueError, match=rf"not one of {mine.__name__}: its eps"):
        optimizer.load_state_dict(given([parameter]).state_dict())
    assert optimizer.param_groups[0]["eps"] == optimizer.defaults["eps"]


@pytest.mark.parametrize(
    ("make", "option"),
    [(SGD, {"momentum": 0.9}), (AdamW, {"amsgrad": True})],
    ids=["SGD", "AdamW"],
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_complex_parameter_is_refused(optimizer):
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(RuntimeError, match="real parameters"):
        optimizer([parameter]).step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_sparse_gradient_is_refused_and_leaves_no_trace(optimizer):
    embedding = nn.Embedding(4, 2, sparse=True)
    mine = optimizer(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="dense gradients"):
        mine.step()
    embedding.zero_grad()
    mine.step()
    assert mine.state_dict()["state"] == {}
    embedding.weight.grad = torch.ones(4, 2)
    mine.step()
    embedding.weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(RuntimeError, match="dense gradients"):
        mine.step()


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_below_precision_of_parameter_accumulate(dtype):
    steps = 1.0 - torch.finfo(dtype).eps / 16 * 64
    results = []
    for master in (False, True):
        parameter = nn.Parameter(torch.ones(40, dtype=dtype))
        optimizer = SGD([parameter], lr=torch.finfo(dtype).eps / 16, master_weights=master)
        for _ in range(64):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        results.append(float(parameter[0]))
    assert results == [1.0, pytest.approx(steps)]


# What else torch's optimizers do.


@both_ways
def test_backward_through_updated_parameter_is_an_error(fused):
    parameter = nn.Parameter(torch.ones(20))
    optimizer = AdamW([parameter], fused=fused)
    (parameter * parameter.detach()).sum().backward()
    before = (parameter * parameter).sum()
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_closure_is_called_with_gradients_and_its_loss_returned():
    parameters = new_parameters()
    optimizer = SGD(parameters, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(parameters, gradients(0))
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == float(loss_of(new_parameters(), gradients(0)))
    assert optimizer.state[parameters[0]]["step"] == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_step_hooks_are_called(optimizer):
    parameters = new_parameters()
    mine, calls = optimizer(parameters), []
    mine.register_step_pre_hook(lambda *_: calls.append("before"))
    mine.register_step_post_hook(lambda *_: calls.append("after"))
    plain_steps(parameters, mine, range(1))
    assert calls == ["before", "after"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD, torch.optim.SGD),
        (Adam, torch.optim.Adam),
        (AdamW, torch.optim.AdamW),
        (Adafactor, torch.optim.Adafactor),
    ],
)
def test_arguments_have_torchs_names_and_order(ours, theirs):
    taken = inspect.signature(theirs).parameters.values()
    positional = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
    values = [p.default for p in positional[1:]]
    mine = ours(new_parameters(), *values)
    group = theirs(new_parameters(), *values).param_groups[0]
    assert {name: mine.param_groups[0][name] for name in group if name != "params"} == {
        name: value for name, value in group.items() if name != "params"
    }
    assert {p.name for p in taken} <= {"params", *mine.defaults}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_options_without_effect_are_accepted_and_unknown_ones_named(optimizer):
    mine = optimizer(new_parameters(), foreach=False, capturable=True, differentiable=False)
    plain_steps(new_parameters(), mine, range(1))
    with pytest.raises(ValueError, match="cannot be differentiable"):
        optimizer(new_parameters(), differentiable=True)
    with pytest.raises(ValueError, match="fused and foreach"):
        optimizer(new_parameters(), foreach=True, fused=True)
    with pytest.raises(TypeError, match="has no option fuse"):
        optimizer(new_parameters(), fuse=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_misspelt_option_of_a_group_is_refused(optimizer):
    groups = [{"params": new_parameters(), "weight_deacy": 0.0}]
    with pytest.raises(ValueError, match=r"no option weight_deacy \(groups have params, lr"):
        optimizer(groups)
    resumed = [{"params": new_parameters(), "initial_lr": 0.1, "name": "biases"}]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer(resumed), 2, last_epoch=4)
    assert schedule.last_epoch == 5


def test_gradscaler_can_be_left_to_unscale_and_to_skip():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter], amp_scaling=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(parameter.sum() * math.inf).backward()
    scaler.step(optimizer)
    assert optimizer.state == {}  # step was not called
    assert not pickle.loads(pickle.dumps(optimizer))._step_supports_amp_scaling
    assert AdamW([parameter])._step_supports_amp_scaling


@pytest.mark.parametrize(
    "name",
    [
        "AdamW-lr=0.01-amsgrad=True",
        pytest.param("SGD-lr=0.1-momentum=0.5", marks=pytest.mark.extended),
    ],
)
def test_a_compiled_step_follows_a_schedule_and_is_compiled_once(name):
    ours, theirs = new_parameters(), new_parameters()
    optimizer, reference = CASES[name].ours(ours), CASES[name].reference(theirs)
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(optimizer.step, backend=backend)
    counts = []
    for step in range(20):
        for parameters, mine in ((ours, optimizer), (theirs, reference)):
            mine.param_groups[0]["lr"] = 0.1 / (step + 1)
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = gradient
        compiled()
        reference.step()
        counts.append(len(compiles))
    assert_close(ours, theirs)
    # Ten more learning rates; the collector may take an object away that a guard looks at.
    assert counts[-1] - counts[9] <= 1
