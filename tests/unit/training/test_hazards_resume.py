"""A run that resumes with other arguments logs or refuses what changed."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)
from torch.optim.swa_utils import SWALR
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from graphstash import ConfigError
from graphstash.training import SGD, Batches, LossScale, train


def linear(optimizer, total):
    return LinearLR(optimizer, total_iters=total)


def linear_and_cosine(optimizer, total):
    parts = [LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, total)]
    return SequentialLR(optimizer, parts, [3])


def in_two_steps(optimizer, total):
    return MultiStepLR(optimizer, [3, total])


def linear_and_constant(optimizer, total):
    parts = [LinearLR(optimizer, total_iters=3), ConstantLR(optimizer, total_iters=total)]
    return SequentialLR(optimizer, parts, [3])


def averaging(optimizer, total, **options):
    parts = [LinearLR(optimizer, total_iters=3), SWALR(optimizer, 0.01, total, **options)]
    return SequentialLR(optimizer, parts, [3])


def one_cycle(optimizer, total, **options):
    return OneCycleLR(optimizer, 0.1, total, **options)


def cyclic(optimizer, total, *, highest=0.5, **options):
    return CyclicLR(optimizer, 0.1, highest, total, **options)


class Power:
    def __init__(self, base):
        self.base = base

    def __call__(self, step):
        return self.base**step


def power(optimizer, total, *, base=0.9):
    del total
    return LambdaLR(optimizer, Power(base))


def by_batches(samples, batch_size):
    batches = BatchSampler(SequentialSampler(samples), batch_size, drop_last=False)
    return DataLoader(samples, batch_sampler=batches)


def seeded(samples, batch_size, *, seed=1):
    return DataLoader(samples, batch_size, generator=torch.Generator().manual_seed(seed))


def model_of(frozen=(), dtype=torch.float32):
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)).to(dtype)
    for number in frozen:
        layers[number].requires_grad_(False)
    return layers


def in_order(model, lr, **options):
    return SGD(model.parameters(), lr, **options)


def first_two_layers_swapped(model, lr, **options):
    layers = (model[1], model[0], model[2])
    return SGD([p for layer in layers for p in layer.parameters()], lr, **options)


def in_groups(model, lr, *, second=1, **options):
    groups = [{"params": model[n].parameters(), "lr": lr} for n in (0, second, 3 - second)]
    return SGD(groups, lr, **options)


def run(
    directory,
    *,
    steps=2,
    total=10,
    batch_size=2,
    samples=8,
    schedule=linear,
    loader=DataLoader,
    make=model_of,
    optimize=in_order,
    training=None,
    **options,
):
    torch.manual_seed(0)
    model = make()
    dtype = next(model.parameters()).dtype
    optimizer = optimize(model, **{"lr": 0.1, "momentum": 0.9} | options)
    train(
        model,
        optimizer,
        loader(TensorDataset(torch.ones(samples, 3, dtype=dtype)), batch_size),
        steps=steps,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        schedule=schedule(optimizer, total),
        checkpoints=directory,
        progress=False,
        **training or {},
    )


@pytest.mark.parametrize(
    ("usual", "changed", "words"),
    [
        ({}, {"lr": 0.5}, "lr of group 0=0.1, but this run has 0.5"),
        ({}, {"total": 20}, "total_iters=10, but this run has 20"),
        ({}, {"steps": 3}, "steps=2; this run resumes with 3"),
        ({}, {"batch_size": 4}, "batch_size=2; this run resumes with 4"),
        ({}, {"samples": 16}, "samples=8; this run resumes with 16"),
        ({}, {"weight_decay": 0.1}, "weight_decay of group 0=0.0, but this run has 0.1"),
        ({"schedule": linear_and_cosine}, {"total": 20}, "T_max (schedule 1 in it)=10, but this"),
        ({"schedule": in_two_steps}, {"total": 20}, "milestones=[3, 10], but this run has [3, 20]"),
        ({"schedule": one_cycle}, {"total": 20}, "total_steps=10, but this run has 20"),
        ({"loader": by_batches}, {"batch_size": 4}, "batches=4; this run resumes with 2"),
        (
            {"schedule": cyclic},
            {"schedule": partial(cyclic, highest=0.2)},
            "max_lrs=[0.5], but this run has [0.2]",
        ),
        (
            {"schedule": cyclic},
            {"schedule": partial(cyclic, mode="triangular2")},
            "mode='triangular', but this run has 'triangular2'",
        ),
        (
            {"schedule": one_cycle},
            {"schedule": partial(one_cycle, pct_start=0.6)},
            "phases=[0.3, 1.0], but this run has [0.6, 1.0]",
        ),
        (
            {"schedule": one_cycle},
            {"schedule": partial(one_cycle, anneal_strategy="linear")},
            "anneal_func_type='cos', but this run has 'linear'",
        ),
        (
            {"schedule": power},
            {"schedule": partial(power, base=0.5)},
            "lr_lambdas=[{'base': 0.9}], but this run has [{'base': 0.5}]",
        ),
        (
            {"schedule": averaging},
            {"schedule": partial(averaging, anneal_strategy="linear")},
            "anneal_func (schedule 1 in it)='_cosine_anneal', but this run has '_linear_anneal'",
        ),
        ({}, {"training": {"clip_norm": 1.0}}, "clip_norm=None; this run resumes with 1.0"),
        ({}, {"training": {"clip_value": 1.0}}, "clip_value=None; this run resumes with 1.0"),
        ({}, {"training": {"precision": "bf16"}}, "precision='fp32'; this run resumes with 'bf16'"),
        (
            {"training": {"loss_scale": LossScale()}},
            {"training": {"loss_scale": LossScale(growth_interval=3)}},
            "the loss scale's growth_interval=2000, but this run has 3",
        ),
        (
            {},
            {"loader": partial(DataLoader, shuffle=True)},
            "sampler='SequentialSampler'; this run resumes with 'RandomSampler'",
        ),
        (
            {},
            {"loader": partial(DataLoader, drop_last=True)},
            "drop_last=False; this run resumes with True",
        ),
        (
            {"loader": seeded},
            {"loader": partial(seeded, seed=2)},
            "the seeds of the data=[1], but this run has [2]; it resumes with [1]",
        ),
        (
            {"loader": Batches},
            {"loader": partial(Batches, seed=2)},
            "the seed of the data=0, but this run has 2; it resumes with 0",
        ),
        (
            {},
            {"make": partial(model_of, [1])},
            "frozen parameters=[]; this run resumes with ['1.weight', '1.bias']",
        ),
        (
            {},
            {"make": partial(model_of, dtype=torch.float64)},
            "parameters=['torch.float32']; this run resumes with ['torch.float64']",
        ),
    ],
)
def test_a_resumed_run_warns_of_a_changed_argument(usual, changed, words, tmp_path, caplog):
    run(tmp_path, **usual)

    with caplog.at_level(logging.WARNING, "graphstash"):
        run(tmp_path, **usual | changed)

    assert [words in record.getMessage() for record in caplog.records] == [True]


SCHEDULES = [linear, linear_and_cosine, in_two_steps, one_cycle, cyclic, power, averaging]
LOADERS = [seeded, by_batches, Batches]


@pytest.mark.parametrize(
    "usual",
    [
        *({"schedule": each} for each in SCHEDULES),
        *({"loader": each} for each in LOADERS),
        {"training": {"precision": "fp16", "clip_norm": 1.0}, "make": partial(model_of, [1])},
    ],
)
def test_a_run_that_resumes_with_the_same_arguments_warns_of_nothing(usual, tmp_path, caplog):
    run(tmp_path, **usual)

    with caplog.at_level(logging.WARNING, "graphstash"):
        run(tmp_path, **usual)

    assert not caplog.records


@pytest.mark.parametrize(
    ("usual", "changed", "words"),
    [
        (
            {},
            {"optimize": first_two_layers_swapped},
            "had '0.weight' in group 0, this run has '1.weight' in group 0",
        ),
        (
            {"optimize": in_groups},
            {"optimize": partial(in_groups, second=2)},
            "had '1.weight' in group 1, this run has '2.weight' in group 1",
        ),
        (
            {"schedule": linear_and_cosine},
            {"schedule": linear_and_constant},
            r"schedules=\['LinearLR', 'CosineAnnealingLR'\], but this run has",
        ),
        (
            {"steps": 1},
            {"loader": seeded},
            "had 0 generators of random numbers when its position was saved and has 1 now",
        ),
    ],
)
def test_a_change_that_would_misplace_saved_state_is_refused(usual, changed, words, tmp_path):
    run(tmp_path, **usual)

    with pytest.raises(ConfigError, match=words):
        run(tmp_path, **usual | changed)


def test_a_model_that_renames_its_parameters_in_old_checkpoints_resumes(tmp_path):
    def renamed():
        model = nn.Sequential()
        for number, layer in enumerate(model_of()):
            model.add_module(f"layer{number}", layer)

        def rename(_, state, *__):
            for name in [name for name in state if name[0].isdigit()]:
                state[f"layer{name}"] = state.pop(name)

        model.register_load_state_dict_pre_hook(rename)
        return model

    run(tmp_path)

    run(tmp_path, make=renamed, steps=3)
