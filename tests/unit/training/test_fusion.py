"""Fused updates end where the optimizer alone ends, to the bit, or they are refused."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss
from torch.utils.checkpoint import checkpoint

from graphstash.training import (
    LAMB,
    SGD,
    Adam,
    AdamW,
    FusionError,
    Lion,
    LossScale,
    clip_grad_norm_,
    clip_grad_value_,
    fuse,
    traced_step,
)
from graphstash.training.fusion import partial_step

STEPS = 12
WIDTH = 6


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tied(Plain):
    def __init__(self):
        super().__init__()
        self.third.weight = self.first.weight


class Detached(Plain):
    def forward(self, x):
        x = linear(x.requires_grad_(), self.second.weight.detach())
        return super().forward(x)


class ByData(Plain):
    def forward(self, x):
        return super().forward(linear(x.requires_grad_(), self.second.weight.data))


class OneBuffer(Plain):
    """Parameters lie side by side."""

    def __init__(self):
        super().__init__()
        buffer = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(buffer, self.parameters())


class Unused(Plain):
    def forward(self, x):
        return self.third(torch.tanh(self.first(x)))


class Shifted(Plain):
    """Backward does not need what it computes its first gradient of."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.shift


class Complex(Plain):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return super().forward((x * self.phase).abs())


class Twice(Plain):
    def forward(self, x):
        return self.third(self.second(torch.tanh(self.second(torch.tanh(self.first(x))))))


class Now(Plain):
    """Uses its second layer in every other step only."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) if self.calls % 2 else self.third(self.first(x))


class Reentrant(Tied):
    def forward(self, x):
        x = x.requires_grad_()
        x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=True)
        x = torch.tanh(self.second(x))
        return checkpoint(lambda x: torch.tanh(self.third(x)), x, use_reentrant=True)


class ReentrantUntied(Plain):
    forward = Reentrant.forward


class NonReentrant(Tied):
    def forward(self, x):
        x = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        x = torch.tanh(self.second(x))
        return checkpoint(lambda x: torch.tanh(self.third(x)), x, use_reentrant=False)


class RereadInCheckpoint(Plain):
    """Backward computes a part again that reads a layer without giving it a gradient."""

    def forward(self, x):
        def part(x):
            with torch.no_grad():
                scale = self.second(x)
            return torch.tanh(self.first(x)) * scale

        x = checkpoint(part, x.requires_grad_(), use_reentrant=False)
        return self.third(torch.tanh(self.second(x)))


class Attention(nn.Module):
    """Torch's attention reads weights of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.reshape(2, 2, WIDTH)).reshape(4, WIDTH)


class ChannelsLast(nn.Module):
    """Torch's kernels suit the gradients that are laid out as their parameters, and no others."""

    def __init__(self):
        super().__init__()
        convolution = nn.Conv2d(2, 40, (2, 1))
        self.first = convolution.to(memory_format=torch.channels_last)
        self.second = nn.Conv2d(40, 40, (2, 1), padding=(1, 0))
        self.third = nn.Linear(40 * 3, WIDTH)

    def forward(self, x):
        x = self.first(x.reshape(4, 2, 3, 1)).relu()
        return self.third(self.second(x).flatten(1))


class OtherwiseInEvaluation(Plain):
    def forward(self, x):
        return super().forward(x) if self.training else linear(x, self.third.weight)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


class Training:
    """A loop as users write it; methods that a case changes."""

    model = Plain
    optimizer = staticmethod(lambda parameters: AdamW(parameters, lr=0.05))

    def __init__(self, when):
        torch.manual_seed(0)
        self.net = self.model()
        self.opt = self.optimizer(self.net.parameters())
        self.prepare()
        self.fusion = None if when is None else fuse(self.net, self.opt, when)

    def prepare(self):
        pass

    def loss(self, step):
        x, y = batch(step)
        return mse_loss(self.net(x), y)

    def backward(self, step):
        self.loss(step).backward()

    def step(self, step):
        self.opt.zero_grad()
        self.backward(step)
        self.opt.step()

    def run(self, steps=STEPS):
        losses = []
        for step in range(steps):
            self.step(step)
            losses.append(self.observe(step))
        if self.fusion is not None:
            self.fusion.close()
        return [
            *self.net.parameters(),
            *self.states(),
            *(each for each in losses if each is not None),
        ]

    def observe(self, step):
        del step

    def states(self):
        for parameter in self.net.parameters():
            state = self.opt.state.get(parameter, {})
            yield from (torch.as_tensor(state[name]) for name in sorted(state))


def with_model(net):
    return type(net.__name__, (Training,), {"model": net})


class Accumulated(Training):
    def backward(self, step):
        for part in range(3):
            (self.loss(3 * step + part) / 3).backward()


class TwoLosses(Training):
    def backward(self, step):
        x, y = batch(step)
        output = self.net(x)
        mse_loss(output, y).backward(retain_graph=True)
        output.abs().mean().backward()


class NormClipped(Training):
    def backward(self, step):
        super().backward(step)
        clip_grad_norm_(self.net.parameters(), 0.1)


class ByTorchClipped(Training):
    def backward(self, step):
        super().backward(step)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)


class Negated(Training):
    """As in adversarial training; the norms stay."""

    def backward(self, step):
        super().backward(step)
        for parameter in self.net.parameters():
            parameter.grad.neg_()


class ValueClipped(Training):
    def backward(self, step):
        super().backward(step)
        clip_grad_value_(self.net.parameters(), 0.01)


class Scaled(Training):
    """Some steps overflow."""

    def prepare(self):
        self.scale = LossScale(8.0, growth_interval=3)

    def step(self, step):
        self.opt.zero_grad()
        loss = self.scale.scale(self.loss(step))
        (loss * (math.inf if step % 7 == 3 else 1.0)).backward()
        self.scale.step(self.opt)
        self.scale.update()


class ScaledByTorch(Scaled):
    def prepare(self):
        self.scale = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


class FusedOfTorchScaled(ScaledByTorch):
    """An optimizer that is told of the scale by attributes."""

    optimizer = staticmethod(lambda parameters: torch.optim.AdamW(parameters, fused=True))


class ForeachOfTorchScaled(ScaledByTorch):
    """An optimizer for which the scaler decides on the host."""

    optimizer = staticmethod(lambda parameters: torch.optim.AdamW(parameters, foreach=True))


class Scheduled(Training):
    """A schedule that Lightning's users have: after each step."""

    def prepare(self):
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)

    def step(self, step):
        super().step(step)
        self.schedule.step()


class ByClosure(Training):
    """As Lightning does it."""

    def step(self, step):
        def closure():
            loss = self.loss(step)
            self.opt.zero_grad()
            loss.backward()
            return loss

        assert self.opt.step(closure).requires_grad


class ByClosureOfTorch(ByClosure):
    optimizer = staticmethod(lambda parameters: torch.optim.AdamW(parameters, lr=0.05))


class ClippedInClosure(Training):
    def step(self, step):
        def closure():
            self.opt.zero_grad()
            self.backward(step)
            clip_grad_norm_(self.net.parameters(), 0.1)

        self.opt.step(closure)


class Evaluated(Training):
    def observe(self, step):
        self.net.eval()
        with torch.no_grad():
            loss = self.loss(1000 + step)
        self.net.train()
        return loss


class EvaluatedInference(Evaluated):
    def observe(self, step):
        with torch.inference_mode():
            return self.loss(1000 + step).clone()


class EvaluatedOtherwise(Evaluated):
    model = OtherwiseInEvaluation


class EvaluatedWithGradients(EvaluatedOtherwise):
    def observe(self, step):
        self.net.eval()
        loss = self.loss(1000 + step)
        self.net.train()
        return loss.detach()


class EvaluatedAttention(Evaluated):
    model = Attention


class Saved(Training):
    def observe(self, step):
        if step % 5 == 0:
            state = copy.deepcopy([self.net.state_dict(), self.opt.state_dict()])
            return torch.cat([each.flatten() for each in state[0].values()])
        return None


class Resumed(Training):
    """Loads what it has saved some steps before."""

    def observe(self, step):
        if step == 4:
            self.saved = copy.deepcopy([self.net.state_dict(), self.opt.state_dict()])
        if step == 8:
            self.net.load_state_dict(self.saved[0])
            self.opt.load_state_dict(self.saved[1])


class ByElementClipped(Training):
    """Each gradient by itself, in a hook."""

    def prepare(self):
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class ByTensorClipped(Training):
    def prepare(self):
        def clip(parameter):
            nn.utils.clip_grad_norm_(parameter, 0.01)

        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(clip)


class ReadInHook(Training):
    """The hooks come after `fuse`, and before the first step."""

    def observe(self, step):
        return torch.tensor(sorted(self.norms))

    def step(self, step):
        self.norms = []
        if step == 0:
            for parameter in self.net.parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter: self.norms.append(parameter.grad.norm())
                )
        super().step(step)


class WithoutGradient(Training):
    """The model computes something else in training mode between two steps."""

    def observe(self, step):
        with torch.no_grad():
            return self.loss(1000 + step)


class NotANumber(Training):
    """From some step on every gradient is NaN, for ever."""

    def loss(self, step):
        return super().loss(step) * (math.nan if step >= 5 else 1.0)


class NeverANumber(Training):
    def loss(self, step):
        return super().loss(step) * math.nan


class ForwardFailed(Training):
    def backward(self, step):
        if step % 4 == 2:
            handle = self.net.second.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.loss(step)
            handle.remove()
        super().backward(step)


class BackwardFailed(Training):
    def backward(self, step):
        if step % 4 == 2:
            handle = self.net.second.register_full_backward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                super().backward(step)
            handle.remove()
            self.opt.zero_grad()
        super().backward(step)


def by_functional_call(net, parameters, x):
    return torch.func.functional_call(net, parameters, (x,))


class FunctionalCall(Training):
    def loss(self, step):
        x, y = batch(step)
        return mse_loss(by_functional_call(self.net, dict(self.net.named_parameters()), x), y)


class Transformed(Training):
    """Gradients and samples by torch.func between two steps, and before the first."""

    def step(self, step):
        self.seen = self.transform(step)
        super().step(step)

    def transform(self, step):
        if self.fusion is not None:
            self.fusion.flush()
        parameters = {name: each.detach() for name, each in self.net.named_parameters()}
        x, y = batch(step)
        gradients = torch.func.grad(
            lambda parameters: mse_loss(by_functional_call(self.net, parameters, x), y)
        )(parameters)
        samples = torch.func.vmap(lambda x: by_functional_call(self.net, parameters, x))(x)
        return torch.cat([samples.flatten(), *(each.flatten() for each in gradients.values())])

    def observe(self, step):
        return self.seen


class Assigned(Training):
    """Gradients that no backward made."""

    def backward(self, step):
        for number, parameter in enumerate(self.net.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (step - number))


class UsedLater(Training):
    """Some parameters have no gradient in the first steps, and none in some later ones."""

    def loss(self, step):
        x, y = batch(step)
        x = self.net.first(x) if step in {0, 1, 6} else self.net(x)
        return mse_loss(x, y)


class Forgotten(Training):
    """Its user empties the optimizer's state."""

    def observe(self, step):
        if step == 5:
            if self.fusion is not None:
                self.fusion.flush()
            self.change(self.opt)

    @staticmethod
    def change(optimizer):
        optimizer.state.clear()


class OtherState(Forgotten):
    @staticmethod
    def change(optimizer):
        for state in optimizer.state.values():
            state["exp_avg"] = 2 * state["exp_avg"]


class OtherLayout(Forgotten):
    @staticmethod
    def change(optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()


class MomentumLater(Forgotten):
    optimizer = staticmethod(lambda parameters: SGD(parameters, lr=0.1))

    @staticmethod
    def change(optimizer):
        optimizer.param_groups[0]["momentum"] = 0.9


class ZeroedInHook(Training):
    def prepare(self):
        self.opt.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())

    def step(self, step):
        self.backward(step)
        self.opt.step()


class Submodule(Training):
    """Only parts of the model are called."""

    def loss(self, step):
        x, y = batch(step)
        x = self.net.second(torch.tanh(self.net.first(x)))
        return mse_loss(self.net.third(x), y) + self.net.first.weight.square().mean()


class Autocast(Training):
    def loss(self, step):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(step)


class Frozen(Training):
    def prepare(self):
        self.net.second.requires_grad_(requires_grad=False)


class Groups(Training):
    @staticmethod
    def optimizer(parameters):
        first, *rest = parameters
        return Adam([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.1}])


def with_optimizer(name, make):
    return type(name, (Training,), {"optimizer": staticmethod(make), "model": Tied})


OPTIMIZERS = [
    with_optimizer("ours amsgrad", lambda p: Adam(p, lr=0.05, amsgrad=True)),
    with_optimizer("ours LAMB", lambda p: LAMB(p, lr=0.05)),
    with_optimizer("SGD of torch", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    with_optimizer("AdamW of torch", lambda p: torch.optim.AdamW(p, lr=0.05)),
    with_optimizer("fused AdamW of torch", lambda p: torch.optim.AdamW(p, lr=0.05, fused=True)),
    with_optimizer("foreach Adam of torch", lambda p: torch.optim.Adam(p, foreach=True)),
    with_optimizer("NAdam of torch", torch.optim.NAdam),
    type("complex Adam of torch", (Training,), {"optimizer": torch.optim.Adam, "model": Complex}),
    with_optimizer("RMSprop of torch", torch.optim.RMSprop),
    with_optimizer("Adagrad of torch", torch.optim.Adagrad),
]
BOTH = [
    *map(with_model, (Plain, Tied, Unused, Twice, Now, NonReentrant, ReentrantUntied, Attention)),
    *map(with_model, (ChannelsLast, OneBuffer)),
    *(Scheduled, Evaluated, EvaluatedInference, EvaluatedAttention, EvaluatedOtherwise),
    *(EvaluatedWithGradients, Saved, Resumed, Submodule, WithoutGradient, NotANumber, NeverANumber),
    *(ByElementClipped, ByTensorClipped, ForwardFailed, FunctionalCall, Transformed, Assigned),
    *(ReadInHook, Autocast, Frozen, Groups, ByClosure, ByClosureOfTorch, *OPTIMIZERS),
    *(UsedLater, Forgotten, OtherState, OtherLayout, MomentumLater, ZeroedInHook),
]
FORWARD_ONLY = [
    *map(with_model, (Detached, ByData, Reentrant, RereadInCheckpoint)),
    *(Accumulated, TwoLosses, NormClipped, ByTorchClipped, ValueClipped, ClippedInClosure),
    *(Scaled, ScaledByTorch),
    *(Negated, FusedOfTorchScaled, ForeachOfTorchScaled, BackwardFailed),
]
EXACT = [(case, when) for case in BOTH for when in ("backward", "forward")]
EXACT += [(case, "forward") for case in FORWARD_ONLY]


@pytest.mark.parametrize(
    ("steps", "unit_bytes"),
    [
        (STEPS, 0),
        pytest.param(50, 300, marks=pytest.mark.extended),
        pytest.param(STEPS, 1024**2, marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize(("case", "when"), EXACT, ids=lambda x: getattr(x, "__name__", x))
def test_fused_trajectory_equals_that_of_optimizer_alone(
    case, when, steps, unit_bytes, monkeypatch
):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", unit_bytes)

    alone, fused = case(None).run(steps), case(when).run(steps)

    assert_same(alone, fused)


def assert_same(alone, fused):
    torch.testing.assert_close(alone, fused, rtol=0.0, atol=0.0, equal_nan=True)


REFUSED = {
    with_model(Detached): r"reads second\.weight again",
    with_model(ByData): r"reads second\.weight again",
    with_model(Reentrant): "came twice",
    with_model(RereadInCheckpoint): r"reads second\.weight, second\.bias again",
    Accumulated: "came twice before the first step",
    TwoLosses: "came twice before the first step",
    NormClipped: r"6 gradients .* were changed between backward\(\) and step\(\)",
    ByTorchClipped: "were changed",
    ClippedInClosure: "were changed",
    ValueClipped: "were changed",
    Negated: "were changed",
    Scaled: "a loss scale decides",
    ScaledByTorch: "a loss scale decides",
    FusedOfTorchScaled: "a loss scale decides",
    ForeachOfTorchScaled: "were changed",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_unsupported_backward_fusion_is_refused_before_any_change(case):
    training = case("backward")
    before = [parameter.clone() for parameter in training.net.parameters()]

    with pytest.raises(FusionError, match=REFUSED[case]) as refused:
        training.step(0)

    assert 'when="forward"' in str(refused.value)
    assert all(map(torch.equal, before, training.net.parameters()))


class Compiled(Training):
    def prepare(self):
        self.net = torch.compile(self.net, backend="aot_eager")


class CompiledInPlace(Training):
    def prepare(self):
        self.net.compile(backend="aot_eager")


class CompiledInPart(Training):
    def prepare(self):
        self.net.second = torch.compile(self.net.second, backend="aot_eager")


class CompiledLoss(Training):
    def prepare(self):
        self.compiled = torch.compile(lambda x, y: mse_loss(self.net(x), y), backend="aot_eager")

    def loss(self, step):
        return self.compiled(*batch(step))


COMPILED = [Compiled, CompiledInPlace, CompiledInPart]


@pytest.mark.parametrize(
    ("case", "when"),
    [*((case, "backward") for case in [*COMPILED, CompiledLoss]), (CompiledLoss, "forward")],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("steps", [5, pytest.param(50, marks=pytest.mark.extended)])
def test_fused_compiled_model_trains_as_with_optimizer_alone(case, when, steps):
    assert_same(case(None).run(steps), case(when).run(steps))


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.__name__)
def test_a_compiled_model_is_not_fused_with_its_forward(case):
    with pytest.raises(FusionError, match=r"compiled by torch\.compile.*use when=\"backward\""):
        case("forward")


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_traced_step_does_without_fusion(when):
    training = Training(when)
    traced = traced_step(training.step, [training.net, training.opt])
    traced(0)

    with pytest.raises(FusionError, match=r"first\.weight is fused .* call close\(\)"):
        traced(1)


class KeepsGradients(Training):
    """Zeros, which move a parameter by its momentum where no gradient does not."""

    def step(self, step):
        self.opt.zero_grad(set_to_none=False)
        self.backward(step)
        self.opt.step()


class NeverZeroes(Training):
    def step(self, step):
        self.backward(step)
        self.opt.step()


@pytest.mark.parametrize("when", ["backward", "forward"])
@pytest.mark.parametrize("case", [KeepsGradients, NeverZeroes], ids=lambda case: case.__name__)
def test_gradients_kept_by_a_step_are_refused_in_second_backward(case, when):
    training = case(when)
    training.step(0)
    before = [parameter.clone() for parameter in training.net.parameters()]

    with pytest.raises(FusionError, match=r"still that of the last step.* call zero_grad\(\)"):
        training.step(1)

    assert all(map(torch.equal, before, training.net.parameters()))


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_kept_gradient_without_new_backward_is_refused_in_second_step(when):
    training = Training(when)
    training.loss(0)  # forward fusion looks at one before the first step
    training.step(0)
    before = [parameter.clone() for parameter in training.net.parameters()]

    with pytest.raises(FusionError, match=r"still that of the last step.* call zero_grad\(\)"):
        training.opt.step()

    assert all(map(torch.equal, before, training.net.parameters()))


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_gradients_zeroed_between_forward_and_backward_are_fresh(when):
    class Late(Training):
        def step(self, step):
            loss = self.loss(step)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    assert_same(Late(None).run(), Late(when).run())


def unsaved(training):
    """A backward was made and no step."""
    training.step(0)
    training.opt.zero_grad()
    training.backward(1)
    return training


@pytest.mark.parametrize("optimizer_class", [AdamW, Lion])
def test_a_weight_that_backward_reads_late_outside_of_the_model_is_an_error(optimizer_class):
    class ReadsOutside(Training):
        optimizer = staticmethod(optimizer_class)

        def loss(self, step):
            x, y = batch(step)
            x = linear(x.requires_grad_(), self.net.second.weight.detach())
            return mse_loss(self.net(x), y)

    training = ReadsOutside("backward")
    training.step(0)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        training.step(1)


@pytest.mark.parametrize("part", ["net", "opt"])
def test_state_is_not_saved_between_backward_and_step(part):
    training = unsaved(Training("backward"))
    save = getattr(training, part).state_dict

    with pytest.raises(FusionError, match=r"6 of 6 parameters .* save after step\(\)"):
        save()
    training.opt.step()
    save()


@pytest.mark.parametrize("call", [lambda net: net, lambda net: net.first], ids=["whole", "part"])
def test_the_model_is_not_called_between_backward_and_step(call):
    training = Submodule("backward")
    training.step(0)
    called = call(training.net)
    training.opt.zero_grad()
    training.backward(1)

    with pytest.raises(
        FusionError, match=r"\(accumulation, evaluation\), when 6 of 6 .* call it after step\(\)"
    ):
        called(batch(0)[0])
    training.opt.step()
    called(batch(0)[0])


def test_closing_between_backward_and_step_is_reported_and_step_is_exact():
    training, alone = unsaved(Training("backward")), unsaved(Training(None))
    with pytest.raises(FusionError, match=r"has updated 6 of 6 parameters, and no step\(\)"):
        training.fusion.close()
    for each in (training, alone):
        each.opt.step()
        each.step(2)
    assert_same([*training.net.parameters()], [*alone.net.parameters()])


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_parameter_of_two_optimizers_is_refused_before_the_other_one_changes_it(when):
    training = Training(when)
    other = torch.optim.SGD(training.net.third.parameters(), lr=0.1)
    elsewhere = torch.optim.SGD(Plain().parameters(), lr=0.1)
    training.step(0)
    before = [parameter.clone() for parameter in training.net.parameters()]

    with pytest.raises(FusionError, match=r"third\.weight, third\.bias: another optimizer \(SGD\)"):
        other.step()
    elsewhere.step()
    assert all(map(torch.equal, before, training.net.parameters()))
    training.fusion.close()
    other.step()


def moved_into_another_module(net):
    other = nn.Linear(WIDTH, WIDTH)
    other.weight = net.second.weight
    net.second = nn.Sequential(other)


def moved_in_two_steps(net):
    net.added = nn.Module()
    net.added.inner = nn.Linear(WIDTH, WIDTH)
    net.added.inner.weight = net.second.weight


def tied(net):
    net.third.weight = net.second.weight


CHANGES = [moved_into_another_module, moved_in_two_steps, tied]


@pytest.mark.parametrize("when", ["backward", "forward"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changing_fused_parameters_is_refused_until_close(change, when):
    training = Training(when)
    training.step(0)

    with pytest.raises(FusionError, match=r"second\.weight, which is fused .* call close\(\)"):
        change(training.net)

    training.fusion.close()
    change(training.net)


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_model_may_get_other_modules_and_keep_its_own(when):
    training = Training(when)
    training.step(0)
    training.net.added = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    training.net.second = training.net.second
    training.net.second.weight = training.net.second.weight
    training.step(1)
    training.fusion.close()


@pytest.mark.parametrize("way", ["step", "optimizer", "model", "flush", "forward"])
def test_partially_failed_update_is_not_used(way, monkeypatch):
    training = Training("forward")
    for step in range(3):
        training.step(step)
    saved = [training.net.state_dict(), training.opt.state_dict()]
    saved = copy.deepcopy(saved)
    training.step(3)
    update, updates = partial_step.PartialStep.__call__, []

    def second_fails(self, *given, **options):
        updates.append(given)
        if len(updates) == 2:
            raise ZeroDivisionError
        update(self, *given, **options)

    monkeypatch.setattr(partial_step.PartialStep, "__call__", second_fails)
    with pytest.raises(ZeroDivisionError):
        training.fusion.flush()
    monkeypatch.undo()

    ways = {
        "step": training.opt.step,
        "optimizer": training.opt.state_dict,
        "model": training.net.state_dict,
        "flush": training.fusion.flush,
        "forward": lambda: training.net(batch(0)[0]),
    }
    with pytest.raises(FusionError, match=r"an update failed in the middle.* last checkpoint"):
        ways[way]()
    training.net.load_state_dict(saved[0])
    training.opt.load_state_dict(saved[1])
    training.step(3)
    training.fusion.close()
    alone = Training(None)
    for step in range(4):
        alone.step(step)
    assert_same([*alone.net.parameters()], [*training.net.parameters()])


@pytest.mark.parametrize("kinds", [("backward", "forward"), ("forward", "backward")])
def test_run_can_switch_between_forward_and_backward_fusion(kinds):
    first, second = kinds
    training, alone = Training(first), Training(None)
    for step in range(6):
        training.step(step)
    rest = Training(second)
    rest.net.load_state_dict(training.net.state_dict())
    rest.opt.load_state_dict(training.opt.state_dict())
    for step in range(6, 12):
        rest.step(step)
    for step in range(12):
        alone.step(step)
    rest.fusion.close()
    assert_same([*alone.net.parameters()], [*rest.net.parameters()])


def test_backward_after_failed_backward_is_refused():
    training = with_model(Shifted)("backward")
    training.step(0)
    training.opt.zero_grad()
    handle = training.net.third.register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = training.loss(1)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    handle.remove()

    with pytest.raises(FusionError, match="a backward failed after 1 of 7"):
        loss.backward()
    with pytest.raises(FusionError, match="a backward failed after 1 of 7"):
        training.loss(2)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_that_is_compiled_later_is_not_fused_with_its_forward(steps):
    """As Trainer and Accelerate compile the model that they are given."""
    training = Training("forward")
    for step in range(steps):
        training.step(step)
    training.fusion.flush()
    before = [parameter.clone() for parameter in training.net.parameters()]
    training.net = torch.compile(training.net, backend="aot_eager")

    with pytest.raises(FusionError, match=r"compiled by torch\.compile"):
        training.step(steps)

    assert all(map(torch.equal, before, training.net.parameters()))


@pytest.mark.parametrize("unit_bytes", [0, 1024**2])
def test_gradients_are_freed_in_backward(unit_bytes, monkeypatch):
    """At most the largest layer's and small ones are live, but for what autograd holds."""
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", unit_bytes)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(8)))  # 1.4 MB each
    optimizer = SGD(model.parameters(), lr=0.1)
    most = 0

    def count(_):
        nonlocal most
        live = [each.grad for each in model.parameters() if type(each.grad) is torch.Tensor]
        most = max(most, sum(each.numel() * each.element_size() for each in live))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # before ours
    with fuse(model, optimizer, "backward"):
        for _ in range(3):
            most = 0
            model(torch.ones(2, 600)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    biases = 8 * 600 if unit_bytes else 600
    assert 0 < most <= 4 * (600 * 600 + biases)


class Large(Training):
    """24 MB in layers of 1 MB."""

    model = staticmethod(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))))

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        return self.net(torch.randn(2, 512, generator=generator)).square().mean()


def peak_bytes(case, when):
    """The most that tensors take from the making of a model to the end of its third step."""
    gc.collect()  # what is left of others must not be counted when it goes
    with torch.profiler.profile(profile_memory=True) as profiler:
        case(when).run(3)
    live = most = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda p: SGD(p, lr=0.1, momentum=0.9), 2),
        (lambda p: AdamW(p, lr=0.05), 3),
    ],
    ids=["SGD", "AdamW"],
)
def test_backward_fusion_keeps_parameters_and_state_and_next_to_no_gradients(
    make, kept, monkeypatch
):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 1024**2)
    case = type("Case", (Large,), {"optimizer": staticmethod(make)})
    size = 4 * 24 * 512 * 513

    assert kept + 0.98 <= peak_bytes(case, None) / size <= kept + 1.2
    assert kept - 0.02 <= peak_bytes(case, "backward") / size <= kept + 0.2


def test_small_parameters_are_left_to_the_step(monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 1024**2)
    training = Training("backward")
    training.step(0)
    x, y = batch(1)
    training.opt.zero_grad()
    handle = training.net.second.register_full_backward_pre_hook(lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        mse_loss(training.net(x), y).backward()

    training.net.state_dict()  # a backward that failed halfway has updated nothing
    handle.remove()
    for step in (2, 3):
        training.step(step)
        assert all(each.grad is not None for each in training.net.parameters())


class Wide(Training):
    """Each layer is a unit of its own."""

    class model(nn.Sequential):  # noqa: N801 - as the field is called
        def __init__(self):
            super().__init__(*(nn.Linear(520, 520) for _ in range(3)))

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        return self.net(torch.randn(2, 520, generator=generator)).square().mean()


@pytest.mark.parametrize("way", ["step", "optimizer", "model", "flush", "close"])
def test_parameters_updated_by_failed_backward_are_not_used(way):
    training = Wide("backward")
    training.step(0)
    training.opt.zero_grad()
    handle = training.net[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.backward(1)
    handle.remove()

    ways = {
        "step": training.opt.step,
        "optimizer": training.opt.state_dict,
        "model": training.net.state_dict,
        "flush": training.fusion.flush,
        "close": training.fusion.close,
    }
    with pytest.raises(FusionError, match="a backward failed after 2 of 6 parameters"):
        ways[way]()


def test_loading_checkpoint_clears_failed_backward():
    training = Wide("backward")
    training.step(0)
    saved = copy.deepcopy([training.net.state_dict(), training.opt.state_dict()])
    training.opt.zero_grad()
    handle = training.net[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.backward(1)
    handle.remove()

    training.net.load_state_dict(saved[0])
    training.opt.load_state_dict(saved[1])
    training.step(1)
    training.fusion.close()

    other = Wide(None)
    other.step(0)
    other.step(1)
    assert all(map(torch.equal, training.net.parameters(), other.net.parameters()))


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_updates_are_prepared_once(when):
    training = Training(when)
    training.step(0)
    training.step(1)
    training.step(2)
    update, updates = training.opt.update, []
    training.opt.update = lambda *given: updates.append(given) or update(*given)

    training.step(3)
    training.fusion.flush()

    assert len(updates) == 1  # by the optimizer's own step, of what is left


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (Shifted, FusionError, "came twice between two steps"),
        (Plain, RuntimeError, "modified by an inplace operation"),  # autograd sees it first
    ],
)
def test_gradient_that_arrives_twice_in_later_step_is_an_error(model, error, message):
    training = with_model(model)("backward")
    training.step(0)
    training.opt.zero_grad()
    losses = [training.loss(1), training.loss(2)]
    losses[0].backward()

    with pytest.raises(error, match=message):
        losses[1].backward()


def test_a_learning_rate_that_is_set_after_backward_is_an_error():
    training = unsaved(Training("backward"))
    training.opt.param_groups[0]["lr"] = 0.5

    with pytest.raises(FusionError, match="changed between"):
        training.opt.step()


def test_parameter_cannot_be_fused_twice():
    training = Training("forward")

    with pytest.raises(FusionError, match=r"first\.weight is already fused with this optimizer"):
        fuse(training.net, training.opt)
    with pytest.raises(FusionError, match="with another optimizer"):
        fuse(training.net, SGD(training.net.parameters()))
    training.fusion.close()
    fuse(training.net, SGD(training.net.parameters())).close()


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_parameters_that_share_memory_are_refused(when):
    model = Plain()
    model.third.weight = nn.Parameter(model.first.weight.data)

    with pytest.raises(FusionError, match=r"first\.weight, third\.weight share memory.* one param"):
        fuse(model, SGD(model.parameters()), when)


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_changed_parameter_is_named(when):
    training = Training(when)
    training.step(0)
    training.opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    with pytest.raises(FusionError, match=r"call close\(\), change them"):
        training.step(1)


def test_unknown_optimizer_mode_or_parameter_is_refused():
    model = Plain()
    with pytest.raises(FusionError, match="LBFGS is not known"):
        fuse(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="backward"):
        fuse(model, SGD(model.parameters()), "sideways")
    with pytest.raises(FusionError, match="no parameter of the model"):
        fuse(model, SGD(Plain().parameters()))
    with pytest.raises(FusionError, match="copies of the modules"):
        fuse(nn.DataParallel(model), SGD(model.parameters()), "forward")
    with pytest.raises(FusionError, match=r"first\.weight is on meta and has no values yet"):
        fuse(model.to("meta"), SGD(model.parameters()))


def test_torch_func_before_flush_is_refused_naming_flush():
    training = Training("forward")
    training.step(0)
    training.step(1)
    parameters = dict(training.net.named_parameters())
    x, _ = batch(0)

    def loss(parameters):
        return torch.func.functional_call(training.net, parameters, (x,)).sum()

    with pytest.raises(FusionError, match=r"call flush\(\)"):
        torch.func.grad(loss)(parameters)
    training.fusion.flush()
    assert torch.func.grad(loss)(parameters).keys() == parameters.keys()


def test_a_copy_of_a_fused_model_is_not_fused(tmp_path):
    training = Training("forward")
    training.step(0)
    training.fusion.flush()
    copied = copy.deepcopy(training.net)
    torch.save(training.net, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    training.step(1)
    for other in (copied, loaded):
        before = [parameter.clone() for parameter in other.parameters()]
        other(batch(2)[0])
        assert all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_model_is_not_copied_while_updates_are_missing(when, copied):
    training = Training(when)
    for step in range(3):
        training.step(step)
    if when == "backward":
        training.opt.zero_grad()
        training.backward(3)

    remedy = {"backward": r"save after step\(\)", "forward": r"call flush\(\)"}
    with pytest.raises(FusionError, match=remedy[when]):
        copied(training.net)


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_closed_fusion_leaves_an_optimizer_that_works(when):
    training, alone = Training(when), Training(None)
    for step in range(4):
        training.step(step)
    training.fusion.close()
    for step in range(4, 8):
        training.step(step)
    for step in range(8):
        alone.step(step)
    assert all(map(torch.equal, training.net.parameters(), alone.net.parameters()))


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_unclosed_fused_model_is_garbage_collected(when):
    training = Training(when)
    training.step(0)
    model = weakref.ref(training.net)
    del training
    gc.collect()
    assert model() is None
