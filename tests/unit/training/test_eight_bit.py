"""Moments of eight bits, as torchao's. test_every_optimizer.py tests the common promises."""

import sys

import pytest
import torch
from torch import nn

from graphstash import ConfigError
from graphstash.training import Adam8bit, AdamW, AdamW8bit, optimizers
from graphstash.training.optimizers import eight_bit
from support.deferred import Deferred
from support.optimizer_cases import make_steps, shaped, train_beside
from support.processes import python

torchao_optim = Deferred("torchao.optim")
subclasses = Deferred("torchao.optim.subclass_8bit")

SHAPES = ((64, 64), (4, 16, 8, 8), (8192,), (5000,), (7, 3), ())
ROUNDED = 3  # the first of them; 256 does not divide 5000
BOTH = [Adam8bit, AdamW8bit]
given_classes = pytest.mark.parametrize(
    ("module", "name"),
    [(torchao_optim, "AdamW8bit"), (torch.optim, "AdamW"), (optimizers, "AdamW")],
    ids=["torchao", "torch", "ours"],
)


@pytest.fixture(autouse=True)
def _theirs_is_not_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def new_parameters(dtype=torch.float32):
    return [nn.Parameter((each.detach() / 8).to(dtype)) for each in shaped(SHAPES)]


def assert_nearly_equal(ours, theirs, *, lr):
    """Compare within 1e-6. One element in a thousand may be rounded to the other side of a tie."""
    for a, b in zip(ours, theirs, strict=True):
        tolerance = 1e-6 + 2 * torch.finfo(a.dtype).eps * b.abs() * (a.dtype != torch.float32)
        differ = (a - b).abs() > tolerance
        assert differ.sum() <= a.numel() / 1000
        torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=lr / 4)


@pytest.mark.parametrize(
    ("ours_class", "options", "dtype"),
    [
        *((Adam8bit, {}, torch.float32), (Adam8bit, {"weight_decay": 0.1}, torch.bfloat16)),
        (AdamW8bit, {"weight_decay": 0.1}, torch.float16),
        *((AdamW8bit, {}, torch.bfloat16), (AdamW8bit, {"weight_decay": 0.1}, torch.float32)),
    ],
)
def test_steps_equal_torchao_with_skipped_steps_between(ours_class, options, dtype):
    ours, theirs = new_parameters(dtype), new_parameters(dtype)
    mine = ours_class(ours, lr=1e-3, **options)
    reference = getattr(torchao_optim, ours_class.__name__)(theirs, **{"lr": 1e-3, **options})
    train_beside(ours, mine, theirs, reference, steps=13)
    assert_nearly_equal(ours, theirs, lr=1e-3)
    assert not any(map(torch.equal, ours, new_parameters(dtype)))
    for a, b in zip(ours[:ROUNDED], theirs[:ROUNDED], strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            other = reference.state[b][name].codes
            assert (mine.state[a][f"{name}_codes"] != other).sum() <= a.numel() / 1000


def test_moments_take_two_bytes_per_element():
    parameter = nn.Parameter(torch.ones(256, 256))
    sizes = {}
    for optimizer in (AdamW([parameter]), AdamW8bit([parameter])):
        make_steps([parameter], optimizer, range(1))
        state = optimizer.state[parameter].values()
        sizes[type(optimizer)] = sum(each.numel() * each.element_size() for each in state)
    assert sizes == {AdamW: 8 * 256**2 + 4, AdamW8bit: 2 * (256**2 + 4 * 256) + 4}


@given_classes
def test_state_of_another_adamw_is_loaded(module, name):
    parameters, others = new_parameters(), new_parameters()
    given = getattr(module, name)(others, lr=1e-3)
    make_steps(others, given, range(4))
    with torch.no_grad():
        for parameter, other in zip(parameters, others, strict=True):
            parameter.copy_(other)
    mine = AdamW8bit(parameters)
    mine.load_state_dict(given.state_dict())
    assert mine.param_groups[0]["lr"] == pytest.approx(1e-3)
    make_steps(parameters, mine, range(4, 6))
    make_steps(others, given, range(4, 6))
    for number, (ours, theirs) in enumerate(zip(parameters, others, strict=True)):
        assert mine.state[ours]["step"] == 6
        is_rounded_now = name != "AdamW8bit" and number < ROUNDED
        # A rounded moment is off by up to a few percent, and so is each of the two steps of 1e-3.
        atol = 1e-3 if is_rounded_now else 1e-6
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@given_classes
@pytest.mark.parametrize("shape", [(64, 128), (3, 3)])
def test_state_of_another_adamw_for_another_shape_is_refused(module, name, shape):
    other = nn.Parameter(torch.ones(64, 64))
    given = getattr(module, name)([other], lr=1e-3)
    make_steps([other], given, range(1))
    mine = AdamW8bit([nn.Parameter(torch.ones(shape))])
    with pytest.raises(ConfigError, match=r"exp_avg has the shape \[64, 64\] instead of"):
        mine.load_state_dict(given.state_dict())
    assert mine.state_dict()["state"] == {}


@pytest.mark.parametrize("count", [2048, 4096], ids=["unquantized here", "quantized here"])
def test_torchaos_moments_in_blocks_of_another_size_are_loaded(count):
    parameters, others = ([nn.Parameter(torch.ones(count))] for _ in range(2))
    given = torchao_optim.AdamW8bit(others, lr=1e-3, block_size=128)
    make_steps(others, given, range(2))
    # torchao quantizes only tensors of 4096 elements or more.
    for name in ("exp_avg", "exp_avg_sq"):
        quantized = subclasses.OptimState8bit.zeros(
            (count,), signed=name == "exp_avg", block_size=128
        )
        given.state[others[0]][name] = quantized.copy_(given.state[others[0]][name])
    mine = AdamW8bit(parameters)
    mine.load_state_dict(given.state_dict())
    with torch.no_grad():
        parameters[0].copy_(others[0])
    make_steps(parameters, mine, range(2, 4))
    make_steps(others, given, range(2, 4))
    torch.testing.assert_close(parameters, others, rtol=0, atol=1e-4)


def test_the_layout_in_memory_changes_nothing():
    plain = nn.Parameter(new_parameters()[1].detach())
    other = nn.Parameter(plain.detach().clone().to(memory_format=torch.channels_last))
    for parameter in (plain, other):
        make_steps([parameter], AdamW8bit([parameter]), range(4))
    torch.testing.assert_close(plain, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer_class", BOTH)
def test_without_torchao_the_extra_is_named(optimizer_class, monkeypatch):
    eight_bit._torchao.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"pip install 'graphstash\[torchao\]"):
        optimizer_class(new_parameters())
    eight_bit._torchao.cache_clear()


@pytest.mark.extended  # starts a process that imports torch and torchao
def test_torch_still_caches_graphs_in_a_process_that_uses_them():
    python(
        """
import torch
import torch._inductor.config as inductor
from graphstash.training.optimizers import Adam8bit
inductor.post_grad_custom_post_pass = print
Adam8bit([torch.ones(4096, requires_grad=True)])
assert inductor.post_grad_custom_post_pass is print  # not the one that torchao 0.12 sets
""",
        check=True,
    )
