import itertools
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from graphstash import ConfigError, training
from graphstash.training.fusion.forward import ForwardFusion
from support.device_reads import Reads
from support.jobs import TRAIN_JOB, losses_of, until_step
from support.waiting import until

STEPS = 40


class Seen(training.Callback):
    def __init__(self):
        self.entries, self.evaluations, self.checkpoints, self.ends = [], [], [], []

    def on_log(self, entry):
        self.entries.append(entry)

    def on_evaluation(self, step, metrics):
        self.evaluations.append((step, dict(metrics)))

    def on_checkpoint(self, step, directory):
        self.checkpoints.append(step)

    def on_end(self, result):
        self.ends.append(result)


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def problem(*, seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(24, 4)
    data = training.Batches((inputs, inputs.sum(1, keepdim=True)), 4, seed=1)
    return model, training.SGD(model.parameters(), lr=0.02, momentum=0.9), data


def run(steps=5, *, loss=mse, seed=0, of=None, **options):
    """Train a new model, or `of` (model, optimizer, data); return the result and the model."""
    model, optimizer, data = of or problem(seed=seed)
    options = {"progress": False} | options
    return training.train(model, optimizer, data, steps=steps, loss=loss, **options), model


def plain_loop(steps, *, clip=lambda parameters: None):
    """Train as `run` does, without `train`; return the losses and the model."""
    model, optimizer, data = problem()
    losses = []
    for _, batch in zip(range(steps), data, strict=False):
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        clip(model.parameters())
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses), model


def test_train_makes_the_steps_of_a_plain_loop():
    result, model = run(15)
    losses, plain_model = plain_loop(15)
    assert result.losses == losses
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (result.step, result.stopped_by, result.resumed_from) == (15, "steps", 0)


@pytest.mark.parametrize(
    ("option", "limit", "clip"),
    [("clip_value", 0.05, nn.utils.clip_grad_value_), ("clip_norm", 0.2, nn.utils.clip_grad_norm_)],
)
def test_scaled_gradients_are_clipped_as_those_of_a_plain_loop(option, limit, clip):
    """The scale is a power of two, so scaling does not round."""
    result, model = run(15, loss_scale=training.LossScale(2.0**10), **{option: limit})
    losses, plain_model = plain_loop(15, clip=lambda parameters: clip(parameters, limit))
    assert result.losses == pytest.approx(losses, rel=1e-6)
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


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


def test_nothing_reads_the_device_between_logging_boundaries():
    model, optimizer, data = problem()
    reads = {}

    class AtBoundary(training.Callback):
        def on_log(self, entry):
            reads[entry.step] = mode.count

    with Reads() as mode:
        run(
            30,
            of=(model, optimizer, data),
            loss_scale=training.LossScale(16.0, growth_interval=3),
            clip_norm=1.0,
            schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
            log_every=10,
            callbacks=[AtBoundary()],
        )
        assert reads == {10: 0, 20: 0, 30: 0}
        optimizer.param_groups[0]["params"][0][0, 0].item()
        assert mode.count == 1  # the mode counts this read


def test_log_entry_covers_every_step_since_the_last():
    model, optimizer, data = problem()
    seen = Seen()
    result, _ = run(
        7,
        of=(model, optimizer, data),
        log_every=3,
        clip_norm=0.1,
        loss_scale=training.LossScale(2.0**10),
        schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        evaluate=lambda model: {"weight": model[0].weight.sum().item()},
        evaluate_every=5,
        callbacks=[seen],
    )
    lengths = [(entry.step, len(entry.losses)) for entry in seen.entries]
    assert lengths == [(3, 3), (5, 2), (6, 1), (7, 1)]
    assert sum((entry.losses for entry in seen.entries), ()) == result.losses
    assert [step for step, _ in seen.evaluations] == [5, 7]
    first = seen.entries[0]
    assert first.loss == pytest.approx(sum(first.losses) / 3)
    assert first.learning_rates == (0.02 * 0.5**3,)
    assert (first.loss_scale, first.skipped) == (2.0**10, 0)
    assert first.gradient_norm > 0.1
    assert first.steps_per_second > 0
    assert seen.ends == [result]


def test_evaluation_runs_without_dropout_and_gradients_and_restores_modes():
    of = problem()
    of[0].append(nn.Dropout(0.0))
    of[0].insert(1, nn.BatchNorm1d(8).eval())  # frozen
    modes = []

    def evaluate(model):
        modes.append((model.training, torch.is_grad_enabled()))
        return {}

    _, model = run(4, of=of, evaluate=evaluate, evaluate_every=2)
    assert modes == [(False, False)] * 2
    assert model.training
    assert model[0].training
    assert not model[1].training
    assert model[1].running_mean.eq(0).all()


def test_micro_batches_make_the_same_step_as_one_batch():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
    results = []
    for size, parts in ((8, 1), (2, 4)):
        data = training.Batches((inputs, inputs.sum(1, keepdim=True)), size, shuffle=False)
        results.append(run(8, of=(*problem()[:2], data), accumulate=parts))
    (one, model), (four, other) = results
    assert four.losses == pytest.approx(one.losses, abs=1e-6)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


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
    of = problem()
    with pytest.raises(training.DivergedError) as error:
        run(
            *(100,),
            of=of,
            loss=nan_from(8),
            loss_scale=training.LossScale(1024.0),
            log_every=10,
            fuse=fuse,
        )
    for text in ("step 10", "since step 8", "loss scale 128"):
        assert text in str(error.value)
    assert all(p.isfinite().all() for p in of[0].parameters())


@pytest.mark.parametrize("fuse", [None, *FUSED])
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


def test_callback_can_stop_training_with_resumable_checkpoint(tmp_path):
    class Enough(training.Callback):
        def on_log(self, entry):
            if entry.step == 6:
                raise training.StopTraining

    first, _ = run(20, log_every=3, checkpoints=tmp_path, callbacks=[Enough()])
    assert (first.step, first.stopped_by) == (6, "callback")
    whole, _ = run(20, log_every=3)
    of = (*problem(seed=9)[:2], problem()[2])
    rest, _ = run(20, of=of, log_every=3, checkpoints=tmp_path)
    assert rest.resumed_from == 6
    assert first.losses + rest.losses == whole.losses
    again, _ = run(20, checkpoints=tmp_path)
    assert (again.step, again.losses, again.resumed_from) == (20, (), 20)


@pytest.mark.parametrize("ahead", [0, 2])
def test_callback_can_stop_training_between_boundaries(tmp_path, ahead):
    class Enough(training.Callback):
        def on_step(self, step):
            if step == 4:
                raise training.StopTraining

    stopped, _ = run(20, ahead=ahead, callbacks=[Enough()])
    assert (stopped.step, stopped.stopped_by) == (4, "callback")
    first, _ = run(20, ahead=ahead, checkpoints=tmp_path, callbacks=[Enough()])
    assert 4 <= first.step <= 4 + ahead + 1  # one more batch may be loading
    assert first.stopped_by == "callback"
    rest, _ = run(20, ahead=ahead, checkpoints=tmp_path)
    assert rest.resumed_from == first.step
    assert first.losses + rest.losses == run(20)[0].losses


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        (training.AdamW, {}, "optimizer='SGD', but this run has 'AdamW'"),
        (training.SGD, {"accumulate": 2}, "accumulate=1, but this run has 2"),
        (training.SGD, {"loss_scale": training.LossScale()}, "loss_scale=None, but this run has"),
    ],
)
def test_run_with_other_options_does_not_resume_checkpoint(tmp_path, optimizer, options, message):
    run(5, checkpoints=tmp_path)
    model, _, data = problem()
    of = (model, optimizer(model.parameters()), data)
    with pytest.raises(ConfigError, match=message):
        run(9, of=of, checkpoints=tmp_path, **options)


def other(model=None, optimizer=training.SGD, parameters=None, data=None):
    usual, _, usual_data = problem()
    model = model or usual
    return model, optimizer(parameters or model.parameters(), lr=0.1), data or usual_data


def of_another(optimizer):
    del optimizer
    return torch.optim.lr_scheduler.LinearLR(other()[1])


ONE = [nn.Parameter(torch.ones(1))]


FOR_TWO = training.Batches((torch.ones(8, 4), torch.ones(8, 1)), 2, rank=1, world=2)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"model": nn.Tanh(), "parameters": ONE}, {}, "the model, a Tanh, has no parameters"),
        ({"model": nn.Linear(4, 1), "parameters": ONE}, {}, "none of the model's parameters"),
        ({"model": nn.Linear(4, 1).requires_grad_(False)}, {}, "there is nothing to train"),
        ({"optimizer": torch.optim.Adagrad}, {"precision": "fp16"}, "Adagrad cannot skip steps"),
        ({"data": FOR_TWO}, {}, "for 2 processes, but 1 train"),
        ({}, {"job": "no name!!"}, "job: "),
        ({}, {"loss": lambda model, batch: model(batch[0])}, r"the loss is \[4, 1\], not one numb"),
        ({}, {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "needs a metric"),
        ({}, {"schedule": of_another}, "the schedule, a LinearLR, was made of another optimizer"),
    ],
)
def test_untrainable_arguments_are_refused_with_reason(changed, options, message):
    of = other(**changed)
    if "schedule" in options:
        options = {"schedule": options["schedule"](of[1])}
    with pytest.raises(ValueError, match=message):
        run(of=of, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"steps must be a whole number, at least 1 \(got 0\)"),
        ({"log_every": 0}, r"log_every must be a whole number, at least 1 \(got 0\)"),
        ({"accumulate": -1}, r"accumulate must be a whole number, at least 1 \(got -1\)"),
        ({"steps": 2.5}, r"steps must be a whole number, at least 1 \(got 2.5\)"),
        ({"metrics": ("loss",)}, "metrics: loss is logged without being named"),
        ({"precision": "int8"}, r"precision must be 'fp32', 'bf16' or 'fp16' \(got 'int8'\)"),
        ({"fuse": "both"}, r"None, 'backward' or 'forward' \(got 'both'\)"),
        ({"fuse": "forward", "traced": True}, "leave fuse or traced out"),
        ({"fuse": "backward", "clip_norm": 1.0}, "clip_norm would wait for: use fuse='forward'"),
        ({"fuse": "backward", "clip_value": 1.0}, "clip_value would wait for"),
        ({"fuse": "backward", "accumulate": 2}, "accumulate would wait for"),
        ({"fuse": "backward", "precision": "fp16"}, "fp16 would wait for"),
    ],
)
def test_argument_out_of_range_or_in_conflict_is_refused_with_reason(options, message):
    with pytest.raises(ConfigError, match=message):
        run(**{"steps": 5} | options)


def test_the_loss_may_come_with_other_numbers_and_from_an_object():
    def losses(model, batch):
        error = model(batch[0]) - batch[1]
        return {"loss": error.square().mean(), "l1": error.abs().mean(), "prediction": error}

    class Output:
        def __init__(self, values):
            self.loss, self.l1 = values["loss"], values["l1"]

    seen = Seen()
    options = {"metrics": ["l1"], "accumulate": 2, "log_every": 2, "callbacks": [seen]}
    results = [
        run(4, loss=loss, **options)[0]
        for loss in (losses, lambda model, batch: Output(losses(model, batch)))
    ]
    assert results[0].losses == results[1].losses
    first, second = (entry.metrics["l1"] for entry in seen.entries[:2])
    assert len(first) == len(second) == 2
    assert all(value > 0 for value in first + second)
    with pytest.raises(ValueError, match=r"the kl is NoneType.*a mapping with 'loss'"):
        run(4, loss=losses, metrics=["kl"])


def test_averaged_parameters_are_updated_every_step_and_saved(tmp_path):
    def trained(steps, directory, seed=0):
        model, optimizer, _ = problem(seed=seed)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        steps_seen = []

        class Average(training.Callback):
            def on_step(self, step):
                steps_seen.append(step)
                averaged.update_parameters(model)

        options = {"checkpoints": directory, "stateful": {"ema": averaged}}
        run(steps, of=(model, optimizer, problem()[2]), callbacks=[Average()], **options)
        return steps_seen, [p.tolist() for p in averaged.parameters()]

    steps, whole = trained(8, tmp_path / "whole")
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    trained(3, tmp_path / "parts")
    steps, resumed = trained(8, tmp_path / "parts", seed=5)
    assert steps == [4, 5, 6, 7, 8]
    assert resumed == whole
    with pytest.raises(ConfigError, match=r"stateful=\['ema'\], but this run has \[\]"):
        run(9, checkpoints=tmp_path / "whole")


class Broken(torch.utils.data.Dataset):
    """A dataset with one unreadable element, until it is repaired."""

    def __init__(self):
        self.broken = True
        self.inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.broken and index == 13:
            raise OSError("a damaged file")
        return self.inputs[index], self.inputs[index].sum(0, keepdim=True)


class Fails(training.Callback):
    def on_log(self, entry):
        if entry.step == 4:
            raise RuntimeError("on purpose")


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("cause", ["data", "callback"])
def test_after_an_exception_training_resumes_where_it_stopped(tmp_path, cause, ahead):
    def trained(*, broken, **options):
        dataset = Broken()
        dataset.broken = broken and cause == "data"
        of = (*problem()[:2], training.Batches(dataset, 2, seed=1))
        return run(12, of=of, ahead=ahead, log_every=2, **options)[0]

    whole = trained(broken=False)
    seen = Seen()
    callbacks = [seen] + ([Fails()] if cause == "callback" else [])
    with pytest.raises((OSError, RuntimeError), match=r"damaged file|on purpose"):
        trained(broken=True, checkpoints=tmp_path, callbacks=callbacks)
    assert seen.checkpoints != []
    rest = trained(broken=False, checkpoints=tmp_path)
    assert rest.resumed_from == seen.checkpoints[-1] > 0
    assert rest.losses == whole.losses[rest.resumed_from :]


def test_an_exception_in_the_middle_of_a_step_leaves_no_checkpoint(tmp_path):
    calls = []

    def loss(model, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("on purpose")
        return mse(model, batch)

    with pytest.raises(RuntimeError, match="on purpose"):
        run(8, loss=loss, checkpoints=tmp_path)
    assert list(tmp_path.glob("*.pt")) == []


def test_progress_is_printed_as_lines_without_terminal(capfd):
    run(6, log_every=3, evaluate=lambda model: {"a": 1.0}, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("step 3/6  loss ")
    assert "step 6: evaluation  a 1.0000" in lines
    assert lines[-1].startswith("6 steps in ")


def drawing_evaluation(model):
    torch.rand(3)
    return {}


@pytest.mark.parametrize(
    ("ahead", "checkpoint_every", "stop"),
    [(0, 1, 4), (3, 1, 5), (0, 2, 5), (3, 2, 4), (0, 3, 4), (3, 3, 5)],
)
def test_run_resumes_exactly_from_any_step(tmp_path, ahead, checkpoint_every, stop):
    def losses_of(steps, **options):
        inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(5))
        samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        data = torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True)
        options |= {"ahead": ahead, "evaluate": drawing_evaluation, "evaluate_every": 2}
        return run(steps, of=(*problem()[:2], data), **options)[0].losses

    whole = losses_of(12)
    saving = {"checkpoints": tmp_path, "checkpoint_every": checkpoint_every}
    first = losses_of(stop, log_every=1, **saving)
    torch.manual_seed(77)
    rest = losses_of(12, log_every=3, **saving)
    assert first + rest == whole


@pytest.mark.parametrize(("ahead", "count"), [(None, 0), (0, 0), (2, 1)])
def test_loading_ahead_on_a_cpu_warns_that_dropout_resumes_differently(
    ahead, count, tmp_path, caplog
):
    run(ahead=ahead)  # has nothing to resume
    run(ahead=ahead, checkpoints=tmp_path)
    assert sum("will not resume exactly" in each.getMessage() for each in caplog.records) == count


def test_one_shot_data_is_accepted_without_checkpoints(tmp_path):
    model, optimizer, data = problem()
    of = (model, optimizer, (next(data) for _ in range(50)))
    assert run(20, of=of, ahead=2, log_every=5)[0].step == 20
    with pytest.raises(ConfigError, match="its position cannot be saved"):
        run(30, of=of, checkpoints=tmp_path)


def test_stop_and_sigterm_at_once_write_checkpoint_and_end_process(tmp_path):
    class StopAtOnce(training.Callback):
        def on_log(self, entry):
            raise training.StopTraining

    class Terminated(training.Callback):
        def on_log(self, entry):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run(8, log_every=2, checkpoints=tmp_path, callbacks=[StopAtOnce(), Terminated()])
    assert ended.value.code == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.glob("*.pt")] == ["step-00000002.pt"]

    def evaluate(model):  # the last evaluation
        os.kill(os.getpid(), signal.SIGTERM)
        return {}

    with pytest.raises(SystemExit):
        run(3, evaluate=evaluate)


def test_a_callback_that_stops_before_the_first_step_stops():
    class Never(training.Callback):
        def on_start(self, step, steps):
            raise training.StopTraining

    result, _ = run(3, callbacks=[Never()])
    assert (result.step, result.stopped_by) == (0, "callback")


def test_unsavable_state_is_refused_before_first_step(tmp_path):
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {1, 2}

        def set_extra_state(self, state):
            pass

    seen = Seen()
    with pytest.raises(ConfigError, match="_extra_state"):
        run(5, of=other(Odd(4, 1)), checkpoints=tmp_path, callbacks=[seen])
    assert not seen.entries


@pytest.fixture
def start(jobs, tmp_path):
    """Return a function that starts the training job, which writes its losses to a file."""

    def start(*options, name="job"):
        arguments = (tmp_path / name, f"--steps={STEPS}", *options)
        return jobs.start(tmp_path, *arguments, script=TRAIN_JOB, under="torch")

    return start


@pytest.mark.parametrize(
    ("data", "threads"),
    [("batches", True), pytest.param("loader", False, marks=pytest.mark.extended)],
)
def test_killed_at_random_steps_the_loss_curve_is_that_of_an_uninterrupted_run(
    start, tmp_path, data, threads
):
    arguments = [f"--data={data}"]
    if threads:  # a model's dropout would draw from the generator of the loading thread
        arguments += ["--ahead=2", "--precision=fp16", "--no-dropout"]
    whole = start(*arguments, name="whole").finish()
    kills = random.Random(f"{data} {threads}")
    arguments += [f"--checkpoints={tmp_path / 'checkpoints'}", "--slow=0.002"]
    for _ in range(3):
        job = start(*arguments)
        until_step(kills.randrange(2, 34), tmp_path / "job", job)
        job.kill()
    last = start(*arguments).finish()
    assert last.report["resumed_from"] > 0
    assert losses_of(tmp_path / "job") == losses_of(tmp_path / "whole")
    assert last.report["weights"] == whole.report["weights"]


@pytest.mark.parametrize(
    ("asked", "options"),
    [(signal.SIGTERM, ("--ahead=3", "--no-dropout", "--accumulate=2")), (signal.SIGINT, ())],
)
def test_signal_writes_checkpoint_of_current_step_and_ends_process(start, tmp_path, options, asked):
    start(*options, name="whole").finish()
    checkpoints = (f"--checkpoints={tmp_path / 'checkpoints'}", "--checkpoint-every=1000")
    job = start(*options, *checkpoints, "--hold-at=70")  # in the second epoch
    until(lambda: (tmp_path / "job.held").exists() or job.ended())
    os.kill(job.pid, asked)
    (tmp_path / "job.go").touch()
    if asked == signal.SIGTERM:
        assert job.status() == 128 + asked
    else:
        assert job.status() != 0
        assert job.errors.read_text().endswith("KeyboardInterrupt\n")
    made = max(losses_of(tmp_path / "job"))
    assert 0 < made < STEPS
    rest = start(*options, *checkpoints).finish()
    assert rest.report["resumed_from"] == made
    assert losses_of(tmp_path / "job") == losses_of(tmp_path / "whole")


@pytest.mark.extended  # test_parallel proves it without torchrun
def test_two_processes_train_as_one_with_their_batches_together(start, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [
            Path(sys.executable).with_name("torchrun"),
            "--standalone",
            "--nproc-per-node=2",
            TRAIN_JOB,
            tmp_path / "two.json",
            tmp_path / "two.losses",
            "--steps=20",
            "--no-dropout",
            "--ranks",
            "--fuse=forward",
            "--stop-at=11",  # only the first process requests the stop; both stop at the boundary
            f"--checkpoints={tmp_path / 'checkpoints'}",
        ],
        env=environment,
        check=True,
        timeout=120,
    )
    one = start("--steps=20", "--no-dropout", "--accumulate=2", "--stop-after=12").finish()
    first, second = (
        json.loads((tmp_path / name).read_text()) for name in ("two.json", "two.json.1")
    )
    assert first["step"] == second["step"] == 12
    assert first["weights"] == second["weights"]
    assert first["weights"] == pytest.approx(one.report["weights"], abs=1e-5)
    with training.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        last = checkpoints.load()
    assert last.step == 12
    assert [sorted(place) for place in last.state["data"]] == [["batch", "data", "epoch"]] * 2

    alone = ("--steps=20", "--no-dropout", "--batch=8")
    whole = start(*alone, name="whole").finish()
    rest = start(*alone, f"--checkpoints={tmp_path / 'checkpoints'}", name="rest").finish()
    assert rest.report["resumed_from"] == 12
    assert rest.report["weights"] == pytest.approx(whole.report["weights"], abs=1e-5)


def test_other_number_of_processes_needs_data_with_position(tmp_path):
    model, optimizer, batches = problem()
    data = [next(batches) for _ in range(6)]
    options = {"loss": mse, "checkpoints": tmp_path, "progress": False}
    training.train(model, optimizer, data, steps=5, **options)
    with training.Checkpoints(tmp_path) as checkpoints:
        state = checkpoints.load().state
        checkpoints.save(6, state | {name: state[name] * 2 for name in ("data", "random")}).result()
    with pytest.raises(ConfigError, match="made by 2 processes, not by 1"):
        training.train(model, optimizer, data, steps=9, **options)
