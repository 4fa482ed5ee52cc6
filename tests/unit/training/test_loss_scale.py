"""Gradients between backward and step: loss scaling and clipping equal torch's."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad

from graphstash.training.optimizers import SGD, AdamW
from graphstash.training.optimizers.gradients import LossScale, clip_grad_norm_, clip_grad_value_
from support.optimizer_cases import gradients, loss_of, new_parameters


def backward(scale, parameters, optimizer, step=0, **options):
    optimizer.zero_grad()
    scale.scale(loss_of(parameters, gradients(step, **options))).backward()


def one_step(scale, parameters, optimizer, step=0, **options):
    backward(scale, parameters, optimizer, step, **options)
    scale.step(optimizer)
    scale.update()


@settings(deadline=None, max_examples=40)
@given(
    bad=st.lists(st.sampled_from([None, math.inf, -math.inf, math.nan]), max_size=12),
    interval=st.integers(1, 4),
    factors=st.sampled_from([(2.0, 0.5), (3.0, 0.25)]),
)
def test_scale_history_equals_torchs_scaler(bad, interval, factors):
    growth, backoff = factors
    options = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    ours = LossScale(8.0, **options)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, **options)
    histories = [], []
    for scaler, make, history in (
        (ours, SGD, histories[0]),
        (theirs, torch.optim.SGD, histories[1]),
    ):
        parameters = new_parameters()
        optimizer = make(parameters, lr=0.1)
        for step, value in enumerate(bad):
            one_step(scaler, parameters, optimizer, step, bad=value)
            history.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert histories[0] == histories[1]


def test_the_scale_does_not_grow_out_of_range():
    parameters = new_parameters()
    optimizer, scale = SGD(parameters, lr=0.0), LossScale(2.0**127, growth_interval=1).to("cpu")
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    scale.step(optimizer)
    scale.update()
    assert scale.get_scale() == 2.0**127


def test_a_step_can_be_clipped_as_with_torchs_scaler():
    results = []
    for scaler, make, clip in (
        (LossScale(8.0), AdamW, clip_grad_norm_),
        (torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.AdamW, clip_grad.clip_grad_norm_),
    ):
        parameters = new_parameters()
        optimizer = make(parameters, lr=0.1)
        for step in range(6):
            backward(scaler, parameters, optimizer, step, bad=math.inf if step == 2 else None)
            scaler.unscale_(optimizer)
            clip(parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append(parameters)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_optimizers_share_a_scale_and_only_steps_with_infinity_are_skipped():
    sets = [new_parameters(), new_parameters()]
    optimizers = [SGD(sets[0], lr=0.1), AdamW(sets[1], lr=0.1)]
    scale = LossScale(8.0)
    for optimizer, parameters, bad in zip(optimizers, sets, (None, math.inf), strict=True):
        backward(scale, parameters, optimizer, bad=bad)
        scale.step(optimizer)
    scale.update()
    assert scale.get_scale() == 4
    steps = [o.state[p[0]]["step"] for o, p in zip(optimizers, sets, strict=True)]
    assert steps == [1, 0]


def test_float16_gradients_are_refused():
    parameters = new_parameters(dtype=torch.float16)
    scale = LossScale().to("cpu")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="float16"):
        scale.step(SGD(parameters))


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
    ],
)
def test_an_argument_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LossScale(**options)


def after_some_steps(scaler, make):
    parameters = new_parameters()
    optimizer = make(parameters, lr=0.1)
    for step in range(5):
        one_step(scaler, parameters, optimizer, step)
    return scaler


def test_state_is_exchanged_with_torchs_scaler():
    ours = after_some_steps(LossScale(8.0, growth_interval=3), SGD)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    again = LossScale()
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == ours.state_dict()


def test_loading_keeps_tensors_that_a_traced_step_holds():
    scale = after_some_steps(LossScale(8.0, growth_interval=3), SGD)
    tensors = list(scale.device_tensors())
    scale.load_state_dict(LossScale(32.0).state_dict())
    assert all(a is b for a, b in zip(tensors, scale.device_tensors(), strict=True))
    assert [float(t) for t in tensors] == [32.0, 0.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_deep_copy_continues_independently(copied):
    scale = after_some_steps(LossScale(8.0, growth_interval=3), SGD)
    other = copied(scale)
    before = scale.state_dict()
    assert other.state_dict() == before
    after_some_steps(other, SGD)
    assert scale.state_dict() == before
    assert other.state_dict() != before


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
def test_unscaling_divides_by_the_scale_and_finds_one_element_that_is_not_finite(bad):
    parameters = new_parameters()
    optimizer, scale = SGD(parameters), LossScale(8.0)
    backward(scale, parameters, optimizer, bad=bad)
    assert scale.unscale_(optimizer) == (bad is not None)
    if bad is None:
        for parameter, gradient in zip(parameters, gradients(0), strict=True):
            assert torch.equal(parameter.grad, gradient)
    assert scale.step(optimizer) == (bad is not None)  # returns whether the step was skipped


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (("unscale_", "unscale_"), r"call update\(\)"),
        (("step", "step"), r"call update\(\)"),
        (("step", "unscale_"), r"call update\(\)"),
        (("update",), "without a step"),
        (("zero_grad", "step"), "no gradients"),
    ],
    ids=str,
)
def test_calls_in_wrong_order_are_refused_and_recoverable(calls, text):
    parameters = new_parameters()
    optimizer, scale = SGD(parameters), LossScale()
    backward(scale, parameters, optimizer)
    ways = {
        "unscale_": lambda: scale.unscale_(optimizer),
        "step": lambda: scale.step(optimizer),
        "update": scale.update,
        "zero_grad": optimizer.zero_grad,
    }
    *first, last = calls
    for call in first:
        ways[call]()
    with pytest.raises(RuntimeError, match=text):
        ways[last]()
    if "step" not in first and "unscale_" not in first:
        one_step(scale, parameters, optimizer)


def test_lists_of_losses_are_scaled_one_by_one():
    scale = LossScale(8.0)
    with pytest.raises(RuntimeError, match="on no device"):
        _ = scale.value
    losses = [torch.tensor(1.0), (torch.tensor(2.0), torch.tensor(3.0))]
    assert scale.scale(losses) == [8.0, (16.0, 24.0)]
    assert list(scale.scale(iter(losses[1]))) == [16.0, 24.0]
    narrow = torch.tensor(2.0, dtype=torch.float16)
    assert LossScale(2.0**17).scale(narrow) == 2.0**18  # in float32
    with pytest.raises(TypeError, match="got 5"):
        scale.scale(5)


@pytest.mark.parametrize("new", [4.0, torch.tensor(4.0, dtype=torch.float64)], ids=repr)
def test_a_new_scale_replaces_the_rule_as_in_torchs_scaler(new):
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    ours = LossScale(8.0, growth_interval=2)
    for scaler in (ours, theirs):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = SGD([parameter], lr=0.1)
        for step in range(4):
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
            scaler.update(new if step == 1 else None)
    assert ours.get_scale() == theirs.get_scale()
    assert ours.state_dict() == theirs.state_dict()


@pytest.mark.parametrize("new", [0.0, -1.0, math.inf, math.nan, torch.ones(2)], ids=repr)
def test_a_new_scale_out_of_range_is_refused(new):
    scale = LossScale()
    scale.to("cpu")
    with pytest.raises(ValueError, match="new_scale must be"):
        scale.update(new)


def test_a_loss_scale_that_is_not_enabled_changes_nothing():
    scale = LossScale(8.0, enabled=False)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5)  # has no found_inf argument
    loss = parameter.sum()
    assert scale.scale(loss) is loss
    loss.backward()
    scale.unscale_(optimizer)
    scale.step(optimizer)
    scale.update()
    assert parameter.tolist() == [0.5, 0.5]
    assert (scale.is_enabled(), scale.get_scale(), scale.state_dict()) == (False, 1.0, {})
    scale.load_state_dict({})
    with pytest.raises(RuntimeError, match="not enabled"):
        LossScale().load_state_dict({})


# Clipping.


def with_gradients(**options):
    parameters = new_parameters()
    for parameter, gradient in zip(parameters, gradients(0, **options), strict=True):
        parameter.grad = gradient
    return parameters


CLIPS = {
    "norm": (clip_grad_norm_, clip_grad.clip_grad_norm_),
    "value": (clip_grad_value_, clip_grad.clip_grad_value_),
}


@pytest.mark.parametrize(
    ("kind", "limit", "given", "options"),
    [
        ("norm", 0.5, list, {"missing": (1,)}),
        ("norm", math.inf, iter, {}),
        ("norm", 1.0, list, {"bad": math.inf}),
        ("norm", 0.1, lambda parameters: parameters[0], {}),
        ("value", 0.3, iter, {"bad": math.nan}),
        ("value", 0.1, lambda parameters: parameters[0], {}),
    ],
)
def test_clipping_equals_torchs(kind, limit, given, options):
    ours, theirs = with_gradients(**options), with_gradients(**options)
    clip, reference = CLIPS[kind]
    norms = clip(given(ours), limit), reference(given(theirs), limit)
    if kind == "norm":
        assert torch.equal(*norms)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is b.grad is None) or torch.equal(a.grad.nan_to_num(9), b.grad.nan_to_num(9))


def test_norm_without_gradients_is_zero_and_limit_must_be_above_zero():
    assert clip_grad_norm_(new_parameters(), 1.0) == 0
    for clip, _ in CLIPS.values():
        for limit in (0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match="above 0"):
                clip(with_gradients(), limit)
