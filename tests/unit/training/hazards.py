"""Loops in which an update at another time than `step()` could show, as data.

Each hazard changes a plain loop in one respect. `refused` says what the true cause is, for each
kind of fusion that is refused. The other kind must end where the optimizer alone ends, to the bit.
"""

import copy
import io
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear, mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from graphstash.training import (
    LAMB,
    SGD,
    Adam,
    AdamW,
    LossScale,
    clip_grad_norm_,
    fuse,
)

__all__ = ["HAZARDS", "WIDTH", "Hazard", "Loop", "Net", "clip", "hazard_named"]

WIDTH = 6
STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Loop:
    """A loop as users write it; a hazard overrides a part of it."""

    model = Net
    optimizer: Any = partial(AdamW, lr=0.05)

    def __init__(self, when):
        torch.manual_seed(0)
        self.seen = []
        self.closing = []
        self.net = self.model()
        self.opt = self.optimizer(self.net.parameters())
        self.before_fuse()
        self.fusion = None if when is None else fuse(self.net, self.opt, when)
        self.after_fuse()

    def before_fuse(self):
        pass

    def after_fuse(self):
        pass

    def batch(self, step):
        return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(step))

    def loss(self, step):
        x, y = self.batch(step)
        return mse_loss(self.net(x), y)

    def backward(self, step):
        self.loss(step).backward()

    def step(self, step):
        self.opt.zero_grad()
        self.backward(step)
        self.before_step(step)
        self.opt.step()
        self.after_step(step)

    def before_step(self, step):
        pass

    def after_step(self, step):
        pass

    def see(self, *tensors):
        self.seen += [tensor.detach().clone() for tensor in tensors]

    def flush(self):
        if self.fusion is not None:
            self.fusion.flush()

    def run(self, steps=STEPS):
        """Return everything that the loop has trained and seen."""
        try:
            for step in range(steps):
                self.step(step)
            self.after()
            if self.fusion is not None:
                self.fusion.close()
        finally:
            for handle in self.closing:
                handle.remove()
        states = [self.opt.state.get(each, {}) for each in self.net.parameters()]
        tensors = [torch.as_tensor(state[name]) for state in states for name in sorted(state)]
        return [*self.net.parameters(), *tensors, *self.seen]

    def after(self):
        pass


@dataclass(frozen=True)
class Hazard:
    """A loop, and by the kind of fusion the cause for which it is refused."""

    name: str
    loop: type[Loop]
    refused: dict[str, str] = field(default_factory=dict)


HAZARDS: list[Hazard] = []


def hazard(**refused: str) -> Callable[[type[Loop]], type[Loop]]:
    """Add a loop to the list."""

    def add(loop):
        HAZARDS.append(Hazard(loop.__name__, loop, refused))
        return loop

    return add


def hazard_named(name: str) -> type[Loop]:
    """Return the loop of a hazard."""
    return next(each.loop for each in HAZARDS if each.name == name)


def clip(parameters, limit=0.05):
    nn.utils.clip_grad_norm_(parameters, limit)


def clamp_gradient(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


# Hooks.


@hazard(backward="were changed between")
class ClippingHookBeforeFuse(Loop):
    def before_fuse(self):
        self.opt.register_step_pre_hook(lambda *_: clip(self.net.parameters()))


@hazard(backward="were changed between")
class ScalingHookAfterFuse(Loop):
    """Plain SGD would take a step of another length."""

    optimizer = partial(SGD, lr=0.5)

    def after_fuse(self):
        def scale(*_: Any) -> None:
            for parameter in self.net.parameters():
                parameter.grad.mul_(0.001)

        self.opt.register_step_pre_hook(scale)


@hazard(backward="were changed between")
class GlobalClippingHook(Loop):
    def after_fuse(self):
        def hook(optimizer, *_):
            if optimizer is self.opt:
                clip(self.net.parameters())

        self.closing.append(register_optimizer_step_pre_hook(hook))


@hazard(backward="options .* were changed between")
class WarmUpHookAfterFuse(Loop):
    def after_fuse(self):
        def warm_up(optimizer, *_):
            optimizer.param_groups[0]["lr"] *= 1.5

        self.opt.register_step_pre_hook(warm_up)


@hazard()
class ScheduleMadeLate(Loop):
    def after_step(self, step):
        if step == 2:  # adds `initial_lr` to the groups, and changes no option
            self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 1000)
        if step > 2:
            self.schedule.step()


@hazard()
class ScheduleInHookAfterStep(Loop):
    def after_fuse(self):
        schedule = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        self.opt.register_step_post_hook(lambda *_: schedule.step())


@hazard()
class ZeroingHookAfterFuse(Loop):
    def after_fuse(self):
        self.opt.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        hooks = self.opt._optimizer_step_post_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)  # as a hook that asks to be first


@hazard(backward="were changed between")
class HooksAfterAccumulationAfterFuse(Loop):
    def after_fuse(self):
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_gradient)


# Reads and writes after the step.


@hazard()
class ClampedWeights(Loop):
    def after_step(self, step):
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.3, 0.3)


@hazard()
class ClampedWithoutGradients(Loop):
    @torch.no_grad()
    def after_step(self, step):
        self.net.second.weight.clamp_(-0.3, 0.3)


@hazard()
class AssignedData(Loop):
    def after_step(self, step):
        if step == 3:
            self.net.second.weight.data = torch.ones(WIDTH, WIDTH)


@hazard()
class MovingAverage(Loop):
    def before_fuse(self):
        self.averages = [each.detach().clone() for each in self.net.parameters()]

    @torch.no_grad()
    def after_step(self, step):
        for average, each in zip(self.averages, self.net.parameters(), strict=True):
            average.lerp_(each, 0.1)
        self.see(*self.averages)


@hazard()
class AverageInHook(MovingAverage):
    def after_fuse(self):
        self.opt.register_step_post_hook(lambda *_: MovingAverage.after_step(self, 0))

    def after_step(self, step):
        pass


@hazard()
class KeptAlias(Loop):
    """A flat view from before, as of a communication buffer."""

    def before_fuse(self):
        self.alias = self.net.second.weight.data.view(-1)

    def after_step(self, step):
        self.see(self.alias)
        self.alias.clamp_(-0.3, 0.3)


@hazard()
class KeptStateDict(Loop):
    def after_step(self, step):
        if step == 1:
            self.kept = self.net.state_dict()
        if step > 1:
            self.see(*self.kept.values())


@hazard()
class ForwardMethod(Loop):
    """No hook of the model is called."""

    def loss(self, step):
        x, y = self.batch(step)
        return mse_loss(self.net.forward(x), y)


@hazard()
class FunctionalUse(Loop):
    def loss(self, step):
        x, y = self.batch(step)
        net = self.net
        x = nn.functional.linear(x, net.first.weight, net.first.bias)
        return mse_loss(net.third(torch.tanh(x)), y) + net.second.weight.square().sum()


@hazard()
class CopiedParameters(Loop):
    def after_step(self, step):
        self.see(*copy.deepcopy(list(self.net.parameters())))


@hazard()
class SavedParameter(Loop):
    def after_step(self, step):
        file = io.BytesIO()
        torch.save(self.net.second.weight, file)
        file.seek(0)
        self.see(torch.load(file, weights_only=True))


@hazard()
class FrozenLater(Loop):
    def after_step(self, step):
        if step == 2:
            self.net.second.requires_grad_(requires_grad=False)
            self.net.second.weight.grad = self.net.second.bias.grad = None


# Routing.


class RoutedNet(Net):
    route = 0

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.route:  # before its owner runs
            x = x @ self.third.weight
        return self.third(self.second(x))


@hazard()
class RouteThatIsNewLater(Loop):
    model = RoutedNet

    def loss(self, step):
        self.net.route = step >= 3
        return super().loss(step)


# Steps of several backwards or optimizers.


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.score(x)


class Adversarial(Loop):
    """Both optimizers are fused; the generator's backward also reaches the discriminator."""

    def before_fuse(self):
        self.judge = Discriminator()
        self.judge_opt = AdamW(self.judge.parameters(), lr=0.05)

    def step(self, step):
        x, y = self.batch(step)
        fake = self.net(x)
        self.judge_opt.zero_grad()
        (self.judge(fake.detach()).mean() - self.judge(y).mean()).backward()
        self.judge_opt.step()
        self.opt.zero_grad()
        (-self.judge(fake).mean()).backward()
        self.opt.step()

    def run(self, steps=STEPS):
        return [*super().run(steps), *self.judge.parameters()]


class _BothFused(Adversarial):
    def after_fuse(self):
        if self.fusion is not None:
            self.other = fuse(self.judge, self.judge_opt, self.fusion.when)

    def after(self):
        if self.fusion is not None:
            self.other.close()


@hazard(backward="still that of the last step")
class DiscriminatorOfTwoOptimizers(_BothFused):
    """Its gradients come with each of the two losses."""


@hazard()
class FrozenDiscriminator(_BothFused):
    def step(self, step):
        x, y = self.batch(step)
        fake = self.net(x)
        self.judge_opt.zero_grad()
        (self.judge(fake.detach()).mean() - self.judge(y).mean()).backward()
        self.judge_opt.step()
        self.opt.zero_grad()
        self.judge.requires_grad_(requires_grad=False)
        (-self.judge(fake).mean()).backward()
        self.judge.requires_grad_(requires_grad=True)
        self.opt.step()


@hazard(backward="came twice before")
class SharpnessAware(Loop):
    """SAM: the gradient is that at a point which is a short way uphill."""

    def step(self, step):
        self.opt.zero_grad()
        self.loss(step).backward()
        parameters = list(self.net.parameters())
        with torch.no_grad():
            uphill = [each.grad * 0.05 for each in parameters]
            for each, way in zip(parameters, uphill, strict=True):
                each.add_(way)
        self.opt.zero_grad()
        self.loss(step).backward()
        with torch.no_grad():
            for each, way in zip(parameters, uphill, strict=True):
                each.sub_(way)
        self.opt.step()


@hazard(backward="called between backward")
class AccumulationThatBeginsLater(Loop):
    def step(self, step):
        self.opt.zero_grad()
        for part in range(1 if step < 2 else 2):
            self.loss(3 * step + part).backward()
        self.opt.step()


@hazard(backward="called between backward")
class SkippedStep(Loop):
    """As when a loss is not finite."""

    def step(self, step):
        self.opt.zero_grad()
        self.loss(step).backward()
        if step != 3:
            self.opt.step()


@hazard()
class StepWithoutBackward(Loop):
    def step(self, step):
        self.opt.zero_grad()
        if step != 3:
            self.loss(step).backward()
        self.opt.step()


@hazard()
class DoubleBackward(Loop):
    """The gradients of the parameters have a graph of their own."""

    def step(self, step):
        self.opt.zero_grad()
        loss = self.loss(step)
        gradients = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        (loss + 0.01 * sum(each.square().sum() for each in gradients)).backward()
        self.opt.step()


# Groups.


@hazard(backward="has other parameters than", forward="has other parameters than")
class GroupThatIsAdded(Loop):
    def after_step(self, step):
        if step == 2:
            self.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


class TiedNet(Net):
    def __init__(self):
        super().__init__()
        self.third.weight = self.first.weight


@hazard()
class WeightsThatAreUntiedLater(Loop):
    model = TiedNet

    def after_step(self, step):
        if step == 2:
            self.net.third.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


@hazard(backward="were set between")
class GradientsThatAreSetLater(Loop):
    def before_step(self, step):
        if step == 3:
            for each in self.net.parameters():
                each.grad = torch.ones_like(each)


@hazard(backward="were changed between")
class ClippingByData(Loop):
    def before_step(self, step):
        for each in self.net.parameters():
            if each.grad is not None:
                each.grad.data.clamp_(-0.01, 0.01)


@hazard()
class SwappedByData(MovingAverage):
    def after_step(self, step):
        super().after_step(step)
        kept = [each.data for each in self.net.parameters()]
        for each, average in zip(self.net.parameters(), self.averages, strict=True):
            each.data = average
        with torch.no_grad():
            self.see(self.loss(200 + step))
        for each, own in zip(self.net.parameters(), kept, strict=True):
            each.data = own


# Hazards that the first step does not show.


class Later(Loop):
    """From the third step on, `later` is called between backward and the step."""

    def before_step(self, step):
        if step > 1:
            self.later(step)

    def later(self, step):
        raise NotImplementedError


@hazard(backward="used between .*clipping")
class ClippingThatBeginsLater(Later):
    def later(self, step):
        clip(self.net.parameters())


@hazard(backward="removed between")
class GradientsThatAreDropped(Later):
    """As when a batch is bad."""

    def later(self, step):
        self.opt.zero_grad()


@hazard(backward="used between")
class ScaleThatBeginsLater(Loop):
    def step(self, step):
        if step < 2:
            super().step(step)
            return
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.opt.zero_grad()
        scaler.scale(self.loss(step)).backward()
        scaler.step(self.opt)


@hazard(backward="came twice between two steps|read or written between")
class PenaltyThatBeginsLater(Later):
    def later(self, step):
        sum(each.square().sum() for each in self.net.parameters()).backward()


@hazard(backward="still that of the last step")
class GradientsThatAreKeptOnce(Loop):
    def step(self, step):
        if step != 3:
            self.opt.zero_grad()
        self.loss(step).backward()
        self.opt.step()


@hazard(backward="still that of the last step")
class StepThatIsRepeated(Loop):
    def after_step(self, step):
        if step == 3:
            self.opt.step()


@hazard(backward="still that of the last step")
class GradientsThatAreReadAfterTheStep(Loop):
    def after_step(self, step):
        self.see(*(each.grad for each in self.net.parameters() if each.grad is not None))


@hazard()
class ConvertedModel(Loop):
    def after_step(self, step):
        if step == 2:
            self.net.half().float()


# Parameters that are used between backward and the step, or by backward itself.


@hazard(backward="read or written between")
class LoggedNormBeforeTheStep(Loop):
    def before_step(self, step):
        self.see(self.net.second.weight.norm())


@hazard(backward="read or written between")
class DecayByData(Later):
    def later(self, step):
        for each in self.net.parameters():
            each.data.mul_(0.99)


@hazard(backward="read or written between")
class HookOfAnActivation(Loop):
    """Reads a weight of a later layer, whose gradient is whole by then."""

    def loss(self, step):
        x, y = self.batch(step)
        net = self.net
        inner = torch.tanh(net.first(x))
        inner.register_hook(lambda gradient: gradient * net.third.weight.mean())
        return mse_loss(net.third(torch.tanh(net.second(inner))), y)


@hazard()
class MeasuredBeforeTheStep(Loop):
    """Nothing here reads a value."""

    def before_step(self, step):
        sizes = [each.nbytes * each.is_contiguous() for each in self.net.parameters()]
        self.see(torch.tensor(sizes), *map(torch.zeros_like, self.net.parameters()))


# What a step that waits depends on.


@hazard()
class StateThatIsReplaced(Loop):
    def after_step(self, step):
        if step == 3:
            self.opt.state = defaultdict(dict)


@hazard()
class StateThatIsZeroed(Loop):
    def after_step(self, step):
        if step == 3:
            for state in self.opt.state.values():
                state["exp_avg"].zero_()


@hazard()
class StateThatIsLogged(Loop):
    def after_step(self, step):
        self.see(*(self.opt.state[each]["exp_avg"] for each in self.net.parameters()))


class BiasNet(nn.Module):
    """No graph holds the bias."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.bias


@hazard(backward="still that of the last step", forward="was changed after step")
class BackwardAfterTheStep(Loop):
    """The second loss of a forward adds to gradients of which the step has been made."""

    model = BiasNet

    def step(self, step):
        x, y = self.batch(step)
        self.opt.zero_grad()
        out = self.net(x)
        later = out.sum()
        mse_loss(out, y).backward(retain_graph=True)
        self.opt.step()
        if step > 1:
            later.backward()


class ClippingAdamW(AdamW):
    def step(self, *args: Any, **kwargs: Any) -> Any:
        clip(self.param_groups[0]["params"])
        return super().step(*args, **kwargs)


@hazard(backward="overrides step", forward="overrides step")
class SubclassThatClips(Loop):
    optimizer = partial(ClippingAdamW, lr=0.05)


class DefaultedAdamW(AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05, weight_decay=0.1)


@hazard()
class SubclassWithDefaults(Loop):
    optimizer = DefaultedAdamW


# Models.


def of_model(**refused: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Add a plain loop that trains a model."""

    def add(model):
        loop = type(model.__name__, (Loop,), {"model": model})
        HAZARDS.append(Hazard(loop.__name__, loop, refused))
        return model

    return add


of_model()(TiedNet)


@of_model(backward=r"reads second\.weight again")
class Detached(Net):
    def forward(self, x):
        return super().forward(linear(x.requires_grad_(), self.second.weight.detach()))


@of_model()
class OneBuffer(Net):
    """Parameters lie side by side."""

    def __init__(self):
        super().__init__()
        buffer = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(buffer, self.parameters())


@of_model()
class Unused(Net):
    def forward(self, x):
        return self.third(torch.tanh(self.first(x)))


@of_model()
class Twice(Net):
    def forward(self, x):
        return self.third(self.second(torch.tanh(self.second(torch.tanh(self.first(x))))))


def recomputed(net: Net, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    x = checkpoint(lambda x: torch.tanh(net.first(x)), x.requires_grad_(), use_reentrant=reentrant)
    x = torch.tanh(net.second(x))
    return checkpoint(lambda x: torch.tanh(net.third(x)), x, use_reentrant=reentrant)


@of_model(backward="came twice")
class ReentrantTied(TiedNet):
    def forward(self, x):
        return recomputed(self, x, reentrant=True)


@of_model()
class NonReentrantTied(TiedNet):
    def forward(self, x):
        return recomputed(self, x, reentrant=False)


@of_model(backward=r"reads second\.weight, second\.bias again")
class RereadInCheckpoint(Net):
    """Backward computes a part again that reads a layer without giving it a gradient."""

    def forward(self, x):
        def part(x):
            with torch.no_grad():
                scale = self.second(x)
            return torch.tanh(self.first(x)) * scale

        x = checkpoint(part, x.requires_grad_(), use_reentrant=False)
        return self.third(torch.tanh(self.second(x)))


@of_model()
class Attention(nn.Module):
    """Torch's attention reads weights of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.reshape(2, 2, WIDTH)).reshape(4, WIDTH)


@of_model()
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


class ComplexNet(Net):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return super().forward((x * self.phase).abs())


# Optimizers.


for _name, _optimizer, _model in (
    ("AMSGrad", partial(Adam, lr=0.05, amsgrad=True), TiedNet),
    ("LAMB", partial(LAMB, lr=0.05), TiedNet),
    ("SGD of torch", partial(torch.optim.SGD, lr=0.1, momentum=0.9), TiedNet),
    ("AdamW of torch", partial(torch.optim.AdamW, lr=0.05), TiedNet),
    ("fused AdamW of torch", partial(torch.optim.AdamW, lr=0.05, fused=True), TiedNet),
    ("foreach Adam of torch", partial(torch.optim.Adam, foreach=True), TiedNet),
    ("NAdam of torch", torch.optim.NAdam, TiedNet),
    ("complex Adam of torch", torch.optim.Adam, ComplexNet),
    ("RMSprop of torch", torch.optim.RMSprop, TiedNet),
    ("Adagrad of torch", torch.optim.Adagrad, TiedNet),
):
    _loop = type(_name, (Loop,), {"optimizer": staticmethod(_optimizer), "model": _model})
    HAZARDS.append(Hazard(_name, _loop))


@hazard()
class Groups(Loop):
    @staticmethod
    def optimizer(parameters):
        first, *rest = parameters
        return Adam([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.1}])


@hazard()
class MomentumLater(Loop):
    optimizer = partial(SGD, lr=0.1)

    def after_step(self, step):
        if step == 2:
            self.flush()
            self.opt.param_groups[0]["momentum"] = 0.9


@hazard()
class OtherLayout(Loop):
    def after_step(self, step):
        if step == 2:
            self.flush()
            for parameter in self.net.parameters():
                if parameter.dim() == 2:
                    parameter.data = parameter.data.t().contiguous().t()


# From the first step on, a backward is not the last word on a gradient.


@hazard(backward="came twice before the first step")
class Accumulated(Loop):
    def backward(self, step):
        for part in range(3):
            (self.loss(3 * step + part) / 3).backward()


@hazard(backward=r"6 gradients .* were changed between backward\(\) and step\(\)")
class NormClipped(Loop):
    def before_step(self, step):
        clip_grad_norm_(self.net.parameters(), 0.1)


@hazard(backward="were changed")
class Negated(Loop):
    """As in adversarial training; the norms stay."""

    def before_step(self, step):
        for parameter in self.net.parameters():
            parameter.grad.neg_()


@hazard(backward="a loss scale decides")
class Scaled(Loop):
    """A step overflows."""

    def before_fuse(self):
        self.scale: Any = LossScale(8.0, growth_interval=3)

    def step(self, step):
        self.opt.zero_grad()
        loss = self.scale.scale(self.loss(step))
        (loss * (math.inf if step == 3 else 1.0)).backward()
        self.scale.step(self.opt)
        self.scale.update()


@hazard(backward="a loss scale decides")
class ScaledByTorch(Scaled):
    def before_fuse(self):
        self.scale = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


@hazard(backward="a loss scale decides")
class FusedOfTorchScaled(ScaledByTorch):
    """An optimizer that is told of the scale by attributes."""

    optimizer = partial(torch.optim.AdamW, fused=True)


@hazard(backward="were changed")
class ForeachOfTorchScaled(ScaledByTorch):
    """An optimizer for which the scaler decides on the host."""

    optimizer = partial(torch.optim.AdamW, foreach=True)


@hazard(backward="were changed")
class ClippedInClosure(Loop):
    def step(self, step):
        def closure():
            self.opt.zero_grad()
            self.backward(step)
            clip(self.net.parameters())

        self.opt.step(closure)


@hazard()
class ByClosure(Loop):
    """As Lightning does it."""

    def step(self, step):
        def closure():
            loss = self.loss(step)
            self.opt.zero_grad()
            loss.backward()
            return loss

        assert self.opt.step(closure).requires_grad


@hazard()
class ByElementClipped(Loop):
    """Each gradient by itself, in a hook."""

    def before_fuse(self):
        for parameter in self.net.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@hazard()
class ByTensorClipped(Loop):
    def before_fuse(self):
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda each: clip(each, 0.01))


@hazard()
class ReadInHook(Loop):
    """The hooks come after `fuse`, and before the first step."""

    def after_fuse(self):
        self.norms = []
        for parameter in self.net.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda parameter: self.norms.append(float(parameter.grad.norm()))
            )

    def after_step(self, step):
        self.see(torch.tensor(sorted(self.norms)))
        self.norms.clear()


# Evaluations, checkpoints, and steps that fail.


@hazard()
class Evaluated(Loop):
    def after_step(self, step):
        self.net.eval()
        with torch.no_grad():
            self.see(self.loss(1000 + step))
        self.net.train()


@hazard()
class EvaluatedInTrainingMode(Loop):
    def after_step(self, step):
        with torch.no_grad():
            self.see(self.loss(1000 + step))


@hazard()
class EvaluatedInInferenceMode(Loop):
    def after_step(self, step):
        with torch.inference_mode():
            self.see(self.loss(1000 + step))


class OtherwiseInEvaluation(Net):
    def forward(self, x):
        return super().forward(x) if self.training else linear(x, self.third.weight)


@hazard()
class EvaluatedOtherwise(Evaluated):
    model = OtherwiseInEvaluation


@hazard()
class EvaluatedWithGradients(Loop):
    model = OtherwiseInEvaluation

    def after_step(self, step):
        self.net.eval()
        self.see(self.loss(1000 + step))
        self.net.train()


@hazard()
class SavedAndLoaded(Loop):
    """Loads what it has saved some steps before."""

    def after_step(self, step):
        if step == 1:
            self.saved = copy.deepcopy([self.net.state_dict(), self.opt.state_dict()])
            self.see(*self.saved[0].values())
        if step == 3:
            self.net.load_state_dict(self.saved[0])
            self.opt.load_state_dict(self.saved[1])


@hazard()
class NotANumber(Loop):
    """From some step on every gradient is NaN, for ever."""

    def loss(self, step):
        return super().loss(step) * (math.nan if step >= 2 else 1.0)


@hazard()
class ForwardFailed(Loop):
    def backward(self, step):
        if step == 2:
            handle = self.net.second.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                self.loss(step)
            handle.remove()
        super().backward(step)


@hazard(backward="a backward failed after 2 of 6")
class BackwardFailed(Loop):
    def backward(self, step):
        if step == 2:
            handle = self.net.second.register_full_backward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                super().backward(step)
            handle.remove()
            self.opt.zero_grad()
        super().backward(step)


@hazard()
class ZeroedBetweenForwardAndBackward(Loop):
    def step(self, step):
        loss = self.loss(step)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


# Other ways to call a model.


@hazard()
class FunctionalCall(Loop):
    def loss(self, step):
        x, y = self.batch(step)
        return mse_loss(functional_call(self.net, dict(self.net.named_parameters()), (x,)), y)


@hazard()
class Transformed(Loop):
    """Gradients and samples by torch.func between two steps, and before the first."""

    def step(self, step):
        self.flush()
        parameters = {name: each.detach() for name, each in self.net.named_parameters()}
        x, y = self.batch(step)

        def loss(parameters):
            return mse_loss(functional_call(self.net, parameters, (x,)), y)

        self.see(*torch.func.grad(loss)(parameters).values())
        self.see(torch.func.vmap(lambda x: functional_call(self.net, parameters, (x,)))(x))
        super().step(step)


@hazard()
class GradientsThatNoBackwardMade(Loop):
    def backward(self, step):
        for number, parameter in enumerate(self.net.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (step - number))


@hazard()
class UsedLater(Loop):
    """Some parameters have no gradient in the first steps, and none in some later ones."""

    def loss(self, step):
        x, y = self.batch(step)
        return mse_loss(self.net.first(x) if step in {0, 1, 4} else self.net(x), y)


@hazard()
class OnlyPartsAreCalled(Loop):
    def loss(self, step):
        x, y = self.batch(step)
        x = self.net.second(torch.tanh(self.net.first(x)))
        return mse_loss(self.net.third(x), y) + self.net.first.weight.square().mean()
