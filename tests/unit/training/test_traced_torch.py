"""The traced step on plain torch, on a CPU, with the real torch.compile."""

import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from graphstash.training.optimizers import AdamW
from graphstash.training.traced import torch_graph, traced_step
from graphstash.training.traced.referents import Referents
from graphstash.training.traced.state import State
from support.deferred import Deferred

inductor = Deferred("torch._inductor.config")
codecache = Deferred("torch._inductor.codecache")
exceptions = Deferred("torch._dynamo.exc")
symbolic_convert = Deferred("torch._dynamo.symbolic_convert")

# torch.compile warns of graphs that it does not compile, and of its own deprecations.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(autouse=True)
def _compile_in_this_process():
    torch._dynamo.reset()
    torch_graph._unguarded.clear()
    # Otherwise torch tests each instruction set in a process that imports torch.
    with inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        yield


@pytest.fixture
def without_code(monkeypatch):
    """Let torch.compile trace without C++, whose compilation takes a minute of CPU time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


class Training:
    """A small model; `step` trains it on one batch."""

    def __init__(self, optimizer, *, traced):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        parameters = self.model.parameters()
        self.optimizer = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            "stateless": lambda: torch.optim.SGD(parameters, lr=0.05),
            "own": lambda: AdamW(parameters, lr=0.01),
        }[optimizer]()
        self.step = self.function
        if traced:
            self.step = traced_step(self.function, [self.model, self.optimizer])

    def function(self, x, y):
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def train(self, numbers, size=lambda _: 8):
        return torch.stack([self.step(*batch(n, size(n))).detach() for n in numbers])


def both(optimizer):
    return [Training(optimizer, traced=traced) for traced in (True, False)]


def batch(number, size=8):
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(size, 8, generator=generator)
    return x, x.sum(1, keepdim=True)


def assert_same(one, other):
    for (name, ours), theirs in zip(
        one.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)


def names_of_traced_code(monkeypatch):
    files, run = [], symbolic_convert.InstructionTranslator.run
    monkeypatch.setattr(
        symbolic_convert.InstructionTranslator,
        "run",
        lambda self: (files.append(self.f_code.co_filename), run(self)),
    )
    return files


def assert_trains_alike(traced, plain, numbers, size=lambda _: 8):
    losses = traced.train(numbers, size)
    torch.testing.assert_close(losses, plain.train(numbers, size), rtol=1e-5, atol=1e-6)
    assert_same(traced, plain)
    assert (traced.step.mode, traced.step.reason) == ("traced", None)


@pytest.mark.extended
def test_generated_code_is_not_traced_again(monkeypatch):
    """Matrix products need no generated kernel, and therefore no C++ compiler."""
    files = names_of_traced_code(monkeypatch)
    backward = torch.autograd.backward
    weights = [torch.ones(8, 8, requires_grad=True) for _ in range(2)]

    def function(weight, left, x, right):
        loss = left @ x @ weight @ right
        loss.backward()
        return loss

    traced = traced_step(partial(function, weights[0]), [weights[0]])
    steps = [traced, partial(function, weights[1])]
    for _ in range(3):
        batch = torch.randn(1, 8), torch.randn(8, 8), torch.randn(8, 1)
        ours, theirs = (step(*batch) for step in steps)
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    assert traced.mode == "traced"
    assert __file__ in files
    assert not [name for name in files if name.startswith(codecache.cache_dir())]
    assert torch.autograd.backward is backward


@pytest.mark.extended
@pytest.mark.parametrize("optimizer", ["stateless", "sgd", "own"])
def test_traced_training_is_equal_with_generated_kernels(optimizer):
    assert_trains_alike(*both(optimizer), range(5))


@pytest.mark.usefixtures("without_code")
def test_traced_step_with_own_optimizer_trains_like_the_lazy_step():
    assert_trains_alike(*both("own"), range(6))


@pytest.mark.usefixtures("without_code")
def test_second_batch_shape_is_compiled():
    assert_trains_alike(*both("sgd"), range(6), size=lambda number: 8 if number % 2 else 6)


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(
    "register",
    [
        lambda model: model[1].register_forward_hook(lambda module, given, result: result * 2),
        lambda model: model[1].register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
        lambda model: model[1].register_full_backward_hook(lambda module, ours, _: (ours[0] * 2,)),
        lambda model: model[0].weight.register_hook(lambda gradient: gradient * 2),
        lambda _: nn.modules.module.register_module_forward_pre_hook(
            lambda module, given: (given[0] * 2,)
        ),
    ],
    ids=["forward", "forward_pre", "backward", "tensor", "all_modules"],
)
def test_hook_registered_after_the_compilation_is_called(register):
    """torch.compile ignores the first hook of a module, and hooks on all modules."""
    losses = []
    for each in both("sgd"):
        losses.append(each.train(range(3)))
        hook = register(each.model)
        losses.append(each.train(range(3, 6)))
        hook.remove()
        losses.append(each.train(range(6, 9)))
    torch.testing.assert_close(losses[:3], losses[3:], rtol=1e-5, atol=1e-5)


class Tied(Training):
    """A model with a weight that two layers share until `untie`."""

    def __init__(self, *, traced):
        super().__init__("sgd", traced=traced)
        torch.manual_seed(0)
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        second.weight = first.weight
        self.model = nn.Sequential(first, nn.Tanh(), second, nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        if traced:
            self.step = traced_step(self.function, [self.model, self.optimizer])

    def untie(self):
        self.model[2].weight = nn.Parameter(self.model[0].weight.detach().clone())
        self.optimizer.add_param_group({"params": [self.model[2].weight]})


def assert_alike(pair, mode):
    losses, plain = (each.train(range(3)) for each in pair)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-5)
    assert pair[0].step.mode == mode


@pytest.mark.usefixtures("without_code")
def test_weights_that_are_untied_are_trained_apart():
    """Without a check, torch.compile would continue to run the program for tied weights."""
    pair = [Tied(traced=traced) for traced in (True, False)]
    assert_alike(pair, "traced")
    for each in pair:
        each.untie()
    assert_alike(pair, "lazy")
    assert "call retrace() on the step" in pair[0].step.reason
    pair[0].step.retrace()
    assert_alike(pair, "traced")


@pytest.mark.usefixtures("without_code")
def test_models_with_and_without_ties_share_a_function_one_after_the_other():
    tied, untied = [[Tied(traced=traced) for traced in (True, False)] for _ in range(2)]
    for each in untied:
        each.untie()
    assert_alike(tied, "traced")
    assert_alike(untied, "traced")
    assert_alike(tied, "lazy")


def test_step_runs_untraced_without_compiler(caplog):
    traced, plain = both("sgd")
    missing = {"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True}
    with caplog.at_level(logging.WARNING, logger="graphstash"), inductor.patch(missing):
        losses = traced.train(range(6))
    assert torch.equal(losses, plain.train(range(6)))
    for ours, theirs in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert traced.step.mode == "lazy"
    assert traced.step.reason.startswith("torch.compile failed: InvalidCxxCompiler: No working C++")
    assert [r.message for r in caplog.records if r.name == "graphstash"] == [
        f"running the training step untraced: {traced.step.reason}"
    ]


class NoisyTraining(Training):
    """Draw from torch's generator in each step."""

    def function(self, x, y):
        return super().function(x + 0.1 * torch.randn_like(x), y)


def test_a_failure_halfway_through_the_first_step_leaves_no_trace():
    """If forward compiles and backward does not, the failed attempt has already changed state."""
    traced, plain = (NoisyTraining("own", traced=traced) for traced in (True, False))

    def fails_after_all(x, y):
        traced.function(x, y)
        raise RuntimeError("no code for this CPU")

    traced.step._compiled = fails_after_all
    torch.manual_seed(1)
    losses = traced.train(range(4))
    torch.manual_seed(1)
    assert torch.equal(losses, plain.train(range(4)))
    for ours, theirs in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)
    assert traced.step.reason == "torch.compile failed: RuntimeError: no code for this CPU"


@pytest.mark.parametrize("of_compiler", [True, False])
def test_failure_after_a_change_outside_of_the_state_is_raised(of_compiler):
    """A second attempt would repeat the change outside of the state."""
    error, message = ValueError("a bad batch"), "a bad batch"
    if of_compiler:
        error = exceptions.BackendCompilerFailed(print, RuntimeError("no code"), None)
        message = "failed after the step had changed total, which is not in `state`"
    model, total = nn.Linear(2, 1), torch.zeros(1)

    def function(x):
        total.add_(model(x).sum().detach())

    def fails_after_all(x):
        function(x)
        raise error

    step = traced_step(function, [model])
    step._compiled = fails_after_all
    with pytest.raises((RuntimeError, ValueError), match=message) as raised:
        step(torch.ones(1, 2))
    assert error in (raised.value, raised.value.__cause__)
    assert torch.equal(total, model(torch.ones(1, 2))[0])


@pytest.mark.usefixtures("without_code")
def test_exception_of_function_is_raised():
    def function(_x):
        raise ValueError("a bad batch")

    step = traced_step(function, [nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="a bad batch"):
        step(torch.ones(2))


@pytest.mark.usefixtures("without_code")
def test_results_are_detached():
    model = nn.Linear(2, 2)
    step = traced_step(lambda x: {"loss": model(x).sum(), "count": 3}, [model])
    result = step(torch.ones(2))
    assert not result["loss"].requires_grad
    assert result["count"] == 3


def test_state_without_tensors_is_refused():
    with pytest.raises(TypeError, match="str in state"):
        traced_step(lambda: None, ["model"])
    with pytest.raises(ValueError, match="no tensor"):
        traced_step(lambda: None, [nn.ReLU()])


class Scheduled:
    def __init__(self):
        self.number = torch.zeros(())
        self.refreshed = 0

    def device_tensors(self):
        return [self.number]

    def refresh(self):
        self.refreshed += 1
        self.number.fill_(self.refreshed)


@pytest.mark.usefixtures("without_code")
def test_a_device_state_is_refreshed_before_every_step():
    scheduled = Scheduled()
    step = traced_step(lambda x: x * scheduled.number, [scheduled])
    assert [step(torch.ones(())).item() for _ in range(5)] == [1, 2, 3, 4, 5]


def test_every_tensor_of_a_state_is_found_once():
    training = Training("own", traced=False)
    training.train(range(1))
    own = torch.ones(3)
    scheduled = Scheduled()
    tensors = State([training.model, training.optimizer, own, own, scheduled]).tensors()
    assert len({id(t) for t in tensors}) == len(tensors)
    expected = [
        *training.model.parameters(),
        *training.model.buffers(),
        *training.optimizer.device_tensors(),
        own,
        scheduled.number,
    ]
    assert {id(t) for t in tensors} == {id(t) for t in expected}


CHANGES = {
    "eval": (lambda t: t.model.eval(), "structure"),
    "requires_grad": (lambda t: t.model[0].weight.requires_grad_(False), "structure"),
    "grad": (lambda t: t.model[0].weight.__setattr__("grad", None), "structure"),
    "learning rate": (lambda t: t.optimizer.param_groups[0].update(lr=0.5), "values"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_host_value_is_detected(name):
    change, seen = CHANGES[name]
    training = Training("sgd", traced=False)
    training.train(range(1))
    state = State([training.model, training.optimizer])
    before = {"structure": state.structure(), "values": state.values()}
    change(training)
    after = {"structure": state.structure(), "values": state.values()}
    assert [each for each in before if before[each] != after[each]] == [seen]


CONVERSIONS = {
    "dtype": lambda model: model.to(torch.bfloat16),
    "shape": lambda model: setattr(model.weight, "data", torch.zeros(4, 2)),
    "neither": lambda model: model.weight.data.mul_(2),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_referents_notice_another_dtype_and_shape_of_the_same_parameter(name):
    """A graph of torch_xla would interpret the bytes as before."""
    model = torch.nn.Linear(4, 2)
    state = State([model])
    referents = Referents(state, torch.device("cpu"), has_addresses=False)
    CONVERSIONS[name](model)
    assert referents.are_of(state) == (name == "neither")
    assert (
        referents.changed_in(state)
        == {
            "dtype": "`weight`, `bias`",
            "shape": "`weight`",
            "neither": "",
        }[name]
    )
