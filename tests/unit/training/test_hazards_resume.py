"""A run that resumes with other arguments logs which arguments changed."""

import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from graphstash.training import SGD, train


def linear(optimizer, total):
    return LinearLR(optimizer, total_iters=total)


def linear_and_cosine(optimizer, total):
    parts = [LinearLR(optimizer, total_iters=3), CosineAnnealingLR(optimizer, total)]
    return SequentialLR(optimizer, parts, [3])


def in_two_steps(optimizer, total):
    return MultiStepLR(optimizer, [3, total])


def one_cycle(optimizer, total):
    return OneCycleLR(optimizer, 0.1, total)


def by_batches(samples, batch_size):
    batches = BatchSampler(SequentialSampler(samples), batch_size, drop_last=False)
    return DataLoader(samples, batch_sampler=batches)


def run(
    directory,
    *,
    steps=2,
    total=10,
    batch_size=2,
    samples=8,
    schedule=linear,
    loader=DataLoader,
    **options,
):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9} | options)
    train(
        model,
        optimizer,
        loader(TensorDataset(torch.ones(samples, 3)), batch_size),
        steps=steps,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        schedule=schedule(optimizer, total),
        checkpoints=directory,
        progress=False,
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
    ],
)
def test_a_resumed_run_warns_of_a_changed_argument(usual, changed, words, tmp_path, caplog):
    run(tmp_path, **usual)

    with caplog.at_level(logging.WARNING, "graphstash"):
        run(tmp_path, **usual | changed)

    assert [words in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("schedule", [linear, linear_and_cosine, in_two_steps, one_cycle])
def test_a_run_that_resumes_with_the_same_arguments_warns_of_nothing(schedule, tmp_path, caplog):
    run(tmp_path, schedule=schedule)

    with caplog.at_level(logging.WARNING, "graphstash"):
        run(tmp_path, schedule=schedule)

    assert not caplog.records
