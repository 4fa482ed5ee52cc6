"""Losses and gradients that are not finite: single steps are skipped, lasting ones end the run."""

import pytest
import torch

from graphstash import training
from support.small_training import Seen, mse, problem, run


def nan_from(step, *, only=None):
    calls = iter(range(1, 1000))

    def loss(model, batch):
        value = mse(model, batch)
        call = next(calls)
        bad = call >= step if only is None else call == step
        return value * float("nan") if bad else value

    return loss


@pytest.mark.parametrize("fuse", [None, "forward"])
def test_lasting_nan_loss_is_an_error_naming_step_and_scale(fuse):
    of, scale = problem(), training.LossScale(1024.0)
    with pytest.raises(training.DivergedError) as error:
        run(100, of=of, loss=nan_from(8), loss_scale=scale, log_every=10, fuse=fuse)
    for text in ("step 10", "since step 8", "loss scale 128"):
        assert text in str(error.value)
    assert all(p.isfinite().all() for p in of[0].parameters())


@pytest.mark.parametrize("fuse", [None, "backward", "forward"])
def test_without_a_loss_scale_the_first_boundary_with_a_nan_is_the_last(fuse):
    with pytest.raises(training.DivergedError, match=r"step 10 .* since step 10"):
        run(100, loss=nan_from(10), log_every=10, fuse=fuse)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"precision": "fp16", "loss_scale": training.LossScale(1024.0)}, 512),
        ({"precision": "bf16", "loss_scale": training.LossScale(8.0)}, 4),
    ],
    ids=["fp16", "bf16"],
)
def test_single_bad_step_is_skipped_and_reported(options, scale):
    seen = Seen()
    loss = nan_from(10, only=10)
    result, _ = run(100, loss=loss, log_every=10, callbacks=[seen], **options)
    assert [entry.skipped for entry in seen.entries] == [1, *[0] * 9]
    assert seen.entries[0].loss_scale == scale
    assert sum(result.losses[-10:]) / 10 < result.losses[0] / 4


def test_gradients_that_are_infinite_at_any_scale_are_an_error():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    def loss(model, batch):
        return Bad.apply(mse(model, batch))

    with pytest.raises(training.DivergedError, match=r"at any loss scale.*since step 1, loss"):
        run(200, loss=loss, loss_scale=training.LossScale(1.0), log_every=10)
