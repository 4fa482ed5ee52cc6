"""Fused updates end where the optimizer alone ends, to the bit, or they are refused."""

import copy
import gc
import math
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


class Unused(Plain):
    def forward(self, x):
        return self.third(torch.tanh(self.first(x)))


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


class Attention(nn.Module):
    """Torch's attention reads weights of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x.reshape(2, 2, WIDTH)).reshape(4, WIDTH)


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


class Scheduled(Training):
    """A schedule that Lightning's users have: after each step."""

    def prepare(self):
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, STEPS)

    def step(self, step):
        super().step(step)
        self.schedule.step()


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
        if step == 10:
            self.saved = copy.deepcopy([self.net.state_dict(), self.opt.state_dict()])
        if step == 20:
            self.net.load_state_dict(self.saved[0])
            self.opt.load_state_dict(self.saved[1])


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
    with_optimizer("ours SGD", lambda p: SGD(p, lr=0.1, momentum=0.9)),
    with_optimizer("ours amsgrad", lambda p: Adam(p, lr=0.05, amsgrad=True)),
    with_optimizer("ours by formula", lambda p: AdamW(p, lr=0.05, fused=False)),
    with_optimizer("ours LAMB", lambda p: LAMB(p, lr=0.05)),
    with_optimizer("ours Lion", lambda p: Lion(p, lr=0.01)),
    with_optimizer("SGD of torch", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    with_optimizer("AdamW of torch", lambda p: torch.optim.AdamW(p, lr=0.05)),
    with_optimizer("fused AdamW of torch", lambda p: torch.optim.AdamW(p, lr=0.05, fused=True)),
    with_optimizer("foreach Adam of torch", lambda p: torch.optim.Adam(p, foreach=True)),
    with_optimizer("NAdam of torch", torch.optim.NAdam),
    with_optimizer("RMSprop of torch", torch.optim.RMSprop),
    with_optimizer("Adagrad of torch", torch.optim.Adagrad),
]
BOTH = [
    *map(with_model, (Plain, Tied, Unused, Twice, Now, NonReentrant, ReentrantUntied, Attention)),
    *(Scheduled, Evaluated, EvaluatedInference, EvaluatedAttention, EvaluatedOtherwise),
    *(EvaluatedWithGradients, Saved, Resumed, Submodule),
    *(Autocast, Frozen, Groups, *OPTIMIZERS),
]
FORWARD_ONLY = [
    *map(with_model, (Detached, ByData, Reentrant)),
    *(Accumulated, TwoLosses, NormClipped, ByTorchClipped, ValueClipped, Scaled, ScaledByTorch),
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
def test_the_trajectory_is_that_of_the_optimizer_alone(case, when, steps, unit_bytes, monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", unit_bytes)

    alone, fused = case(None).run(steps), case(when).run(steps)

    assert len(alone) == len(fused)
    assert all(torch.equal(*pair) for pair in zip(alone, fused, strict=True))


REFUSED = {
    with_model(Detached): r"reads second\.weight again",
    with_model(ByData): r"reads second\.weight again",
    with_model(Reentrant): "came twice",
    Accumulated: "came twice before the first step",
    TwoLosses: "came twice before the first step",
    NormClipped: r"6 gradients .* were changed between backward\(\) and step\(\)",
    ByTorchClipped: "were changed",
    ValueClipped: "were changed",
    Scaled: "a loss scale decides",
    ScaledByTorch: "a loss scale decides",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_backward_fusion_cannot_do_is_refused_before_anything_is_changed(case):
    training = case("backward")
    before = [parameter.clone() for parameter in training.net.parameters()]

    with pytest.raises(FusionError, match=REFUSED[case]) as refused:
        training.step(0)

    assert 'when="forward"' in str(refused.value)
    assert all(map(torch.equal, before, training.net.parameters()))


class Compiled(Training):
    def prepare(self):
        self.net = torch.compile(self.net, backend="aot_eager")

    def states(self):
        return ()


def test_a_compiled_model_is_fused_with_its_backward():
    alone, fused = Compiled(None).run(5), Compiled("backward").run(5)

    assert all(torch.equal(*pair) for pair in zip(alone, fused, strict=True))


def test_a_compiled_model_is_not_fused_with_its_forward():
    with pytest.raises(FusionError, match=r"compiled by torch\.compile"):
        Compiled("forward")


def test_gradients_are_freed_in_backward():
    """At most the largest layer's are there at once, but for what autograd holds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(8)))  # 1.4 MB each
    optimizer = SGD(model.parameters(), lr=0.1)
    most = 0

    def count(_):
        nonlocal most
        live = [each.grad for each in model.parameters() if each.grad is not None]
        most = max(most, sum(each.numel() * each.element_size() for each in live))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # before ours
    with fuse(model, optimizer, "backward"):
        for _ in range(3):
            most = 0
            model(torch.ones(2, 600)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert 0 < most <= 4 * (600 * 600 + 600)


def test_a_backward_that_fails_halfway_is_never_saved():
    training = Training("backward")
    training.step(0)
    x, y = batch(1)
    training.net.second.register_full_backward_pre_hook(lambda *_: 1 / 0)
    unit_bytes = sum(each.numel() for each in training.net.parameters())
    assert unit_bytes < 1024**2

    with pytest.raises(ZeroDivisionError):
        mse_loss(training.net(x), y).backward()

    training.net.state_dict()  # small layers are one unit: nothing was updated


class Wide(Training):
    """Each layer is a unit of its own."""

    class model(nn.Sequential):  # noqa: N801 - as the field is called
        def __init__(self):
            super().__init__(*(nn.Linear(520, 520) for _ in range(3)))

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        return self.net(torch.randn(2, 520, generator=generator)).square().mean()


@pytest.mark.parametrize("way", ["step", "optimizer", "model", "flush", "close"])
def test_what_a_failed_backward_has_updated_in_part_is_not_used(way):
    training = Wide("backward")
    training.step(0)
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


def test_a_checkpoint_that_is_loaded_ends_what_a_failed_backward_left():
    training = Wide("backward")
    training.step(0)
    saved = copy.deepcopy([training.net.state_dict(), training.opt.state_dict()])
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


def test_a_gradient_that_comes_twice_later_on_is_an_error():
    training = Training("backward")
    training.step(0)
    training.backward(1)

    with pytest.raises(FusionError, match="came twice between two steps"):
        training.backward(2)


def test_a_learning_rate_that_is_set_after_backward_is_an_error():
    training = Training("backward")
    training.step(0)
    training.backward(1)
    training.opt.param_groups[0]["lr"] = 0.5

    with pytest.raises(FusionError, match="changed between"):
        training.opt.step()


def test_a_parameter_is_fused_once():
    training = Training("forward")

    with pytest.raises(FusionError, match=r"first\.weight is already fused with this optimizer"):
        fuse(training.net, training.opt)
    with pytest.raises(FusionError, match="with another optimizer"):
        fuse(training.net, SGD(training.net.parameters()))
    training.fusion.close()
    fuse(training.net, SGD(training.net.parameters())).close()


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_a_model_that_changed_is_named(when):
    training = Training(when)
    training.step(0)
    training.opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    with pytest.raises(FusionError, match=r"call close\(\), change them"):
        training.step(1)


def test_a_closure_is_refused():
    training = Training("forward")
    with pytest.raises(FusionError, match="closure"):
        training.opt.step(lambda: 1.0)


def test_what_is_not_known_is_refused():
    model = Plain()
    with pytest.raises(FusionError, match="LBFGS is not known"):
        fuse(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="backward"):
        fuse(model, SGD(model.parameters()), "sideways")
    with pytest.raises(FusionError, match="no parameter of the model"):
        fuse(model, SGD(Plain().parameters()))
    with pytest.raises(FusionError, match="copies of the modules"):
        fuse(nn.DataParallel(model), SGD(model.parameters()), "forward")
    with pytest.raises(FusionError, match="meta, where the compiler"):
        fuse(model.to("meta"), SGD(model.parameters()))


def test_torch_func_is_told_to_flush_first():
    training = Training("forward")
    training.step(0)
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
def test_a_model_that_is_not_closed_can_be_collected(when):
    training = Training(when)
    training.step(0)
    model = weakref.ref(training.net)
    del training
    gc.collect()
    assert model() is None
