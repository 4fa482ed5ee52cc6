"""Loops in which an update at another time than `step()` could show, as data.

Each hazard changes a plain loop in one respect. `Refused` says what the true cause is; a hazard
without one must end where the optimizer alone ends, to the bit.
"""

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphstash.training import SGD, AdamW, fuse

__all__ = ["HAZARDS", "WIDTH", "Hazard", "Loop"]

WIDTH = 4
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

    def __init__(self, when):
        torch.manual_seed(0)
        self.seen = []
        self.closing = []
        self.make()
        self.before_fuse()
        self.fusion = None if when is None else fuse(self.net, self.opt, when)
        self.after_fuse()

    def make(self):
        self.net = Net()
        self.opt = AdamW(self.net.parameters(), lr=0.05)

    def before_fuse(self):
        pass

    def after_fuse(self):
        pass

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        shape = (2, 3, WIDTH)
        return torch.randn(shape, generator=generator)

    def loss(self, step):
        x, y = self.batch(step)
        return mse_loss(self.net(x), y)

    def step(self, step):
        self.opt.zero_grad()
        self.loss(step).backward()
        self.before_step(step)
        self.opt.step()
        self.after_step(step)

    def before_step(self, step):
        pass

    def after_step(self, step):
        pass

    def see(self, *tensors):
        self.seen += [tensor.detach().clone() for tensor in tensors]

    def run(self):
        """Return everything that the loop has trained and seen."""
        try:
            for step in range(STEPS):
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

    def make(self):
        super().make()
        self.opt = SGD(self.net.parameters(), lr=0.5)

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
class ClampingHookAfterFuse(Loop):
    def after_fuse(self):
        @torch.no_grad()
        def clamp(*_):
            self.net.second.weight.clamp_(-0.3, 0.3)

        self.opt.register_step_post_hook(clamp)


@hazard()
class Lookahead(Loop):
    def before_fuse(self):
        self.slow = [each.detach().clone() for each in self.net.parameters()]

    @torch.no_grad()
    def after_step(self, step):
        if step % 2:
            for slow, fast in zip(self.slow, self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


@hazard()
class ResetParameters(Loop):
    def after_step(self, step):
        if step == 2:
            self.net.second.reset_parameters()


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
class LoggedWeightNorm(Loop):
    def after_step(self, step):
        self.see(self.net.second.weight.norm())


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
class PenaltyOutsideOfTheModel(Loop):
    def loss(self, step):
        penalty = sum(each.square().sum() for each in self.net.parameters())
        return super().loss(step) + 0.1 * penalty


@hazard()
class FrozenLater(Loop):
    def after_step(self, step):
        if step == 2:
            self.net.second.requires_grad_(requires_grad=False)
            self.net.second.weight.grad = self.net.second.bias.grad = None


# Routing.


class SharedNet(Net):
    """Two heads use one weight, which neither of them owns."""

    task = 0

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([SharedHead(self.second), SharedHead(self.second)])

    def forward(self, x):
        return self.third(self.heads[self.task](torch.tanh(self.first(x))))


class SharedHead(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.owner = [owner]

    def forward(self, x):
        return nn.functional.linear(x, self.owner[0].weight)


@hazard()
class ReaderThatChanges(Loop):
    def make(self):
        self.net = SharedNet()
        self.opt = AdamW(self.net.parameters(), lr=0.05)

    def loss(self, step):
        self.net.task = step % 2
        return super().loss(step)


class RoutedNet(Net):
    route = 0

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.route:  # before its owner runs
            x = x @ self.third.weight
        return self.third(self.second(x))


@hazard()
class RouteThatIsNewLater(Loop):
    def make(self):
        self.net = RoutedNet()
        self.opt = AdamW(self.net.parameters(), lr=0.05)

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

    detaches = True

    def make(self):
        super().make()
        self.judge = Discriminator()
        self.judge_opt = AdamW(self.judge.parameters(), lr=0.05)

    def step(self, step):
        x, y = self.batch(step)
        fake = self.net(x)
        self.judge_opt.zero_grad()
        seen = fake.detach()
        (self.judge(seen).mean() - self.judge(y).mean()).backward()
        self.judge_opt.step()
        self.opt.zero_grad()
        (-self.judge(fake).mean()).backward()
        self.opt.step()

    def run(self):
        return [*super().run(), *self.judge.parameters()]


@hazard()
class GeneratorOfTwoOptimizers(Adversarial):
    """The discriminator is not fused."""


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
class SkippedBackward(Loop):
    def step(self, step):
        self.opt.zero_grad()
        loss = self.loss(step)
        if step != 3:
            loss.backward()
            self.opt.step()


@hazard()
class StepWithoutBackward(Loop):
    def step(self, step):
        self.opt.zero_grad()
        if step != 3:
            self.loss(step).backward()
        self.opt.step()


@hazard()
class GradientPenalty(Loop):
    """The gradient of a gradient, as of WGAN-GP: second derivatives by one backward."""

    def loss(self, step):
        x, y = self.batch(step)
        x.requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


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


@hazard(backward="options .* were changed between")
class LearningRateAfterBackward(Loop):
    def before_step(self, step):
        self.opt.param_groups[0]["lr"] = 0.05 / (step + 1)


@hazard(backward="has other parameters than", forward="has other parameters than")
class GroupThatIsAdded(Loop):
    def after_step(self, step):
        if step == 2:
            self.opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@hazard(backward="has other parameters than", forward="has other parameters than")
class ParameterThatIsRemoved(Loop):
    def after_step(self, step):
        if step == 2:
            del self.opt.param_groups[0]["params"][0]


@hazard(backward="would be", forward="would be")
class WeightsThatAreTiedLater(Loop):
    def after_step(self, step):
        if step == 2:
            self.net.third.weight = self.net.second.weight


class TiedNet(Net):
    def __init__(self):
        super().__init__()
        self.third.weight = self.first.weight


@hazard()
class WeightsThatAreUntiedLater(Loop):
    def make(self):
        self.net = TiedNet()
        self.opt = AdamW(self.net.parameters(), lr=0.05)

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
class AverageWithBuffers(MovingAverage):
    """Swapped into the model for an evaluation, and out again."""

    def after_step(self, step):
        super().after_step(step)
        parameters = list(self.net.parameters())
        with torch.no_grad():
            kept = [each.clone() for each in parameters]
            for each, average in zip(parameters, self.averages, strict=True):
                each.copy_(average)
            self.see(self.loss(200 + step))
            for each, own in zip(parameters, kept, strict=True):
                each.copy_(own)


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


@hazard(backward="no step.. came after it")
class LoopWithoutALastStep(Loop):
    """Stops after a backward, and closes the fusion."""

    def after(self):
        self.opt.zero_grad()
        self.loss(9).backward()


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


@hazard(backward="used between .*clamp_")
class ClippingByValueThatBeginsLater(Later):
    def later(self, step):
        nn.utils.clip_grad_value_(self.net.parameters(), 0.01)


@hazard(backward="used between .*norm")
class LoggedGradientNorm(Later):
    def later(self, step):
        self.see(*(each.grad.norm() for each in self.net.parameters() if each.grad is not None))


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


@hazard(backward="used between")
class SharpnessAwareLater(SharpnessAware):
    def step(self, step):
        (Loop if step < 2 else SharpnessAware).step(self, step)


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


@hazard(backward="still that of the last step")
class GradientsThatAreZeroedInPlace(Loop):
    def step(self, step):
        self.opt.zero_grad(set_to_none=step < 2)
        self.loss(step).backward()
        self.opt.step()


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
class DecayByHand(Loop):
    @torch.no_grad()
    def before_step(self, step):
        for each in self.net.parameters():
            each.mul_(0.99)


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


@hazard(backward="read or written between")
class HookOfAnotherParameter(Loop):
    def before_fuse(self):
        third = self.net.third.weight
        self.net.first.weight.register_hook(lambda gradient: gradient + third.mean().detach())


@hazard()
class MeasuredBeforeTheStep(Loop):
    """Nothing here reads a value."""

    def before_step(self, step):
        sizes = [each.nbytes * each.is_contiguous() for each in self.net.parameters()]
        self.see(torch.tensor(sizes), *map(torch.zeros_like, self.net.parameters()))


# What a step that waits depends on.


@hazard()
class StateThatIsCleared(Loop):
    def after_step(self, step):
        if step == 3:
            self.opt.state.clear()


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


@hazard()
class CopiedState(Loop):
    def after_step(self, step):
        copied = copy.deepcopy(self.opt.state)
        assert type(copied) is defaultdict
        self.see(*sorted((each["exp_avg"].sum() for each in copied.values()), key=float))


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

    def make(self):
        self.net = BiasNet()
        self.opt = AdamW(self.net.parameters(), lr=0.05)

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
    def make(self):
        self.net = Net()
        self.opt = ClippingAdamW(self.net.parameters(), lr=0.05)


class DefaultedAdamW(AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05, weight_decay=0.1)


@hazard()
class SubclassWithDefaults(Loop):
    def make(self):
        self.net = Net()
        self.opt = DefaultedAdamW(self.net.parameters())
