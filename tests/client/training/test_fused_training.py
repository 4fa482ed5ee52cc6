"""Training with updates that are fused into the backward or the next forward."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from graphstash import ConfigError, training
from graphstash.training.fusion.forward import ForwardFusion
from support.small_training import Seen, problem, run

FUSED = {
    "backward": {},
    "forward": {
        "loss_scale": lambda: training.LossScale(16.0, growth_interval=3),
        "clip_norm": lambda: 0.5,
        "accumulate": lambda: 2,
    },
}


@pytest.mark.parametrize("how", FUSED)
def test_fused_updates_equal_optimizer_alone(how, tmp_path):
    def trained(steps, directory, fuse):
        model, optimizer, data = problem()
        result, _ = run(
            steps,
            of=(model, optimizer, data),
            fuse=fuse,
            schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
            evaluate=lambda model: {"norm": float(model[0].weight.norm())},
            evaluate_every=4,
            callbacks=[seen := Seen()],
            checkpoints=tmp_path / directory,
            **{name: make() for name, make in FUSED[how].items()},
        )
        return result.losses, seen.evaluations, [p.tolist() for p in model.parameters()]

    alone = trained(15, "alone", None)
    assert trained(15, "fused", how) == alone
    first, _, _ = trained(6, "parts", how)
    # The checkpoint includes the updates that waited for a forward.
    losses, _, weights = trained(15, "parts", None)
    assert (first + losses, weights) == (alone[0], alone[2])


def test_partially_updated_step_is_not_saved(tmp_path, monkeypatch):
    def trained(directory):
        options = {"log_every": 3, "fuse": "forward", "checkpoint_every": 3}
        return run(10, checkpoints=tmp_path / directory, **options)[0]

    flush, calls = ForwardFusion.flush, []

    def interrupted(fusion):
        calls.append(bool(fusion._waiting))
        if sum(calls) == 2 and calls[-1]:  # at the second boundary
            fusion._waiting.clear()
            raise KeyboardInterrupt
        flush(fusion)

    whole = trained("whole")
    monkeypatch.setattr(ForwardFusion, "flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained("parts")
    monkeypatch.undo()
    resumed = trained("parts")
    assert resumed.resumed_from < 6
    assert resumed.losses == whole.losses[resumed.resumed_from :]


@pytest.mark.parametrize("fuse", [None, *FUSED])
def test_callbacks_get_the_newest_weights_after_each_step_and_at_each_log(fuse):
    model, optimizer, data = problem()
    averaged = AveragedModel(model)
    after, logged = [], []

    class Look(training.Callback):
        def on_step(self, step):
            averaged.update_parameters(model)
            after.append(model[0].weight.detach().clone())

        def on_log(self, entry):
            logged.append(model[0].weight.detach().clone())

    run(5, of=(model, optimizer, data), callbacks=[Look()], fuse=fuse, log_every=4)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(after))
    assert torch.equal(after[-1], model[0].weight)
    assert list(map(torch.equal, logged, (after[3], after[4]))) == [True, True]
    torch.testing.assert_close(averaged.module[0].weight, sum(after) / 5)


def test_model_that_cannot_be_fused_is_refused_with_reason():
    of = problem()
    with training.fuse(*of[:2]), pytest.raises(ConfigError, match=r"fuse='forward': .* already fu"):
        run(1, of=of, fuse="forward")


def test_exception_in_fused_step_is_raised():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            raise OSError("a broken device")

    made, of = [], problem()

    def loss(model, batch):
        made.append(1)
        hidden = model[0](batch[0])
        hidden = Fails.apply(hidden) if len(made) == 3 else hidden
        return nn.functional.mse_loss(model[2](model[1](hidden)), batch[1])

    with pytest.raises(OSError, match="a broken device"):
        run(5, of=of, loss=loss, fuse="backward")
    assert not of[0][0]._forward_pre_hooks
