import math

import pytest
import torch
from torch import nn

from graphstash.training.optimizers.gradients import clip_grad_norm_, clip_grad_value_
from support.optimizer_cases import gradients, new_parameters


def with_gradients(step=0, **options):
    parameters = new_parameters()
    for parameter, gradient in zip(parameters, gradients(step, **options), strict=True):
        parameter.grad = gradient
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
def test_clipping_by_norm_equals_torchs(max_norm):
    ours, theirs = with_gradients(missing=(1,)), with_gradients(missing=(1,))
    norm = clip_grad_norm_(ours, max_norm)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)


def test_clipping_by_value_equals_torchs():
    ours, theirs = with_gradients(bad=math.nan), with_gradients(bad=math.nan)
    clip_grad_value_(ours, 0.3)
    nn.utils.clip_grad_value_(theirs, 0.3)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad.nan_to_num(9), b.grad.nan_to_num(9))


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_one_parameter_alone_is_clipped(clip):
    parameter = with_gradients()[0]
    clip(parameter, 0.1)
    assert float(parameter.grad.abs().max()) < 0.101


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_a_generator_of_parameters_is_clipped(clip):
    parameters = with_gradients()
    clip((p for p in parameters), 0.1)
    assert all(float(p.grad.abs().max()) < 0.101 for p in parameters)


def test_norm_of_non_finite_gradient_is_non_finite():
    assert not torch.isfinite(clip_grad_norm_(with_gradients(bad=math.inf), 1.0))


def test_without_gradients_the_norm_is_zero():
    assert clip_grad_norm_(new_parameters(), 1.0) == 0


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_that_is_not_above_zero_is_refused(limit):
    with pytest.raises(ValueError, match="above 0"):
        clip_grad_norm_(with_gradients(), limit)
    with pytest.raises(ValueError, match="above 0"):
        clip_grad_value_(with_gradients(), limit)
