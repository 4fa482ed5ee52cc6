"""A run that resumes with other arguments says which ones."""

import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from graphstash.training import SGD, train


def run(directory, *, steps=2, lr=0.1, total=10, batch_size=2, samples=8):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = SGD(model.parameters(), lr=lr)
    train(
        model,
        optimizer,
        DataLoader(TensorDataset(torch.ones(samples, 3)), batch_size),
        steps=steps,
        loss=lambda model, batch: model(batch[0]).square().mean(),
        schedule=LinearLR(optimizer, total_iters=total),
        checkpoints=directory,
        progress=False,
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": 0.5}, "lr of group 0=0.1, but this run has 0.5"),
        ({"total": 20}, "total_iters=10, but this run has 20"),
        ({"steps": 3}, "steps=2; this run resumes with 3"),
        ({"batch_size": 4}, "batch_size=2; this run resumes with 4"),
        ({"samples": 16}, "samples=8; this run resumes with 16"),
    ],
)
def test_a_resumed_run_warns_of_a_changed_argument(changed, words, tmp_path, caplog):
    run(tmp_path)

    with caplog.at_level(logging.WARNING, "graphstash"):
        run(tmp_path, **changed)

    assert [words in record.getMessage() for record in caplog.records] == [True]


def test_a_run_that_resumes_with_the_same_arguments_warns_of_nothing(tmp_path, caplog):
    run(tmp_path)

    with caplog.at_level(logging.WARNING, "graphstash"):
        run(tmp_path)

    assert not caplog.records
