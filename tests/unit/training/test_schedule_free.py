"""Schedule-Free AdamW's iterates and averages; see test_every_optimizer.py for the rest."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from graphstash.training import Checkpoints, ScheduleFreeAdamW, train
from graphstash.training.optimizers import schedule_free
from support.device_reads import Reads
from support.optimizer_cases import (
    assert_close,
    assert_equal,
    copies,
    give_gradients,
    make_steps,
    public,
    shaped,
    train_beside,
)

SHAPES = ((6, 4), (3, 2, 5, 2), (5,), ())

new_parameters = partial(shaped, SHAPES)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "warmup_steps": 7},
        {"maximize": True, "betas": (0.95, 0.9)},
        {"warmup_steps": 7, "r": 1.0, "weight_lr_power": 0.0},
    ],
    ids=str,
)
def test_iterates_and_averages_equal_public_implementation(options):
    ours, theirs = new_parameters(), new_parameters()
    mine = ScheduleFreeAdamW(ours, lr=0.02, **options)
    reference = public().ScheduleFreeAdamW(theirs, lr=0.02, **options)

    def change_rate(step):
        if step % 4 == 0 and step:
            mine.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.02 / step

    train_beside(ours, mine, theirs, reference, after=change_rate)
    for switch in (lambda _: None, lambda optimizer: optimizer.eval()):
        switch(mine)
        switch(reference)
        assert_close(ours, theirs)
        assert not any(map(torch.equal, ours, new_parameters()))


@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        *((dtype, False) for dtype in (torch.float32, torch.float64)),
        *((dtype, master) for dtype in (torch.bfloat16, torch.float16) for master in (False, True)),
    ],
)
def test_train_restores_the_same_bits(dtype, master):
    parameters = new_parameters(dtype)
    optimizer = ScheduleFreeAdamW(parameters, lr=0.05, master_weights=master)
    make_steps(parameters, optimizer, range(5))
    before = copy.deepcopy([copies(parameters), optimizer.state_dict()["state"]])
    with Reads() as reads:
        optimizer.eval()
        averages = copies(parameters)
        optimizer.eval()
    assert_equal(parameters, averages)
    assert not torch.equal(parameters[0], before[0][0])
    with reads:
        optimizer.train()
        optimizer.train()
    assert reads.count == 0
    after = [copies(parameters), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("steps", [[], [0]], ids=["no step", "a bad step"])
def test_before_the_first_good_step_the_average_is_the_parameter(steps):
    parameters = new_parameters()
    optimizer = ScheduleFreeAdamW(parameters)
    for step in steps:
        give_gradients(parameters, step, bad=math.nan)
        optimizer.step(found_inf=torch.tensor(1.0))
    optimizer.eval()
    assert_equal(parameters, new_parameters())


def test_a_step_on_averages_is_refused_and_changes_nothing():
    parameters = new_parameters()
    optimizer = ScheduleFreeAdamW(parameters)
    make_steps(parameters, optimizer, range(2))
    optimizer.eval()
    averages = copies(parameters)
    with pytest.raises(RuntimeError, match=r"call train\(\) of the optimizer before"):
        optimizer.step()
    assert_equal(parameters, averages)


def test_sum_of_weights_keeps_counting_where_a_float32_sum_stops():
    """A plain float32 sum of ten million weights of 1e-8 would be 8 % too small."""
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = ScheduleFreeAdamW([parameter], lr=1e-4)
    make_steps([parameter], optimizer, range(1))
    state = optimizer.state[parameter]
    state["weight_sum"].fill_(1e7)
    make_steps([parameter], optimizer, range(1, 4))
    assert state["weight_sum"] == 1e7 + 3


def test_without_weights_of_the_learning_rate_steps_of_length_zero_count():
    """The formula counts such steps, because 0^0 is 1."""
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = ScheduleFreeAdamW([parameter], lr=0.0, weight_lr_power=0.0)
    points = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.0 if step < 3 else 0.1
        parameter.grad = torch.ones(())
        optimizer.step()
        points.append(optimizer.state[parameter]["z"].clone())
    optimizer.eval()
    torch.testing.assert_close(parameter.detach(), torch.stack(points).mean())


# Saving and loading.


def copied_by_state_dictionary(parameters, optimizer):
    new = [nn.Parameter(value) for value in copies(parameters)]
    other = ScheduleFreeAdamW(new, lr=0.5, master_weights=optimizer.defaults["master_weights"])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new, other


@pytest.mark.parametrize(
    ("copied", "dtype", "master"),
    [
        (copied_by_state_dictionary, torch.float32, False),
        (copied_by_state_dictionary, torch.bfloat16, True),
        (lambda p, o: copy.deepcopy((p, o)), torch.bfloat16, False),
        (lambda p, o: pickle.loads(pickle.dumps((p, o))), torch.bfloat16, True),
    ],
    ids=["state dictionary", "state dictionary with masters", "deepcopy", "pickle"],
)
def test_checkpoint_saved_in_evaluation_resumes_to_the_bit(copied, dtype, master):
    parameters = new_parameters(dtype)
    optimizer = ScheduleFreeAdamW(parameters, lr=0.02, warmup_steps=4, master_weights=master)
    make_steps(parameters, optimizer, range(3))
    optimizer.eval()
    new, other = copied(parameters, optimizer)
    for each in (optimizer, other):
        each.train()
    make_steps(parameters, optimizer, range(3, 6))
    assert not torch.equal(parameters[0], new[0])
    make_steps(new, other, range(3, 6))
    assert_equal(parameters, new)


@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "nested"])
def test_state_missing_in_distributed_checkpoint_of_evaluation_is_detected(is_flat, tmp_path):
    """torch restores only tensors that the new optimizer already has; it has no iterates yet."""
    from support import distributed_checkpoint

    model, optimizer = trained(steps=4)
    optimizer.eval()
    distributed_checkpoint.save(model, optimizer, tmp_path, is_flat=is_flat)
    other = new_model()
    its = ScheduleFreeAdamW(other.parameters())
    with pytest.raises(ValueError, match="has only 0 of the 6 tensors"):
        distributed_checkpoint.load(other, its, tmp_path, is_flat=is_flat)
    its.eval()
    distributed_checkpoint.load(other, its, tmp_path, is_flat=is_flat)
    for each in (optimizer, its):
        each.train()
    for each, of_it in ((model, optimizer), (other, its)):
        for step in range(4, 8):
            of_it.zero_grad()
            loss_of(each, batch(step)).backward()
            of_it.step()
    assert_equal(model.parameters(), other.parameters())


@pytest.mark.parametrize("way", ["eval", "train"])
def test_interrupted_switch_can_be_undone_after_saving(way, monkeypatch):
    parameters = new_parameters()
    optimizer = ScheduleFreeAdamW(parameters, lr=0.02)
    make_steps(parameters, optimizer, range(3))
    before = copies(parameters)
    assign, calls = schedule_free.assign, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        assign(*arguments)

    if way == "train":
        optimizer.eval()
    monkeypatch.setattr(schedule_free, "assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(optimizer, way)()
    monkeypatch.undo()
    new, other = copied_by_state_dictionary(parameters, optimizer)
    with pytest.raises(RuntimeError, match="averages"):
        optimizer.step()
    for each, its in ((parameters, optimizer), (new, other)):
        its.train()
        assert_equal(each, before)


def test_an_average_whose_beta_is_cycled_is_refused():
    parameters = new_parameters()
    optimizer = ScheduleFreeAdamW(parameters, lr=0.01)
    OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
    with pytest.raises(ValueError, match=r"cycle_momentum=False"):
        make_steps(parameters, optimizer, range(1))


# With a model.


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 5), nn.LayerNorm(5)
    )


def batch(step):
    return torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model, images):
    return model(images).square()[:, 1:].mean()


def trained(directory=None, *, steps=12, evaluate=None, make=ScheduleFreeAdamW, **options):
    model = new_model()
    optimizer = make(model.parameters(), lr=0.02)
    train(
        model,
        optimizer,
        [batch(step) for step in range(12)],
        steps=steps,
        loss=loss_of,
        evaluate=evaluate,
        evaluate_every=5 if evaluate else None,
        checkpoints=directory,
        log_every=3,
        progress=False,
        **options,
    )
    return model, optimizer


@pytest.mark.parametrize("when", [None, "backward", "forward"])
def test_loop_evaluates_averages_and_trains_on_iterates(when):
    seen = []
    model, _ = trained(evaluate=lambda m: seen.append(copies(m.parameters())), fuse=when)
    plain, _ = trained()
    assert_equal(model.parameters(), plain.parameters())
    for steps, averages in zip((5, 10, 12), seen, strict=True):
        other, its = trained(steps=steps)
        its.eval()
        assert_equal(other.parameters(), averages)


def test_the_loop_evaluates_averages_of_the_public_implementation():
    seen = []
    reference = public().ScheduleFreeAdamW
    trained(steps=5, make=reference, evaluate=lambda m: seen.append(copies(m.parameters())))
    model, optimizer = trained(steps=5, make=reference)
    optimizer.eval()
    assert_equal(model.parameters(), seen[0])


def test_failed_evaluation_leaves_checkpoint_of_iterates(tmp_path):
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, evaluate=lambda _: 1 / 0)
    with Checkpoints(tmp_path) as checkpoints:
        found = checkpoints.load()
    assert found.step == 5
    plain, _ = trained(steps=5)
    assert_equal(found.state["model"].values(), plain.state_dict().values())
    resumed, _ = trained(tmp_path)
    assert_equal(resumed.parameters(), trained()[0].parameters())


def test_a_switch_that_is_interrupted_is_not_saved(tmp_path, monkeypatch):
    put_back = ScheduleFreeAdamW.train

    def interrupted(optimizer):
        if optimizer.state:
            raise KeyboardInterrupt
        put_back(optimizer)

    monkeypatch.setattr(ScheduleFreeAdamW, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, evaluate=lambda _: {})
    assert list(tmp_path.glob("step-*")) == []


def test_loop_trains_optimizer_given_in_evaluation_mode():
    model, optimizer = trained(steps=4)
    other = new_model()
    with torch.no_grad():
        for target, source in zip(other.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    again = ScheduleFreeAdamW(other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.eval()
    for each, its in ((model, optimizer), (other, again)):
        data = [batch(step) for step in range(4, 8)]
        train(each, its, data, steps=4, loss=loss_of, progress=False)
    assert_equal(model.parameters(), other.parameters())
