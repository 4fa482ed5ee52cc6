"""The traced step as a CUDA graph, on a double that enforces CUDA's rules. tests/gpu uses a GPU."""

import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphstash.training.optimizers import SGD, AdamW
from graphstash.training.optimizers.gradients import LossScale
from graphstash.training.traced import comparison, referents
from graphstash.training.traced.comparison import compared
from graphstash.training.traced.state import State
from graphstash.training.traced.torch_graph import CudaGraphStep
from support import cuda_double
from support.cuda_double import CudaDouble

STEPS = 9
CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch):
    return CudaDouble(monkeypatch)


class Training:
    """A small model with a loss scale; `step` trains it on one batch."""

    def __init__(self, *, traced, optimizer=AdamW, reads_at=()):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.scale = LossScale(8.0, growth_interval=2).to("cpu")
        self.reads_at, self.calls = reads_at, 0
        self.step = self.function
        if traced:
            state = State([self.model, self.optimizer, self.scale])
            self.step = CudaGraphStep(self.function, state, device=CPU)

    def function(self, x, y):
        self.calls += 1
        loss = functional.mse_loss(self.model(x), y)
        self.scale.scale(loss).backward()
        self.scale.step(self.optimizer)
        if self.calls in self.reads_at:
            loss.item()
        self.scale.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def train(self, numbers, size=8):
        return [float(self.step(*batch(number, size))) for number in numbers]

    def state(self):
        states = self.optimizer.state.values()
        moments = [value for state in states for value in state.values()]
        tensors = (*self.model.parameters(), *moments, *self.scale.device_tensors())
        return [tensor.tolist() for tensor in tensors]


def batch(number, size=8):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(number))
    return x, x.sum(1, keepdim=True)


def close(ours, theirs):
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


def assert_equal_training(traced, plain):
    close(traced.train(range(STEPS)), plain.train(range(STEPS)))
    for pair in zip(traced.state(), plain.state(), strict=True):
        close(*pair)


@pytest.mark.parametrize("optimizer", [SGD, AdamW])
def test_a_captured_step_trains_as_the_function_does(cuda, optimizer):
    traced, plain = (Training(traced=traced, optimizer=optimizer) for traced in (True, False))
    assert_equal_training(traced, plain)
    assert (traced.step.mode, cuda.captures) == ("traced", 1)
    assert traced.calls == 3 + 1 + 1  # uncaptured, captured, compared


def test_steps_before_and_after_the_capture_are_computed_in_one_way(cuda):
    """Otherwise a resumed run, which warms up again, would not compute the same bits."""
    long, short = Training(traced=True), Training(traced=True)
    losses = long.train(range(STEPS))
    assert short.train(range(5)) == losses[:5]
    short.step.retrace()
    assert short.train(range(5, STEPS)) == losses[5:]
    assert short.state() == long.state()


def test_step_is_run_after_failed_capture(cuda):
    traced, plain = Training(traced=True, reads_at=range(4, 99)), Training(traced=False)
    assert_equal_training(traced, plain)
    assert all(parameter.grad is None for parameter in traced.model.parameters())
    assert traced.step.reason == (
        "CUDA graph capture failed: RuntimeError: operation not permitted when stream is capturing"
    )
    assert (traced.step.mode, cuda.captures) == ("lazy", 0)


class Counting(Training):
    """Scale the loss by a Python number that changes with every step."""

    def function(self, x, y):
        return super().function(x, y * self.calls)


def test_graph_that_keeps_a_number_which_changes_is_refused(cuda):
    traced, plain = Counting(traced=True), Counting(traced=False)
    assert_equal_training(traced, plain)
    assert traced.calls == plain.calls
    assert traced.step.mode == "lazy"
    assert traced.step.reason.startswith(
        "its CUDA graph computes other values than the function for `0.weight`, `0.bias`, "
    )


@pytest.mark.parametrize(
    ("deviation", "is_accepted"), [(0.0, True), (3e-7, True), (1e-4, False), (math.nan, False)]
)
@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_graph_may_differ_by_the_noise_of_its_kernels(cuda, noise, deviation, is_accepted):
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(64)

    def made(offset):
        weight.add_(torch.randn(64, generator=generator) * noise + 1 + offset)
        return weight.sum()

    state = State([weight])
    made_step = compared(lambda: made(0.0), lambda: made(deviation), state, CPU)
    assert torch.equal(made_step.result, weight.sum())
    assert (made_step.reason is None) == (is_accepted and (deviation == 0 or noise > 0))


def test_graph_that_cannot_be_compared_is_refused_after_one_step(cuda):
    weight = torch.zeros(4)
    made = compared(lambda: weight.add_(1), lambda: 1 / 0, State([weight]), CPU)
    assert made.reason == "its CUDA graph cannot be compared: ZeroDivisionError: division by zero"
    assert made.is_made
    assert weight.tolist() == [1.0] * 4


def test_state_that_cannot_be_written_keeps_the_step_from_being_compared(cuda):
    overlapping, calls = torch.ones(1).expand(8), []
    made = compared(lambda: calls.append(1), lambda: None, State([overlapping]), CPU)
    assert (made.is_made, calls) == (False, [])
    assert made.reason.startswith("its CUDA graph cannot be compared: RuntimeError: ")


def test_step_that_runs_out_of_memory_is_not_made(cuda):
    weight = torch.zeros(4)

    def fails():
        weight.add_(1)
        raise torch.OutOfMemoryError("too little")

    made = compared(fails, lambda: None, State([weight]), CPU)
    assert not made.is_made
    assert made.reason == "its CUDA graph cannot be compared: OutOfMemoryError: too little"
    assert weight.tolist() == [0.0] * 4


def test_state_too_large_for_the_host_is_not_compared(cuda, monkeypatch):
    monkeypatch.setattr(comparison, "_available_bytes", lambda: 63)
    weight = torch.zeros(4)
    made = compared(lambda: weight.add_(1), lambda: 1 / 0, State([weight]), CPU)
    assert made == comparison.Comparison(is_made=False, result=None, reason=None)
    monkeypatch.setattr(comparison, "_available_bytes", lambda: 64)
    assert compared(lambda: weight.add_(1), lambda: weight.add_(1), State([weight]), CPU).is_made


def test_parameter_that_only_an_optimizer_has_makes_one_step(cuda):
    scale = nn.Parameter(torch.zeros(()))
    optimizer = SGD([scale], lr=0.1)

    def function():
        scale.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = CudaGraphStep(function, State([optimizer]), device=CPU)
    for _ in range(STEPS):
        step()
    assert (step.mode, step.reason) == ("traced", None)
    torch.testing.assert_close(scale.detach(), torch.tensor(-0.1 * STEPS))


def test_graph_that_repeats_another_effect_of_the_function_is_refused(cuda):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.calls = 0

    counter = Counter()

    def replacing(x):
        counter.mean = 0.9 * counter.mean + 0.1 * x

    def counting(x):
        counter.calls += 1
        return counter.mean.add_(x).sum(), counter.calls

    reasons = {
        replacing: "CUDA graph capture failed: the function replaces `mean`, or changes it on the "
        "host, which a CUDA graph cannot repeat; write in place, on the device (torch.optim: "
        "capturable=True)",
        counting: "the function returns other Python values than its CUDA graph",
    }
    for function, reason in reasons.items():
        counter.mean = torch.zeros(4)
        step = CudaGraphStep(function, State([counter]), device=CPU)
        for _ in range(STEPS):
            step(torch.ones(4))
        assert step.reason == reason
    assert counter.mean.tolist() == [STEPS] * 4


def replaced_data(training):
    training.model[0].weight.data = training.model[0].weight.data * 0.5


def cleared(training):
    training.optimizer.state.clear()


def loaded_twice(training):
    """Load twice: the second dictionary of states may get the id that the first one had."""
    for _ in range(2):
        training.optimizer.load_state_dict(deepcopy(training.optimizer.state_dict()))


def new_layer(training):
    layer = nn.Linear(16, 1)
    layer.load_state_dict(training.model[2].state_dict())
    training.model[2] = layer


@pytest.mark.parametrize("change", [replaced_data, cleared, loaded_twice, new_layer])
def test_graph_is_not_used_for_other_tensors_than_those_of_its_capture(cuda, change):
    traced, plain = Training(traced=True), Training(traced=False)
    for training in (traced, plain):
        training.train(range(6))
        change(training)
    assert_equal_training(traced, plain)
    assert (traced.step.mode, cuda.captures) == ("traced", 2)


def test_step_whose_state_is_replaced_before_each_capture_is_refused(cuda):
    traced = Training(traced=True)
    for number in range(5):
        traced.train(range(4))
        assert (traced.step.mode == "traced") == (number < 4)
        replaced_data(traced)
    assert "are replaced again and again" in traced.step.reason


@pytest.fixture
def rate(monkeypatch):
    """A tensor on the host. The double has one device, so the fixture says which tensor it is, and
    lets a capture read tensors.
    """
    tensor = torch.tensor(0.5)
    monkeypatch.setattr(cuda_double, "_READS", frozenset())
    monkeypatch.setattr(referents, "_is_on_host", lambda each, _: each is tensor)
    return tensor


@pytest.mark.parametrize("who", ["caller", "step"])
def test_graph_is_not_used_for_other_values_of_the_host(cuda, rate, who):
    weight = torch.zeros(3)
    value = rate.numpy()  # the double records and undoes operations of torch

    def function():
        nonlocal value
        weight.sub_(torch.full((), float(value)))
        if who == "step":
            value *= 0.5

    step = CudaGraphStep(function, State([weight, rate]), device=CPU)
    for number in range(STEPS):
        if who == "caller" and number == STEPS - 2:
            rate.fill_(0.25)
        step()
    if who == "caller":
        torch.testing.assert_close(weight, torch.full((3,), -0.5 * (STEPS - 2) - 0.25 * 2))
        assert step.reason is None
    else:
        torch.testing.assert_close(weight, torch.full((3,), 0.5**STEPS - 1))
        assert "changes it on the host" in step.reason


def test_uploaded_learning_rate_on_the_host_may_change_with_every_step(cuda, rate):
    """Our optimizers upload it, so the graph needs no other capture."""
    rates = rate, rate.clone()
    traced, plain = (
        Training(traced=each, optimizer=lambda parameters, lr, own=own: AdamW(parameters, lr=own))
        for each, own in zip((True, False), rates, strict=True)
    )
    for number in range(STEPS):
        for each in rates:
            each.fill_(0.01 / (number + 1))
        close(traced.train([number]), plain.train([number]))
    assert (traced.step.mode, cuda.captures) == ("traced", 1)


@pytest.mark.parametrize("how", ["cleared in the step", "added up", "added to a copy"])
def test_gradients_that_a_step_leaves_are_those_of_its_own_graph(cuda, how):
    """Graphs of two structures alternate, and each graph writes gradients of its own."""

    def function_of(weight):
        def function(x):
            if how == "cleared in the step":
                weight.grad = None
            (weight * x.sum(0)).sum().backward()

        function(torch.ones(1, 2))  # gradients exist from the first step on
        return function

    ours, theirs = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    step, function = function_of(ours), function_of(theirs)
    step = CudaGraphStep(step, State([ours]), device=CPU)
    for number in range(2 * STEPS):
        x = torch.full((1 + number % 2, 2), float(number))
        step(x)
        function(x)
        assert torch.equal(ours.grad, theirs.grad)
        if how == "added to a copy":
            ours.grad = ours.grad.clone()
    assert (step.mode, step.reason) == ("traced", None)


def test_exception_of_function_is_raised_inside_and_outside_capture(cuda):
    traced = Training(traced=True)
    traced.train(range(3))

    def fails(x, y):
        raise ValueError("a bad batch")

    traced.step._function = fails
    with pytest.raises(ValueError, match="a bad batch"):
        traced.train([3])


def test_captures_share_one_memory_pool(cuda):
    traced = Training(traced=True)
    for size in (8, 6):
        traced.train(range(4), size)
    assert cuda.captures == 2
    assert len(set(cuda.pools)) == 1


TOTAL = torch.zeros(1)
QUEUE = {"losses": [torch.zeros(2), torch.zeros(2)]}


class Effects:
    """Steps that change tensors outside of the state. `kept` holds these tensors of each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.model.mean = torch.zeros(4)  # not a buffer
        self.total, self.last, self.largest = torch.zeros(1), torch.zeros(()), torch.zeros(1)
        self.calls, self.writes_at = 0, 5
        QUEUE["losses"][1].zero_()
        TOTAL.zero_()

    def loss(self, x):
        loss = self.model(x).square().mean()
        self.model.weight.grad = None
        loss.backward()
        with torch.no_grad():
            self.model.weight.add_(self.model.weight.grad, alpha=-0.1)
        return loss.detach()

    def in_attribute(self, x):
        self.total.add_(self.loss(x))
        self.kept = self.total

    def in_module(self, x):
        self.model.mean.lerp_(x.mean(0), 0.1)
        self.loss(x)

    def in_global(self, x):
        TOTAL.add_(self.loss(x))

    def in_container(self, x):
        QUEUE["losses"][1].add_(self.loss(x))

    def in_closure(self):
        total = torch.zeros(1)
        self.kept = total

        def function(x):
            total.add_(self.loss(x))

        return function

    def replaced(self, x):
        self.last = self.loss(x)

    def replaced_by_sum(self, x):
        self.total = self.total + self.loss(x)

    def in_some_steps(self, x):
        loss = self.loss(x)
        self.calls += 1
        if self.calls == self.writes_at:
            self.largest.copy_(loss)

    def values(self):
        tensors = [self.total, self.last, self.largest, self.model.mean, TOTAL, QUEUE["losses"][1]]
        kept = getattr(self, "kept", TOTAL)
        return [*map(torch.clone, tensors), kept.clone(), self.model.weight.detach().clone()]

    def made(self, name, *, traced):
        function = self.in_closure() if name == "in_closure" else getattr(self, name)
        step = CudaGraphStep(function, State([self.model]), device=CPU) if traced else function
        seen = []
        for number in range(STEPS):
            step(batch(number)[0][:, :4])
            seen += self.values()
        return step, seen


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, None) for name in ("in_attribute", "in_module", "in_global", "in_container")),
        *((name, None) for name in ("in_closure", "replaced")),
        ("replaced_by_sum", "computes other values than the function for `self.total`"),
        ("in_some_steps", "changes `self.largest` outside of `state` in some steps"),
    ],
)
def test_tensors_outside_of_the_state_change_once_per_step(cuda, name, reason):
    step, seen = Effects().made(name, traced=True)
    _, expected = Effects().made(name, traced=False)
    close_all(seen, expected)
    assert (step.mode, step.reason is None) == (("traced", True) if not reason else ("lazy", False))
    assert reason is None or reason in step.reason


def close_all(ours, theirs):
    for pair in zip(ours, theirs, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


def test_failed_capture_leaves_replaced_tensors_as_they_were(cuda):
    effects = Effects()

    def function(x):
        effects.total = effects.total + x.mean()
        effects.total.item()

    step = CudaGraphStep(function, State([effects.model]), device=CPU)
    for _ in range(STEPS):
        step(torch.ones(2, 4))
    assert step.mode == "lazy"
    assert effects.total.item() == STEPS


class Drawing(Training):
    """Draw random numbers, as dropout does, and read the loss from the fourth step on."""

    def __init__(self, cuda):
        super().__init__(traced=True, reads_at=range(4, 99))
        self.draw = cuda.draw

    def function(self, x, y):
        self.draw()
        return super().function(x, y)


def test_failed_capture_leaves_stream_generator_and_memory_as_they_were(cuda):
    Drawing(cuda).train(range(STEPS))
    assert cuda.stream is cuda.default
    assert cuda.device == "cuda:7"
    assert cuda.unended == []
    assert {*cuda.held.values()} - {0} == {1}  # that of the capture that ends the failed one


def test_capture_runs_on_the_device_of_the_state(cuda):
    seen = []
    training = Training(traced=True)
    function = training.function

    def watched(x, y):
        seen.append((cuda.device, cuda.stream.device))
        return function(x, y)

    training.step._function = watched
    training.train(range(4))
    assert seen[-1] == (CPU, CPU)
    assert (cuda.device, cuda.stream) == ("cuda:7", cuda.default)
