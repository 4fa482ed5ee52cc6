"""One job trains on torch_xla in many ways; the tests compare with plain torch."""

import math
import warnings

import pytest
import torch
from torch import nn

from graphstash.training import optimizers
from graphstash.training.optimizers.gradients import clip_grad_norm_, clip_grad_value_
from support.jobs import JOB
from support.optimizer_cases import (
    BY_HAND,
    CASES,
    NOT_IN_TORCH,
    SCHEDULES,
    SHAPES,
    gradients,
    loss_of,
    new_parameters,
    train_scheduled,
)

pytestmark = pytest.mark.extended

BAD = {0: math.inf, 5: math.inf, 7: math.nan}
EXCHANGED = [name for name, case in CASES.items() if case.name not in NOT_IN_TORCH]
OPTIMIZERS = ["SGD", "Adam", "AdamW", "LAMB", "Lion", "Adafactor", "ScheduleFreeAdamW"]
SCRIPT = JOB.with_name("optimizer_job.py")


@pytest.fixture(scope="module")
def report(jobs, tmp_path_factory):
    directory = tmp_path_factory.mktemp("optimizers")
    parts = [
        jobs.start(directory / name, option, "matrix", script=SCRIPT, under="")
        for name, option in (("matrix", "--only"), ("rest", "--but"))
    ]
    reports = [part.finish().report for part in parts]
    return reports[0] | reports[1]


def assert_close(numbers, parameters, *, atol=1e-6, rtol=0.0):
    for ours, theirs in zip(numbers, parameters, strict=True):
        flat = theirs.detach().double().flatten()
        expected = torch.tensor(ours, dtype=torch.float64)
        torch.testing.assert_close(expected, flat, rtol=rtol, atol=atol)


def assert_one_graph(counts, *, compiles_at_most=1):
    """Compiles, executions and reads: one graph, computed once a step, and nobody looks."""
    assert counts[0][0] <= compiles_at_most
    assert all(step[0] == 0 for step in counts[1:])
    assert all(step[1:3] == [1, 0] for step in counts)


def train(parameters, optimizer, scaler, *, steps=12, bad=BAD, clip=None):
    history = []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(parameters, gradients(step, bad=bad.get(step)))).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip(parameters)
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    return history


def torchs_scaler():
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def plain_steps(parameters, optimizer, steps, *, missing=None, dtype=torch.float32):
    for step in steps:
        optimizer.zero_grad()
        factors = gradients(step, missing=(missing or {}).get(step, ()), dtype=dtype)
        loss_of(parameters, factors).backward()
        optimizer.step()


@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_is_that_of_torch_with_its_scaler(report, name):
    parameters = new_parameters()
    history = train(parameters, CASES[name].reference(parameters), torchs_scaler())
    assert_close(report["matrix"][name]["parameters"], parameters)
    assert report["matrix"][name]["scales"] == history


@pytest.mark.parametrize("name", CASES)
def test_a_bad_step_changes_no_bit(report, name):
    assert report["matrix"][name]["unchanged"] == {"0": True, "5": True, "7": True}
    assert report["matrix"][name]["steps"] == [9]


@pytest.mark.parametrize("name", CASES)
def test_all_steps_are_one_graph_and_good_and_bad_ones_are_the_same(report, name):
    assert_one_graph(report["matrix"][name]["counts"])


@pytest.mark.parametrize("name", CASES)
def test_looking_at_a_run_compiles_nothing_and_changes_nothing(report, name):
    assert report["matrix"][name]["compiles_again"] == 0
    assert report["matrix"][name]["again"] == report["matrix"][name]["parameters"]


def test_betas_weight_decay_and_dampening_are_no_part_of_the_graph(report):
    compiles = {name: run["counts"][0][0] for name, run in report["matrix"].items()}
    for name in (
        "SGD-lr=0.1-weight_decay=0.1",
        "SGD-lr=0.1-momentum=0.5-weight_decay=0.1-dampening=0.1",
        "Adam-lr=0.01-betas=(0.5, 0.9)",
        "Adam-lr=0.01-betas=(0.0, 0.9)",
        "AdamW-lr=0.01-weight_decay=0.1",
        "LAMB-lr=0.01-betas=(0.5, 0.9)-weight_decay=0.1",
    ):
        assert compiles[name] == 0


@pytest.mark.parametrize("schedule", [*SCHEDULES, *BY_HAND])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_schedule_compiles_nothing_and_goes_as_with_torchs_optimizer(report, name, schedule):
    run = report["scheduled"][f"{name} {schedule}"]
    parameters = new_parameters()
    options = {"lr": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    optimizer = getattr(torch.optim, name)(parameters, **options, foreach=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a SequentialLR warns of itself
        train_scheduled(optimizer, (SCHEDULES | BY_HAND)[schedule](optimizer), parameters)
    # The steps are as long as a parameter, or ten times that.
    assert_close(run["parameters"], parameters, atol=2e-6, rtol=2e-6)
    first = schedule == next(iter(SCHEDULES))  # the others run its graph
    assert_one_graph(run["counts"], compiles_at_most=1 if first else 0)


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        ("norm", lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5)),
        ("value", lambda parameters: nn.utils.clip_grad_value_(parameters, 0.3)),
    ],
)
def test_a_clipped_step_is_one_graph_and_equals_torchs(report, kind, clip):
    run = report["clipped"][kind]
    parameters = new_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=False)
    train(parameters, optimizer, torchs_scaler(), steps=6, clip=clip)
    assert_close(run["parameters"], parameters)
    assert_one_graph(run["counts"])


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_clipped_gradients_equal_torchs(report, kind):
    parameters = new_parameters()
    for parameter, gradient in zip(parameters, gradients(4), strict=True):
        parameter.grad = gradient
    clip = {
        "norm": lambda p: clip_grad_norm_(p, 0.5),
        "value": lambda p: clip_grad_value_(p, 0.3),
    }[kind]
    norm = clip(parameters)
    assert_close(report["clipped"][kind]["gradients"], [p.grad for p in parameters])
    if norm is not None:
        assert report["clipped"][kind]["norms"][4] == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_writes_over_everything_that_it_changes(report, name):
    run = report["aliases"][name]
    assert run["aliased"] == run["changed"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_tensor_stays_behind_on_the_device(report, name):
    assert len(set(report["aliases"][name]["live"])) == 1


def test_what_came_from_detach_and_state_dict_follows_the_parameter(report):
    assert report["aliases_of_parameters_follow"] == [[1.5] * 3] * 4


@pytest.mark.parametrize("name", EXCHANGED)
def test_torch_goes_on_from_ours_and_ours_from_torch(report, name):
    parameters = new_parameters()
    plain_steps(parameters, CASES[name].reference(parameters), range(12))
    assert_close(report["exchanged"][name]["parameters"], parameters)
    assert_one_graph(report["exchanged"][name]["counts"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_goes_on_to_the_bit_and_alone(report, name):
    (itself, _), *copies = report["copies"][name]
    for copied, original in copies:
        assert copied == itself
        assert original != itself


def test_a_group_may_be_added_later(report):
    parameters = new_parameters()
    optimizer = torch.optim.AdamW(parameters[:2], lr=0.1, foreach=False)
    plain_steps(parameters, optimizer, range(3))
    optimizer.add_param_group({"params": parameters[2:], "lr": 0.01})
    plain_steps(parameters, optimizer, range(3, 6))
    assert_close(report["added_group"]["parameters"], parameters)
    assert_one_graph(report["added_group"]["counts"])


@pytest.mark.parametrize("scaler", ["torch", "torch_xla"])
def test_other_scalers_drive_ours_without_a_read(report, scaler):
    parameters = new_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=False)
    history = train(parameters, optimizer, torchs_scaler(), steps=8)
    assert_close(report["scalers"][scaler]["parameters"], parameters)
    assert report["scalers"][scaler]["scale"] == history[-1]
    # Their scale is born in the first step, whose graph is another one for it.
    assert_one_graph(report["scalers"][scaler]["counts"][1:])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float64_parameters_are_updated_in_float64(report, name):
    run = report["dtypes"][f"{name} torch.float64"]
    parameters = new_parameters(dtype=torch.float64)
    optimizer = getattr(optimizers, name)(parameters, lr=0.1)
    plain_steps(parameters, optimizer, range(3), dtype=torch.float64)
    assert_close(run["parameters"], parameters, atol=1e-9)
    assert run["dtypes"] == ["torch.float32", "torch.float64"]  # the step is the narrow one
    assert_one_graph(run["counts"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_narrow_parameters_and_their_state_stay_narrow(report, name):
    run = report["dtypes"][f"{name} torch.bfloat16"]
    parameters = new_parameters()
    plain_steps(parameters, getattr(optimizers, name)(parameters, lr=0.1), range(3))
    assert_close(run["parameters"], parameters, atol=0.05, rtol=0.02)
    assert run["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert_one_graph(run["counts"])


def test_dtypes_may_be_mixed_in_a_group(report):
    values = report["dtypes"]["mixed"]
    assert all(value == pytest.approx(0.7, abs=0.02) for number in values for value in number)


def test_found_inf_may_be_of_any_kind(report):
    left_out = report["found_inf_of_any_kind"]
    good = {"0.0": False, "False": False, "0": False, "[0.0]": False}
    bad = {"1.0": True, "nan": True, "True": True, "3": True, "[1.0]": True}
    assert left_out == good | bad


def test_a_parameter_without_a_gradient_keeps_its_own_step(report):
    for name, run in report["missing_gradients"].items():
        missing = {int(step): numbers for step, numbers in run["missing"].items()}
        parameters = new_parameters()
        reference = CASES[name].reference(parameters)
        plain_steps(parameters, reference, range(8), missing=missing)
        assert_close(run["parameters"], parameters)
        lacking = [sum(n in numbers for numbers in missing.values()) for n in range(len(SHAPES))]
        assert run["steps"] == [8 - count for count in lacking]


def test_micro_batches_add_up_to_their_batch(report):
    whole, parts = report["accumulated"]
    assert_close(parts["parameters"], [torch.tensor(p) for p in whole["parameters"]])
    assert_one_graph(parts["counts"])


def test_the_scale_does_not_grow_out_of_range(report):
    assert report["scale_alone"]["to the limit"] == [2.0**127] * 4


def test_the_scale_goes_on_from_torchs_scaler_in_the_same_tensors(report):
    assert report["scale_alone"]["same tensors"]
    assert report["scale_alone"]["state"] == report["scale_alone"]["theirs"]


def test_unscaling_divides_by_the_scale(report):
    values = {value for numbers in report["scale_alone"]["unscaled"] for value in numbers}
    assert values == {1 / 32}
    assert report["scale_alone"]["found_inf"] == 0


def test_two_optimizers_share_a_scale_and_only_the_bad_one_is_left_out(report):
    assert report["two_optimizers"] == {"scale": 2, "steps": [3, 3]}


def test_muon_runs_in_one_graph_and_rounds_as_bfloat16_does(report):
    run = report["matrices_orthogonalized"]
    host = [torch.tensor(numbers) for numbers in run["host"]["parameters"]]
    assert_close(run["here"]["parameters"], host, atol=4 * 0.02 * 0.05)
    assert_one_graph(run["here"]["counts"])


def test_a_switch_to_averages_and_back_changes_neither_the_steps_nor_their_graph(report):
    run = report["switched"]
    parameters = new_parameters()
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(2.0)
    optimizer = optimizers.ScheduleFreeAdamW(parameters, lr=0.05)
    scale, averages = torchs_scaler(), []
    for part in range(3):
        steps = range(4 * part, 4 * part + 4)
        for step in steps:
            optimizer.zero_grad()
            scale.scale(loss_of(parameters, gradients(step, bad=BAD.get(step)))).backward()
            scale.step(optimizer)
            scale.update()
        optimizer.eval()
        averages.append([parameter.detach().clone() for parameter in parameters])
        optimizer.train()
    assert_close(run["parameters"], parameters)
    for ours, theirs in zip(run["averages"], averages, strict=True):
        assert_close(ours, theirs)
    # The first switch compiles itself; the steps after it run the graph of those before.
    assert run["compiles"][3] == run["compiles"][-1]


def test_moments_of_eight_bits_are_rounded_in_one_graph_as_on_the_host(report):
    run = report["rounded"]
    host = [torch.tensor(numbers) for numbers in run["host"]["parameters"]]
    # Where two sums differ in their last bit, a moment may be rounded the other way.
    assert_close(run["here"]["parameters"], host, atol=0.01 / 4)
    for ours, theirs in zip(run["here"]["codes"], run["host"]["codes"], strict=True):
        differ = sum(a != b for a, b in zip(ours, theirs, strict=True))
        assert differ <= len(ours) / 1000
    assert len(run["here"]["codes"]) == 2
    assert_one_graph(run["here"]["counts"])


def test_optimizers_that_compute_beside_the_steps_are_refused_with_the_way_out(report):
    for message, name in zip(report["refused"], ("Shampoo", "SOAP"), strict=True):
        assert message.startswith(f"{name} decomposes matrices beside the training, and torch_xla")
        assert message.endswith("use Muon, LAMB or AdamW")
