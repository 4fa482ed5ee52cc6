"""Training: steps, clipping, logs, evaluation, callbacks, and refused arguments."""

import pytest
import torch
from torch import nn

from graphstash import ConfigError, training
from graphstash._process import session
from support.device_reads import Reads
from support.small_training import Seen, mse, problem, run


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


def test_train_makes_the_steps_of_a_plain_loop(monkeypatch):
    recorded = []
    monkeypatch.setattr(session, "record_step", lambda: recorded.append("first"))
    result, model = run(15)
    assert recorded == ["first"]
    losses, plain_model = plain_loop(15)
    assert result.losses == losses
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (result.step, result.stopped_by, result.resumed_from) == (15, "steps", 0)


class OneBuffer:
    """Give every batch in the same tensors, which are written again or stay as they are."""

    def __init__(self, *, writes):
        self.writes = writes

    def __iter__(self):
        inputs, targets = torch.randn(4, 4), torch.zeros(4, 1)
        for _ in range(6):
            if self.writes:
                inputs.mul_(-0.9)
                targets.copy_(inputs.sum(1, keepdim=True))
            yield {"batch": (inputs, targets)}


class OwnTensors(OneBuffer):
    def __iter__(self):
        for given in super().__iter__():
            yield {"batch": tuple(tensor.clone() for tensor in given["batch"])}


def loss_in_place(model, given):
    given["batch"][0].mul_(0.5)
    return mse(model, given["batch"])


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"ahead": 1}, {"ahead": 3}])
def test_batches_that_are_written_before_their_step_are_refused(options):
    def losses_of(data, loss=lambda model, given: mse(model, given["batch"])):
        return run(9, of=(*problem()[:2], data), loss=loss, **options)[0].losses

    torch.manual_seed(3)
    assert len(losses_of(OneBuffer(writes=False))) == 9
    assert len(losses_of(OwnTensors(writes=True), loss_in_place)) == 9
    if options:
        with pytest.raises(ConfigError, match="the data writes into the tensors of a batch"):
            losses_of(OneBuffer(writes=True))
        return
    torch.manual_seed(4)
    expected = losses_of(OwnTensors(writes=True))
    torch.manual_seed(4)
    assert losses_of(OneBuffer(writes=True)) == expected


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
        ({"metrics": "acc"}, r"metrics is 'acc': it must be a list of names, such as \['acc'\]"),
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


def test_progress_is_printed_as_lines_without_terminal(capfd):
    run(6, log_every=3, evaluate=lambda model: {"a": 1.0}, progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("step 3/6  loss ")
    assert "step 6: evaluation  a 1.0000" in lines
    assert lines[-1].startswith("6 steps in ")


def test_a_callback_that_stops_before_the_first_step_stops():
    class Never(training.Callback):
        def on_start(self, step, steps):
            raise training.StopTraining

    result, _ = run(3, callbacks=[Never()])
    assert (result.step, result.stopped_by) == (0, "callback")
