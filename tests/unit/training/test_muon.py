"""Muon and its parameter groups. test_every_optimizer.py tests the common promises."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from graphstash.training import AdamW, Muon, muon_groups
from support.optimizer_cases import (
    assert_close,
    assert_equal,
    give_gradients,
    make_steps,
    public,
    shaped,
    train_beside,
)

SHAPES = ((6, 4), (4, 6), (5, 5), (3, 2, 2, 2))

matrices = partial(shaped, SHAPES)


@pytest.mark.parametrize(
    ("adjustment", "nesterov", "maximize"),
    [
        *((None, True, False), (None, False, True)),
        *(("original", True, True), ("original", False, False)),
        *(("match_rms_adamw", True, True), ("match_rms_adamw", False, False)),
    ],
)
def test_matrices_are_updated_as_in_public_implementation(adjustment, nesterov, maximize):
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    mine = Muon(ours, adjust_lr_fn=adjustment, maximize=maximize, **options)
    reference = public().Muon(
        [{"params": theirs, "use_muon": True}],
        use_adjusted_lr=adjustment == "match_rms_adamw",
        maximize=maximize,
        foreach=False,
        **options,
    )
    train_beside(ours, mine, theirs, reference)
    assert_close(ours, theirs)
    assert not any(map(torch.equal, ours, matrices()))


def test_other_parameters_are_updated_as_by_adamw():
    ours, theirs = [[nn.Parameter(torch.linspace(-1, 1, 7))] for _ in range(2)]
    options = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    mine = Muon([{"params": ours, "use_muon": False, **options}])
    reference = torch.optim.AdamW(theirs, **options)
    train_beside(ours, mine, theirs, reference)
    assert_close(ours, theirs)


def test_a_state_dictionary_of_torchs_muon_is_loaded():
    """torch 2.9 and later save no step, and only the options for matrices."""
    options = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "eps": 1e-7,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "ns_steps": 5,
        "adjust_lr_fn": None,
    }
    buffers = [torch.full(shape, 0.25) for shape in SHAPES]
    given = {
        "state": {n: {"momentum_buffer": b.clone()} for n, b in enumerate(buffers)},
        "param_groups": [{**options, "params": list(range(len(SHAPES)))}],
    }
    parameters = matrices()
    optimizer = Muon(parameters)
    optimizer.load_state_dict(given)
    give_gradients(parameters, 0)
    optimizer.step()
    for parameter, buffer in zip(parameters, buffers, strict=True):
        expected = 0.95 * buffer + 0.05 * parameter.grad
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], expected)
    assert optimizer.param_groups[0]["lr"] == 0.02


CYCLES = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=3),
}
every_cycle = pytest.mark.parametrize("cycle", CYCLES.values(), ids=list(CYCLES))


def values_of(cycle):
    """Return lr and momentum that the schedule sets in an optimizer without betas."""
    optimizer = torch.optim.SGD(matrices(), lr=0.01, momentum=0.9)
    schedule = cycle(optimizer)
    for _ in range(10):
        yield optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]
        optimizer.step()
        schedule.step()


@every_cycle
@pytest.mark.parametrize("resumes", [None, "from ours", "from torch.optim.Muon"])
def test_cycled_momentum_is_used_and_resumed(cycle, resumes):
    parameters, expected = matrices(), matrices()
    by_hand = Muon(expected, lr=0.01)
    for step, (lr, momentum) in enumerate(values_of(cycle)):
        by_hand.param_groups[0].update(lr=lr, momentum=momentum)
        make_steps(expected, by_hand, [step])
    optimizer = Muon(parameters, lr=0.01)
    schedule = cycle(optimizer)
    for step in range(10):
        if resumes and step == 4:
            saved, progress = copy.deepcopy(optimizer.state_dict()), schedule.state_dict()
            if resumes == "from torch.optim.Muon":  # whose state includes the schedule's momentum
                for group in saved["param_groups"]:
                    del group["betas"]
            optimizer = Muon(parameters, lr=0.01)
            optimizer.load_state_dict(saved)
            schedule = cycle(Muon(matrices(), lr=0.01))
            schedule.load_state_dict(progress)
            schedule.optimizer = optimizer
        make_steps(parameters, optimizer, [step])
        schedule.step()
    assert_equal(parameters, expected)


@every_cycle
def test_adamw_groups_of_muon_cycle_their_first_beta(cycle):
    (matrix, vector), (_, other) = (shaped(((3, 3), (4,))) for _ in range(2))
    groups = [{"params": [matrix]}, {"params": [vector], "use_muon": False, "weight_decay": 0.01}]
    optimizers = [Muon(groups, lr=0.01, betas=(0.9, 0.999)), AdamW([other], lr=0.01)]
    schedules = [cycle(each) for each in optimizers]
    for step in range(10):
        give_gradients([matrix, vector], step)
        other.grad = vector.grad.clone()
        for each in (*optimizers, *schedules):
            each.step()
    assert_equal([vector], [other])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.hidden = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        self.tied = nn.Linear(6, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(6, 3)


def test_groups_of_model_split_hidden_matrices_from_other_parameters():
    model = Model()
    matrices, rest = muon_groups(model, adamw=(each for each in [model.head]), lr=3e-4)
    hidden = model.hidden
    assert matrices == {"params": [hidden[0].weight, hidden[2].weight], "use_muon": True}
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in rest["params"]] == [
        "embedding.weight",
        *("hidden.0.bias", "hidden.1.weight", "hidden.1.bias", "hidden.2.bias"),
        *("head.weight", "head.bias"),
    ]
    assert rest["lr"] == 3e-4
    assert rest["use_muon"] is False


def test_a_module_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"modules of the model \(got another Linear\)"):
        muon_groups(Model(), adamw=[nn.Linear(1, 1)])


def test_loaded_state_must_keep_the_order_of_the_kinds_of_groups():
    def groups(*kinds):
        parameters = [nn.Parameter(torch.ones(3, 3)) for _ in kinds]
        return [{"params": [each], **kind} for each, kind in zip(parameters, kinds, strict=True)]

    matrix, other = {"use_muon": True}, {"use_muon": False}
    mine = Muon(groups(matrix, other))
    with pytest.raises(ValueError, match="in the order in which they were saved"):
        mine.load_state_dict(Muon(groups(other, matrix)).state_dict())
    # Whose groups name no kind.
    mine.load_state_dict(torch.optim.AdamW(groups({}, {})).state_dict())
    assert [group["use_muon"] for group in mine.param_groups] == [True, False]


def test_parameter_that_is_no_matrix_is_refused_with_advice():
    optimizer = Muon(matrices())
    with pytest.raises(ValueError, match=r"shape \[5\]: put it into a group with use_muon=False"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    assert len(optimizer.param_groups) == 1


def test_matrices_without_elements_and_one_of_zeros_stay_finite():
    zeros, *empty = shaped([(3, 2), (3, 0), (3, 0)])
    values = zeros.detach().clone()
    optimizer = Muon([*empty, zeros], lr=0.1, weight_decay=0.0)
    for each in (*empty, zeros):
        each.grad = torch.zeros_like(each)
    optimizer.step()
    assert torch.equal(zeros, values)
