"""Loops in which an update at another time than `step()` could show, as data.

Each hazard changes a plain loop in one respect. `refused` says what the true cause is, for each
kind of fusion that is refused. The other kind must end where the optimizer alone ends, to the bit.
"""

import copy
import io
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.functional import linear, mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
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
from support.held_memory import HOLDERS

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


def loop_with(method: str, **refused: str) -> Callable[[Callable[..., Any]], type[Loop]]:
    """Add a loop that differs from a plain one in one method, which is the decorated function."""

    def add(function):
        return hazard(**refused)(type(function.__name__, (Loop,), {method: function}))

    return add


def clip(parameters, limit=0.05):
    nn.utils.clip_grad_norm_(parameters, limit)


def clamp_gradient(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


# Hooks.


@loop_with("before_fuse", backward="were changed between")
def clipping_hook_before_fuse(self):
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


@loop_with("after_fuse", backward="were changed between")
def global_clipping_hook(self):
    def hook(optimizer, *_):
        if optimizer is self.opt:
            clip(self.net.parameters())

    self.closing.append(register_optimizer_step_pre_hook(hook))


@loop_with("after_fuse", backward="options .* were changed between")
def warm_up_hook_after_fuse(self):
    def warm_up(optimizer, *_):
        optimizer.param_groups[0]["lr"] *= 1.5

    self.opt.register_step_pre_hook(warm_up)


@loop_with("after_step")
def schedule_made_late(self, step):
    if step == 2:  # adds `initial_lr` to the groups, and changes no option
        self.schedule = torch.optim.lr_scheduler.StepLR(self.opt, 1000)
    if step > 2:
        self.schedule.step()


@loop_with("after_fuse")
def schedule_in_hook_after_step(self):
    schedule = torch.optim.lr_scheduler.StepLR(self.opt, 2)
    self.opt.register_step_post_hook(lambda *_: schedule.step())


@loop_with("after_fuse")
def zeroing_hook_after_fuse(self):
    self.opt.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    hooks = self.opt._optimizer_step_post_hooks
    hooks.move_to_end(next(reversed(hooks)), last=False)  # as a hook that asks to be first


@loop_with("after_fuse", backward="were changed between")
def hooks_after_accumulation_after_fuse(self):
    for parameter in self.net.parameters():
        parameter.register_post_accumulate_grad_hook(clamp_gradient)


# Reads and writes after the step.


@loop_with("after_step")
def clamped_weights(self, step):
    for parameter in self.net.parameters():
        parameter.data.clamp_(-0.3, 0.3)


@loop_with("after_step")
@torch.no_grad()
def clamped_without_gradients(self, step):
    self.net.second.weight.clamp_(-0.3, 0.3)


@loop_with("after_step")
def assigned_data(self, step):
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


@loop_with("after_step")
@torch.no_grad()
def set_and_viewed(self, step):
    """Torch announces neither to a subclass of Tensor."""
    if step == 2:
        self.net.first.weight.set_(torch.ones(WIDTH, WIDTH))
    self.see(self.net.second.weight.as_subclass(torch.Tensor))


@loop_with("after_step")
def mapped_by_vmap(self, step):
    self.see(torch.vmap(torch.neg)(self.net.second.weight))


@loop_with("after_step")
def kept_state_dict(self, step):
    if step == 1:
        self.kept = self.net.state_dict()
    if step > 1:
        self.see(*self.kept.values())


@loop_with("loss")
def forward_method(self, step):
    """No hook of the model is called."""
    x, y = self.batch(step)
    return mse_loss(self.net.forward(x), y)


@loop_with("loss")
def functional_use(self, step):
    x, y = self.batch(step)
    net = self.net
    x = nn.functional.linear(x, net.first.weight, net.first.bias)
    return mse_loss(net.third(torch.tanh(x)), y) + net.second.weight.square().sum()


@loop_with("after_step")
def copied_parameters(self, step):
    self.see(*copy.deepcopy(list(self.net.parameters())))


@loop_with("after_step")
def saved_parameter(self, step):
    file = io.BytesIO()
    torch.save(self.net.second.weight, file)
    file.seek(0)
    self.see(torch.load(file, weights_only=True))


@loop_with("after_step")
def frozen_later(self, step):
    if step == 2:
        self.net.second.requires_grad_(requires_grad=False)
        self.net.second.weight.grad = self.net.second.bias.grad = None


# Memory that other code holds.


class HeldParameters(Loop):
    """Reads and writes parameters in memory that it has taken before, without their versions."""

    hold: Any
    taken_after = -1

    def hold_all(self):
        return [self.hold(each) for each in self.net.parameters()]

    def before_fuse(self):
        self.held = self.hold_all() if self.taken_after < 0 else []

    def before_step(self, step):
        self.see(*self.held)
        for each in self.held:
            each.data.mul_(0.9)

    def after_step(self, step):
        if step == self.taken_after:
            self.held = self.hold_all()
        self.before_step(step)


class HeldGradients(Loop):
    """Changes gradients after the step, in memory that it has taken before."""

    hold: Any

    def before_step(self, step):
        self.held = [self.hold(each.grad) for each in self.net.parameters()]

    def after_step(self, step):
        for each in self.held:
            each.data.fill_(math.nan)


class GradientsHeldInHook(Loop):
    """Changes gradients before the step, after some quiet steps."""

    hold: Any

    def before_fuse(self):
        self.held = []
        for each in self.net.parameters():
            each.register_post_accumulate_grad_hook(self.keep)

    def keep(self, parameter):
        self.held.append(self.hold(parameter.grad))

    def before_step(self, step):
        if step > 1:
            for each in self.held:
                each.data.mul_(0.1)
        self.held.clear()


for _holder, _hold in HOLDERS.items():
    for _base, _values, _refused in (
        (HeldParameters, {}, ""),
        (HeldParameters, {"taken_after": 2}, ""),
        (HeldGradients, {}, "used between"),
        (GradientsHeldInHook, {}, "6 gradients .* are kept by other code"),
    ):
        _name = f"{_base.__name__} by {_holder}{' later' if _values else ''}"
        _loop = type(_name, (_base,), {"hold": staticmethod(_hold), **_values})
        _refusals = {"backward": _refused} if _refused else {}
        if _holder == "to_dlpack" and _values:  # torch calls nothing in Python
            _refusals["forward"] = r"memory of first\.weight was taken after step\(\)"
        HAZARDS.append(Hazard(_name, _loop, _refusals))


@loop_with("after_step", backward="still that of the last step")
def shared_memory(self, step):
    """Moves parameters and gradients."""
    if step == 2:
        self.net.share_memory()


@hazard()
class GradientsKeptInHook(GradientsHeldInHook):
    """Keeps the gradients themselves."""

    def hold(self, gradient):
        return gradient


@hazard(backward="6 gradients .* are kept by other code")
class FlatGradients(Loop):
    """All gradients lie in one buffer, which the loop zeroes itself."""

    def before_fuse(self):
        self.flat = torch.zeros(sum(each.numel() for each in self.net.parameters()))

    def backward(self, step):
        parts = self.flat.split([each.numel() for each in self.net.parameters()])
        for each, part in zip(self.net.parameters(), parts, strict=True):
            each.grad = part.view_as(each).data
        self.loss(step).backward()

    def after_step(self, step):
        self.see(self.flat)
        self.flat.zero_()


def reads_outside(self, step, read):
    x, y = self.batch(step)
    return mse_loss(self.net(linear(x.requires_grad_(), read(self.net.second.weight))), y)


@loop_with("loss")
def read_detached_outside_of_the_model(self, step):
    """Backward reads the weight after its gradient is whole."""
    return reads_outside(self, step, torch.Tensor.detach)


@loop_with("loss")
def read_by_data_outside_of_the_model(self, step):
    return reads_outside(self, step, lambda weight: weight.data)


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


@loop_with("step", backward="came twice before")
def sharpness_aware(self, step):
    """SAM: the gradient is that at a point which is a short way uphill."""
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


@loop_with("step", backward="called between backward")
def accumulation_that_begins_later(self, step):
    self.opt.zero_grad()
    for part in range(1 if step < 2 else 2):
        self.loss(3 * step + part).backward()
    self.opt.step()


@loop_with("step", backward="called between backward")
def skipped_step(self, step):
    """As when a loss is not finite."""
    self.opt.zero_grad()
    self.loss(step).backward()
    if step != 3:
        self.opt.step()


@loop_with("step")
def step_without_backward(self, step):
    self.opt.zero_grad()
    if step != 3:
        self.loss(step).backward()
    self.opt.step()


@loop_with("step")
def double_backward(self, step):
    """The gradients of the parameters have a graph of their own."""
    self.opt.zero_grad()
    loss = self.loss(step)
    gradients = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
    (loss + 0.01 * sum(each.square().sum() for each in gradients)).backward()
    self.opt.step()


# Groups.


@loop_with("after_step", backward="has other parameters than", forward="has other parameters than")
def group_that_is_added(self, step):
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


@loop_with("before_step", backward="were set between")
def gradients_that_are_set_later(self, step):
    if step == 3:
        for each in self.net.parameters():
            each.grad = torch.ones_like(each)


@loop_with("before_step", backward="were changed between")
def clipping_by_data(self, step):
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


@loop_with("before_step", backward="used between .*clipping")
def clipping_that_begins_later(self, step):
    if step > 1:
        clip(self.net.parameters())


@loop_with("before_step", backward="removed between")
def gradients_that_are_dropped(self, step):
    """As when a batch is bad."""
    if step > 1:
        self.opt.zero_grad()


@loop_with("step", backward="used between")
def scale_that_begins_later(self, step):
    if step < 2:
        Loop.step(self, step)
        return
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    self.opt.zero_grad()
    scaler.scale(self.loss(step)).backward()
    scaler.step(self.opt)


@loop_with("before_step", backward="came twice between two steps|read or written between")
def penalty_that_begins_later(self, step):
    if step > 1:
        sum(each.square().sum() for each in self.net.parameters()).backward()


@loop_with("step", backward="still that of the last step")
def gradients_that_are_kept_once(self, step):
    if step != 3:
        self.opt.zero_grad()
    self.loss(step).backward()
    self.opt.step()


@loop_with("after_step", backward="still that of the last step")
def step_that_is_repeated(self, step):
    if step == 3:
        self.opt.step()


@loop_with("after_step", backward="still that of the last step")
def gradients_that_are_read_after_the_step(self, step):
    self.see(*(each.grad for each in self.net.parameters() if each.grad is not None))


@loop_with("after_step")
def converted_model(self, step):
    if step == 2:
        self.net.half().float()


# Parameters that are used between backward and the step, or by backward itself.


@loop_with("before_step", backward="read or written between")
def logged_norm_before_the_step(self, step):
    self.see(self.net.second.weight.norm())


@loop_with("before_step", backward="read or written between")
def decay_by_data(self, step):
    if step > 1:
        for each in self.net.parameters():
            each.data.mul_(0.99)


@loop_with("loss", backward="read or written between")
def hook_of_an_activation(self, step):
    """Reads a weight of a later layer, whose gradient is whole by then."""
    x, y = self.batch(step)
    net = self.net
    inner = torch.tanh(net.first(x))
    inner.register_hook(lambda gradient: gradient * net.third.weight.mean())
    return mse_loss(net.third(torch.tanh(net.second(inner))), y)


@loop_with("before_step")
def measured_before_the_step(self, step):
    """Nothing here reads a value."""
    sizes = [each.nbytes * each.is_contiguous() for each in self.net.parameters()]
    self.see(torch.tensor(sizes), *map(torch.zeros_like, self.net.parameters()))


# What a step that waits depends on.


@loop_with("after_step")
def state_that_is_replaced(self, step):
    if step == 3:
        self.opt.state = defaultdict(dict)


@loop_with("after_step")
def state_that_is_zeroed(self, step):
    if step == 3:
        for state in self.opt.state.values():
            state["exp_avg"].zero_()


@loop_with("after_step")
def state_that_is_logged(self, step):
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


@of_model()
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


@loop_with("optimizer")
@staticmethod
def groups(parameters):
    first, *rest = parameters
    return Adam([{"params": [first], "lr": 0.1}, {"params": rest, "weight_decay": 0.1}])


@hazard()
class MomentumLater(Loop):
    optimizer = partial(SGD, lr=0.1)

    def after_step(self, step):
        if step == 2:
            self.flush()
            self.opt.param_groups[0]["momentum"] = 0.9


@loop_with("after_step")
def other_layout(self, step):
    if step == 2:
        self.flush()
        for parameter in self.net.parameters():
            if parameter.dim() == 2:
                parameter.data = parameter.data.t().contiguous().t()


# From the first step on, a backward is not the last word on a gradient.


@loop_with("backward", backward="came twice before the first step")
def accumulated(self, step):
    for part in range(3):
        (self.loss(3 * step + part) / 3).backward()


@loop_with("before_step", backward=r"6 gradients .* were changed between backward\(\) and step\(\)")
def norm_clipped(self, step):
    clip_grad_norm_(self.net.parameters(), 0.1)


@loop_with("before_step", backward="were changed")
def negated(self, step):
    """As in adversarial training; the norms stay."""
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


@loop_with("step", backward="were changed")
def clipped_in_closure(self, step):
    def closure():
        self.opt.zero_grad()
        self.backward(step)
        clip(self.net.parameters())

    self.opt.step(closure)


@loop_with("step")
def by_closure(self, step):
    """As Lightning does it."""

    def closure():
        loss = self.loss(step)
        self.opt.zero_grad()
        loss.backward()
        return loss

    assert self.opt.step(closure).requires_grad


@loop_with("before_fuse")
def by_element_clipped(self):
    """Each gradient by itself, in a hook."""
    for parameter in self.net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@loop_with("before_fuse")
def by_tensor_clipped(self):
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


@loop_with("after_step")
def evaluated_in_training_mode(self, step):
    with torch.no_grad():
        self.see(self.loss(1000 + step))


@loop_with("after_step")
def evaluated_in_inference_mode(self, step):
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


@loop_with("after_step")
def saved_and_loaded(self, step):
    """Loads what it has saved some steps before."""
    if step == 1:
        self.saved = copy.deepcopy([self.net.state_dict(), self.opt.state_dict()])
        self.see(*self.saved[0].values())
    if step == 3:
        self.net.load_state_dict(self.saved[0])
        self.opt.load_state_dict(self.saved[1])


@loop_with("loss")
def not_a_number(self, step):
    """From some step on every gradient is NaN, for ever."""
    return Loop.loss(self, step) * (math.nan if step >= 2 else 1.0)


@loop_with("backward")
def forward_failed(self, step):
    if step == 2:
        handle = self.net.second.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.loss(step)
        handle.remove()
    Loop.backward(self, step)


@loop_with("backward", backward="a backward failed after 2 of 6")
def backward_failed(self, step):
    if step == 2:
        handle = self.net.second.register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Loop.backward(self, step)
        handle.remove()
        self.opt.zero_grad()
    Loop.backward(self, step)


@loop_with("step")
def zeroed_between_forward_and_backward(self, step):
    loss = self.loss(step)
    self.opt.zero_grad()
    loss.backward()
    self.opt.step()


# Other ways to call a model.


@loop_with("loss")
def called_by_torch_func(self, step):
    x, y = self.batch(step)
    return mse_loss(functional_call(self.net, dict(self.net.named_parameters()), (x,)), y)


@loop_with("step")
def transformed(self, step):
    """Gradients and samples by torch.func between two steps, and before the first."""
    self.flush()
    parameters = {name: each.detach() for name, each in self.net.named_parameters()}
    x, y = self.batch(step)

    def loss(parameters):
        return mse_loss(functional_call(self.net, parameters, (x,)), y)

    self.see(*torch.func.grad(loss)(parameters).values())
    self.see(torch.func.vmap(lambda x: functional_call(self.net, parameters, (x,)))(x))
    Loop.step(self, step)


@loop_with("backward")
def gradients_that_no_backward_made(self, step):
    for number, parameter in enumerate(self.net.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (step - number))


@loop_with("loss")
def used_later(self, step):
    """Some parameters have no gradient in the first steps, and none in some later ones."""
    x, y = self.batch(step)
    return mse_loss(self.net.first(x) if step in {0, 1, 4} else self.net(x), y)


@loop_with("loss")
def only_parts_are_called(self, step):
    x, y = self.batch(step)
    x = self.net.second(torch.tanh(self.net.first(x)))
    return mse_loss(self.net.third(x), y) + self.net.first.weight.square().mean()


# State and groups.


@loop_with("before_step", backward="state is read or written between backward")
def state_that_is_zeroed_before_the_step(self, step):
    if step == 3:
        for state in self.opt.state.values():
            state["exp_avg"].zero_()


@hazard()
class OrderOfState(Loop):
    optimizer = partial(torch.optim.AdamW, lr=0.05)

    def after_step(self, step):
        self.see(*(state["exp_avg"] for state in self.opt.state.values()))


@hazard()
class OrderOfNewState(OrderOfState):
    """Some parameters get their state later than others."""

    def loss(self, step):
        x, y = self.batch(step)
        return mse_loss(self.net.first(x) if step < 2 else self.net(x), y)


class KeepsState(Loop):
    """Keeps the dictionaries of the optimizer's state, as a monitor of dead units does."""

    kept: Any = ()

    def after_step(self, step):
        if step == 2:
            self.kept = [self.opt.state[each] for each in self.net.parameters()]
        self.use_kept()

    def use_kept(self):
        for state in self.kept:
            self.see(state["exp_avg_sq"])
            state["exp_avg"].zero_()


hazard()(KeepsState)


@hazard(backward="state is read or written between backward")
class UsesKeptStateBeforeTheStep(KeepsState):
    def before_step(self, step):
        self.use_kept()


@hazard()
class KeepsMemoryOfState(KeepsState):
    def use_kept(self):
        self.views = [state["exp_avg"].view(-1) for state in self.kept]
        for view in self.views:
            view.data.zero_()

    def before_step(self, step):
        self.see(*self.views) if step > 2 else None
        for state in self.kept:
            state["exp_avg"].detach().numpy()[...] = 0.25


@hazard(forward="state of .* was replaced after step")
class ReplacesKeptState(KeepsState):
    def use_kept(self):
        for state in self.kept:
            state["exp_avg"] = torch.zeros_like(state["exp_avg_sq"])


@loop_with("after_step", backward="groups have other", forward="groups have other")
def parameters_moved_to_another_group(self, step):
    if step == 2:
        (group,) = self.opt.param_groups
        self.opt.param_groups.append(group | {"params": group["params"][3:], "lr": 0.001})
        del group["params"][3:]


@hazard(backward="options .* were changed between")
class RateChangedInPlace(Loop):
    """A tensor that the loop keeps."""

    def optimizer(self, parameters):
        self.rate = torch.tensor(0.05)
        return torch.optim.AdamW(parameters, lr=self.rate, foreach=False)

    def before_step(self, step):
        self.rate.mul_(0.5)


class BetasChangedInPlace(Loop):
    """A list that the loop keeps."""

    def optimizer(self, parameters):
        self.betas = [0.5, 0.9]
        return AdamW(parameters, lr=0.05, betas=self.betas)

    def after_step(self, step):
        self.betas[0] += 0.05


hazard()(BetasChangedInPlace)


@hazard(backward="options .* were changed between")
class BetasChangedBeforeTheStep(BetasChangedInPlace):
    def before_step(self, step):
        self.betas[0] += 0.01


@loop_with("before_step", backward="save after step")
def loaded_before_the_step(self, step):
    if step == 3:
        self.net.load_state_dict({name: each + 1 for name, each in self.net.state_dict().items()})


@loop_with("backward")
def frozen_between_forward_and_backward(self, step):
    loss = self.loss(step)
    self.net.second.weight.requires_grad_(requires_grad=step % 3 != 2)
    loss.backward()


# Steps that do not end as they began.


@hazard()
class StepThatFailsOnce(Loop):
    def after_fuse(self):
        self.calls = 0
        self.opt.register_step_pre_hook(self.hook)

    def hook(self, *_):
        self.calls += 1
        if self.calls == 3:
            raise ValueError

    def step(self, step):
        try:
            super().step(step)
        except ValueError:
            self.opt.step()


@hazard()
class LossOfTheStepBefore(Loop):
    """A forward that runs before the step whose loss is used after it."""

    def before_fuse(self):
        self.next = self.loss(0)

    def step(self, step):
        self.opt.zero_grad()
        self.next.backward()
        self.opt.step()
        self.next = self.loss(step + 1)


# Modes of torch that are active in a part of a step only.


class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.names = []
        return super().__enter__()


@hazard()
class OperationsAreNamed(Loop):
    """The loop names the operations of forward and backward, or of a whole step."""

    def backward(self, step):
        if step not in {2, 3}:
            super().backward(step)
            return
        with Names() as mode:
            super().backward(step)
        self.see(torch.tensor(len(mode.names)))

    def step(self, step):
        if step != 4:
            super().step(step)
            return
        with Names() as mode:
            super().step(step)
        self.see(torch.tensor("aten._fused_adamw_.default" in mode.names))


@loop_with("after_step")
def size_estimated_with_fake_tensors(self, step):
    self.opt.zero_grad()
    with FakeTensorMode(allow_non_fake_inputs=True):
        self.net(torch.ones(2, WIDTH))


class HalvesAdditions(TorchFunctionMode):
    """Changes what an update does, if it sees the update."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.add_:
            args[0].data.mul_(0.5)
        return result


class HalvesAddedTensors(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add_.Tensor:
            args[0].mul_(0.5)
        return result


class InMode(Loop):
    """A mode is active in the forward, the backward or the step."""

    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False)
    mode: Any
    active_in: str

    def mode_of(self, part):
        return self.mode() if part == self.active_in else nullcontext()

    def step(self, step):
        self.opt.zero_grad()
        with self.mode_of("forward"):
            loss = self.loss(step)
        with self.mode_of("backward"):
            loss.backward()
        with self.mode_of("step"):
            self.opt.step()


for _mode in (HalvesAdditions, HalvesAddedTensors):
    for _part in ("forward", "backward", "step"):
        _name = f"{_mode.__name__} in {_part}"
        _loop = type(_name, (InMode,), {"mode": _mode, "active_in": _part})
        _refusals = {"backward": "Mode is active in step"} if _part == "step" else {}
        HAZARDS.append(Hazard(_name, _loop, _refusals))


class InDouble(InMode):
    """The default dtype decides the type of new state."""

    optimizer = partial(torch.optim.AdamW, lr=0.05)

    @contextmanager
    def mode(self):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    def loss(self, step):
        x, y = self.batch(step)
        x, y = x.float(), y.float()
        return mse_loss(self.net.first(x) if step < 2 else self.net(x), y)


for _part in ("forward", "backward", "step"):
    _name = f"InDouble in {_part}"
    _loop = type(_name, (InDouble,), {"active_in": _part})
    _refusals = {} if _part == "forward" else {"backward": "setting of torch was changed between"}
    HAZARDS.append(Hazard(_name, _loop, _refusals))


@hazard()
class DenormalsFlushedInForward(Loop):
    """Momentum is too small for a normal number."""

    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

    def backward(self, step):
        (self.loss(step) * 1e-38).backward()

    def loss(self, step):
        torch.set_flush_denormal(True)
        try:
            return super().loss(step)
        finally:
            torch.set_flush_denormal(False)


# Hooks for the tensors that a graph saves.


def in_bfloat16(tensor):
    return tensor.detach().bfloat16().to(tensor.dtype)


@loop_with("loss")
def activations_saved_in_bfloat16(self, step):
    with torch.autograd.graph.saved_tensors_hooks(in_bfloat16, lambda tensor: tensor):
        return Loop.loss(self, step)


@loop_with("loss")
def saved_tensors_hooks_disabled(self, step):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return Loop.loss(self, step)


@loop_with("step")
def weight_changed_between_forward_and_backward(self, step):
    self.opt.zero_grad()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = self.loss(step)
        with torch.no_grad():
            self.net.second.weight.mul_(0.9)
        loss.backward()
    self.opt.step()


# Classes of parameters.


class OwnParameter(nn.Parameter):
    pass


class OwnTensor(torch.Tensor):
    """Torch calls its __torch_function__."""


def of_own_class(make: Callable[[torch.Tensor], Any]) -> Callable[[], Net]:
    def model():
        net = Net()
        for layer in (net.first, net.second, net.third):
            layer.weight, layer.bias = make(layer.weight.detach()), make(layer.bias.detach())
        return net

    return model


for _kind, _make, _refused in (
    ("OwnParameter", OwnParameter, "read or written between"),
    ("OwnTensor", lambda values: nn.Parameter(values.as_subclass(OwnTensor)), ""),
):
    for _base in (MovingAverage, decay_by_data):
        _name = f"{_base.__name__} of {_kind}"
        _loop = type(_name, (_base,), {"model": staticmethod(of_own_class(_make))})
        _refusals = {"backward": _refused} if _refused and _base is decay_by_data else {}
        HAZARDS.append(Hazard(_name, _loop, _refusals))


@loop_with("after_step", backward="compile the hooks", forward="compile the hooks")
def scripted_later(self, step):
    if step == 2:
        torch.jit.script(self.net)


@hazard(backward="swap_module_params_on_conversion", forward="swap_module_params_on_conversion")
class SwappedInLoad(Loop):
    def after_step(self, step):
        if step == 2:
            torch.__future__.set_swap_module_params_on_conversion(True)
            try:
                self.net.load_state_dict(self.net.state_dict())
            finally:
                torch.__future__.set_swap_module_params_on_conversion(False)


# Models that write or read weights in their own way.


@hazard()
class ValueCachedByVersion(Loop):
    """As weights that are quantized once per step."""

    version = -1

    def loss(self, step):
        weight = self.net.third.weight
        if weight._version != self.version:
            self.version, self.size = weight._version, weight.detach().norm()
        return super().loss(step) * self.size


@hazard()
class WidenedModel(Loop):
    def batch(self, step):
        return super().batch(step).to(self.net.first.weight.dtype)

    def after_step(self, step):
        if step == 2:
            self.opt.zero_grad()
            self.net.double()


def parametrized():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.second)
    return net


class WritesInForward(Net):
    def forward(self, x):
        weight = self.third.weight.detach().numpy()
        weight *= weight.dtype.type(0.99)
        return super().forward(x)


class Lookup(nn.Module):
    """The embedding changes its weight in forward, and its gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.first = nn.Embedding(20, WIDTH, max_norm=0.5, sparse=True)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first((x[:, 0] * 5).long() % 20))


for _name, _model, _optimizer in (
    ("parametrized", parametrized, Loop.optimizer),
    ("WritesInForward", WritesInForward, Loop.optimizer),
    ("sparse gradients", Lookup, torch.optim.Adagrad),
):
    _values = {"model": staticmethod(_model), "optimizer": staticmethod(_optimizer)}
    HAZARDS.append(Hazard(_name, type(_name, (Loop,), _values)))


@loop_with("loss")
def functional_call_with_scaled_weights(self, step):
    x, y = self.batch(step)
    scaled = {"second.weight": self.net.second.weight * 0.5}
    return mse_loss(functional_call(self.net, scaled, (x,)), y)


@loop_with("loss", forward="a transform of torch.func")
def derivative_in_the_loss(self, step):
    x, y = self.batch(step)
    _, tangent = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
    return mse_loss(self.net(x), y) + 0.1 * tangent.square().mean()


@loop_with("after_step", forward="memory of first.weight was taken after step")
def traced_by_jit(self, step):
    if step == 2:
        self.traced = torch.jit.trace(self.net, self.batch(0)[0])
    if step > 2:
        self.see(self.traced(self.batch(1)[0]))


@hazard()
class AveragedByTorch(Loop):
    def before_fuse(self):
        self.average = torch.optim.swa_utils.AveragedModel(self.net)

    def after_step(self, step):
        self.average.update_parameters(self.net)
        self.see(*self.average.parameters(), self.average(self.batch(3)[0]))


@loop_with("step")
def autocast_in_some_steps(self, step):
    with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
        Loop.step(self, step)


@loop_with("after_step", backward="used between backward")
def hooks_that_come_late(self, step):
    """They find gradients that are freed."""
    if step == 2:
        for each in self.net.parameters():
            each.register_hook(lambda gradient: gradient * 0.5)
            each.register_post_accumulate_grad_hook(clamp_gradient)
