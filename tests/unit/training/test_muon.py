"""Muon and its groups. What all optimizers do is tested with the others."""

import copy
import math

import pytest
import pytorch_optimizer
import torch
from torch import nn

from graphstash.training import LossScale, Muon, fuse, muon_groups, train
from support.device_reads import Reads

SHAPES = ((6, 4), (4, 6), (5, 5), (3, 2, 2, 2))
BAD = {0: math.inf, 5: math.nan, 11: -math.inf}
STEPS = 20


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def give_gradients(parameters, step, *, bad=None):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    if bad is not None:
        parameters[0].grad[0, 0] = bad


def assert_close(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **{"rtol": 0, "atol": 1e-6, **tolerance})


@pytest.mark.parametrize("adjustment", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_matrices_go_as_with_a_public_implementation(adjustment, nesterov, maximize):
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    mine = Muon(ours, adjust_lr_fn=adjustment, maximize=maximize, **options)
    reference = pytorch_optimizer.Muon(
        [{"params": theirs, "use_muon": True}],
        use_adjusted_lr=adjustment == "match_rms_adamw",
        maximize=maximize,
        foreach=False,
        **options,
    )
    for step in range(STEPS):
        give_gradients(ours, step, bad=BAD.get(step))
        found_inf = torch.tensor(float(step in BAD))
        mine.step(found_inf=found_inf)
        if step not in BAD:
            give_gradients(theirs, step)
            reference.step()
    assert_close(ours, theirs)
    assert not any(torch.equal(*pair) for pair in zip(ours, matrices(), strict=True))


def test_the_rest_goes_as_with_adamw():
    ours, theirs = [[nn.Parameter(torch.linspace(-1, 1, 7))] for _ in range(2)]
    options = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    mine = Muon([{"params": ours, "use_muon": False, **options}])
    reference = torch.optim.AdamW(theirs, **options)
    for step in range(STEPS):
        for parameters, optimizer in ((ours, mine), (theirs, reference)):
            give_gradients(parameters, step)
            optimizer.step()
    assert_close(ours, theirs)


def test_singular_values_of_a_step_are_about_one():
    parameter = nn.Parameter(torch.zeros(8, 5))
    optimizer = Muon([parameter], lr=1.0, weight_decay=0.0)
    give_gradients([parameter], 0)
    parameter.grad *= torch.logspace(-2, 3, 5)  # the columns differ by five orders of magnitude
    optimizer.step()
    values = torch.linalg.svdvals(parameter.detach()) / math.sqrt(8 / 5)
    assert values.max() < 1.4
    assert values.median() > 0.4


def test_a_bad_step_changes_no_bit_and_none_reads_the_device():
    parameters = matrices()
    optimizer, scale = Muon(parameters, lr=0.02), LossScale(8.0).to("cpu")
    give_gradients(parameters, 0)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    with Reads() as reads:
        for bad in (math.inf, math.nan):
            give_gradients(parameters, 1, bad=bad)
            scale.step(optimizer)
            scale.update()
    assert reads.count == 0
    assert all(torch.equal(*pair) for pair in zip(parameters, before, strict=True))
    for number, kept in optimizer.state_dict()["state"].items():
        assert torch.equal(kept["momentum_buffer"], state[number]["momentum_buffer"])
        assert kept["step"] == 1


def test_it_goes_on_from_a_state_dictionary_to_the_bit():
    one, other = matrices(), matrices()
    first, second = Muon(one, lr=0.02), Muon(other, lr=0.5)
    for step in range(3):
        give_gradients(one, step)
        first.step()
    with torch.no_grad():
        for target, source in zip(other, one, strict=True):
            target.copy_(source)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for step in range(3, 6):
        for parameters, optimizer in ((one, first), (other, second)):
            give_gradients(parameters, step)
            optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_a_state_dictionary_of_torchs_muon_is_loaded():
    """As torch 2.9 and newer write it: no step, and only what matrices need."""
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_train_and_keep_their_type(dtype):
    parameters, wide = matrices(dtype), matrices()
    for group in (parameters, wide):
        optimizer = Muon(group, lr=0.02)
        for step in range(3):
            give_gradients(group, step)
            optimizer.step(found_inf=torch.tensor(0.0))
    assert all(p.dtype == dtype for p in parameters)
    assert_close([p.float() for p in parameters], wide, atol=0.05)


def test_a_schedule_changes_both_kinds_of_groups():
    matrix, vector = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [matrix]}, {"params": [vector], "use_muon": False}]
    optimizer = Muon(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    for step in range(2):
        before = [matrix.detach().clone(), vector.detach().clone()]
        give_gradients([matrix, vector], step)
        optimizer.step()
        schedule.step()
        equal = [torch.equal(a, b) for a, b in zip(before, (matrix, vector), strict=True)]
        assert equal == [step == 1] * 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.hidden = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6))
        self.tied = nn.Linear(6, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(6, 3)

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)))


def test_groups_of_a_model_are_hidden_matrices_and_the_rest():
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


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_fused_it_is_the_same_to_the_bit(when):
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Model()
        optimizer = Muon(muon_groups(model, adamw=[model.head], lr=3e-4), lr=0.02)
        handle = fuse(model, optimizer, when=when) if fused else None
        for step in range(4):
            optimizer.zero_grad()
            model(torch.arange(10).roll(step)).square().mean().backward()
            optimizer.step()
        if handle is not None:
            handle.close()
        results.append(list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_train_takes_it():
    torch.manual_seed(0)
    model = Model()
    optimizer = Muon(muon_groups(model, adamw=[model.head], lr=1e-2), lr=0.02)
    tokens = torch.arange(10).repeat(8, 1)
    batches = [(row, row % 3) for row in tokens]

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    first = float(loss(model, batches[0]))
    train(model, optimizer, batches, steps=60, loss=loss)
    assert float(loss(model, batches[0])) < first / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum must be at least 0 and below 1 \(got 1.0\)"),
        ({"momentum": math.nan}, "momentum must be at least 0"),
        ({"ns_steps": 0}, r"a whole number from 1 to 99 \(got 0\)"),
        ({"ns_steps": 100}, "ns_steps must be"),
        ({"ns_steps": 5.0}, r"ns_steps must be .* \(got 5.0\)"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be 3 numbers"),
        ({"adjust_lr_fn": "linear"}, r"None, original or match_rms_adamw \(got linear\)"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"weight_decay": math.nan}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be"),
    ],
)
def test_an_option_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(matrices(), **options)


def test_a_state_dictionary_of_another_order_of_groups_is_refused_and_changes_nothing():
    def optimizer(*kinds):
        return Muon([{"params": [nn.Parameter(torch.ones(3, 3))], "use_muon": k} for k in kinds])

    mine, other = optimizer(True, False), optimizer(False, True)
    with pytest.raises(ValueError, match="in the order in which they were saved"):
        mine.load_state_dict(other.state_dict())
    assert [group["use_muon"] for group in mine.param_groups] == [True, False]


def test_a_state_dictionary_of_adamw_leaves_matrices_matrices():
    mine = Muon(
        [{"params": [nn.Parameter(torch.ones(3, 3))], "use_muon": k} for k in (True, False)]
    )
    given = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(3, 3))]} for _ in range(2)])
    mine.load_state_dict(given.state_dict())
    assert [group["use_muon"] for group in mine.param_groups] == [True, False]


def test_what_is_no_matrix_is_refused_with_the_way_out():
    optimizer = Muon(matrices())
    with pytest.raises(ValueError, match=r"shape \[5\]: put it into a group with use_muon=False"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5))]})
    assert len(optimizer.param_groups) == 1


def test_a_matrix_without_elements_and_one_of_zeros_stay_finite():
    empty, zeros = nn.Parameter(torch.zeros(3, 0)), nn.Parameter(torch.ones(3, 2))
    optimizer = Muon([empty, zeros], lr=0.1, weight_decay=0.0)
    empty.grad, zeros.grad = torch.zeros(3, 0), torch.zeros(3, 2)
    optimizer.step()
    assert torch.equal(zeros, torch.ones(3, 2))
