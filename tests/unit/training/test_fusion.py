"""Uses that fusion refuses, and the state that it leaves. test_hazards.py compares whole loops."""

import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphstash.training import SGD, AdamW, FusionError, fuse, traced_step
from graphstash.training.fusion import partial_step
from support.run_case import RUN_CASE, case_arguments
from unit.training.hazards import WIDTH, Loop, Net, only_parts_are_called

both = pytest.mark.parametrize("when", ["backward", "forward"])


def values(net):
    return [parameter.detach().clone() for parameter in net.parameters()]


def alone_after(steps):
    """Return the parameters after these steps of the optimizer alone."""
    loop = Loop(None)
    for step in steps:
        loop.step(step)
    return values(loop.net)


def assert_same(alone, fused):
    torch.testing.assert_close(alone, fused, rtol=0.0, atol=0.0)


def fail_backward_at(training, name):
    training.opt.zero_grad()
    handle = getattr(training.net, name).register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training.backward(1)
    handle.remove()


def many_layers(count, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


class Compiled(Loop):
    def before_fuse(self):
        self.net = torch.compile(self.net, backend="aot_eager")


class CompiledInPlace(Loop):
    def before_fuse(self):
        self.net.compile(backend="aot_eager")


class CompiledInPart(Loop):
    def before_fuse(self):
        self.net.second = torch.compile(self.net.second, backend="aot_eager")


class CompiledLoss(Loop):
    def before_fuse(self):
        self.compiled = torch.compile(lambda x, y: mse_loss(self.net(x), y), backend="aot_eager")

    def loss(self, step):
        return self.compiled(*self.batch(step))


COMPILED = [Compiled, CompiledInPlace, CompiledInPart]


@pytest.mark.parametrize(
    ("case", "when"),
    [*((case, "backward") for case in [*COMPILED, CompiledLoss]), (CompiledLoss, "forward")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_fused_compiled_model_trains_as_with_optimizer_alone(case, when):
    assert_same(case(None).run(5), case(when).run(5))


@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.__name__)
def test_a_compiled_model_is_not_fused_with_its_forward(case):
    with pytest.raises(FusionError, match=r"compiled by torch\.compile.*use when=\"backward\""):
        case("forward")


@pytest.mark.extended
def test_updates_wait_for_the_next_forward_on_the_newest_torch(jobs, tmp_path):
    call = case_arguments("fused_step:in_next_forward")
    options = {"script": RUN_CASE, "environment": "torch-newest", "under": "python"}
    report = jobs.start(tmp_path, *call, **options).finish().report
    assert report["torch"].startswith("2.15")
    assert (report["waiting"], report["unnoticed"]) == ([0, 4, 4, 4], [])
    assert report["fused"] == report["alone"]


@pytest.mark.extended
def test_fusion_accepts_each_way_to_set_a_precision_on_the_newest_torch(jobs, tmp_path):
    call = case_arguments("fused_step:at_precisions")
    options = {"script": RUN_CASE, "environment": "torch-newest", "under": "python"}
    report = jobs.start(tmp_path, *call, **options).finish().report
    of_way = {"common": "tf32 tf32", "generic": "tf32 tf32"}
    of_way |= {"cuda": "tf32 none", "mkldnn": "none tf32"}
    assert report == {
        f"{way} {when}": kept for way, kept in of_way.items() for when in ("backward", "forward")
    }


@both
def test_traced_step_does_not_use_fusion(when):
    training = Loop(when)
    traced = traced_step(training.step, [training.net, training.opt])
    traced(0)

    with pytest.raises(FusionError, match=r"first\.weight is fused .* call close\(\)"):
        traced(1)


class KeepsGradients(Loop):
    """A loop that zeroes gradients, so that momentum still moves unused parameters."""

    def step(self, step):
        self.opt.zero_grad(set_to_none=False)
        self.backward(step)
        self.opt.step()


class NeverZeroes(Loop):
    def step(self, step):
        self.backward(step)
        self.opt.step()


class StepsAgain(Loop):
    def step(self, step):
        if step == 0:
            self.loss(0)  # forward fusion inspects one forward before the first step
            super().step(0)
        else:
            self.opt.step()


@both
@pytest.mark.parametrize("case", [KeepsGradients, NeverZeroes, StepsAgain])
def test_gradients_that_a_step_keeps_are_refused_in_the_next(case, when):
    loop = case(when)
    loop.step(0)
    before = values(loop.net)

    with pytest.raises(FusionError, match=r"still that of the last step.* call zero_grad\(\)"):
        loop.step(1)

    assert all(map(torch.equal, before, loop.net.parameters()))


def unsaved(training):
    """Leave the loop after a backward without a step."""
    training.step(0)
    training.opt.zero_grad()
    training.backward(1)
    return training


@pytest.mark.parametrize("part", ["net", "opt"])
def test_state_is_not_saved_between_backward_and_step(part):
    training = unsaved(Loop("backward"))
    save = getattr(training, part).state_dict

    with pytest.raises(FusionError, match=r"6 of 6 parameters .* save after step\(\)"):
        save()
    training.opt.step()
    save()


@pytest.mark.parametrize("call", [lambda net: net, lambda net: net.first], ids=["whole", "part"])
def test_the_model_is_not_called_between_backward_and_step(call):
    training = only_parts_are_called("backward")
    training.step(0)
    called = call(training.net)
    training.opt.zero_grad()
    training.backward(1)

    with pytest.raises(
        FusionError, match=r"\(accumulation, evaluation\), when 6 of 6 .* call it after step\(\)"
    ):
        called(torch.ones(4, WIDTH))
    training.opt.step()
    called(torch.ones(4, WIDTH))


def test_closing_between_backward_and_step_is_reported_and_step_is_exact():
    training = unsaved(Loop("backward"))
    with pytest.raises(FusionError, match=r"has updated 6 of 6 parameters, and no step\(\)"):
        training.fusion.close()
    training.opt.step()
    training.step(2)
    assert_same(alone_after(range(3)), values(training.net))


@both
def test_parameter_of_two_optimizers_is_refused_before_the_second_changes_it(when):
    training = Loop(when)
    other = torch.optim.SGD(training.net.third.parameters(), lr=0.1)
    elsewhere = torch.optim.SGD(Net().parameters(), lr=0.1)
    training.step(0)
    before = values(training.net)

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


@both
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changing_fused_parameters_is_refused_until_close(change, when):
    training = Loop(when)
    training.step(0)

    with pytest.raises(FusionError, match=r"second\.weight, which is fused .* call close\(\)"):
        change(training.net)

    training.fusion.close()
    change(training.net)


@both
def test_a_model_may_get_other_modules_and_keep_its_own(when):
    training = Loop(when)
    training.step(0)
    training.net.added = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    training.net.second = training.net.second
    training.net.second.weight = training.net.second.weight
    training.step(1)
    training.fusion.close()


def test_partially_failed_update_is_not_used_until_a_checkpoint_is_loaded(monkeypatch):
    training = Loop("forward")
    for step in range(3):
        training.step(step)
    saved = copy.deepcopy([training.net.state_dict(), training.opt.state_dict()])
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

    for use in (
        *(training.opt.step, training.opt.state_dict, training.net.state_dict),
        *(training.fusion.flush, lambda: training.net(torch.ones(4, WIDTH))),
    ):
        with pytest.raises(FusionError, match=r"an update failed in the middle.* last checkpoint"):
            use()
    training.net.load_state_dict(saved[0])
    training.opt.load_state_dict(saved[1])
    training.step(3)
    training.fusion.close()
    assert_same(alone_after(range(4)), values(training.net))


@pytest.mark.parametrize("kinds", [("backward", "forward"), ("forward", "backward")])
def test_run_can_switch_between_forward_and_backward_fusion(kinds):
    first, second = kinds
    training = Loop(first)
    for step in range(4):
        training.step(step)
    rest = Loop(second)
    rest.net.load_state_dict(training.net.state_dict())
    rest.opt.load_state_dict(training.opt.state_dict())
    for step in range(4, 8):
        rest.step(step)
    rest.fusion.close()
    assert_same(alone_after(range(8)), values(rest.net))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_that_is_compiled_later_is_not_fused_with_its_forward(steps):
    """Trainer and Accelerate compile the model that the user passes."""
    training = Loop("forward")
    for step in range(steps):
        training.step(step)
    training.fusion.flush()
    before = values(training.net)
    training.net = torch.compile(training.net, backend="aot_eager")

    with pytest.raises(FusionError, match=r"compiled by torch\.compile"):
        training.step(steps)

    assert all(map(torch.equal, before, training.net.parameters()))


class Large(Loop):
    """A model of 24 layers, each as large as a unit."""

    model = partial(many_layers, 24, 128)

    def loss(self, step):
        generator = torch.Generator().manual_seed(step)
        return self.net(torch.randn(2, 128, generator=generator)).square().mean()


def peak_bytes(case, when):
    """Return the peak bytes of tensors from a model's construction through its third step."""
    # Collect the objects of earlier tests now, because their deletion would be counted.
    gc.collect()
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
    [(partial(SGD, lr=0.1, momentum=0.9), 2), (partial(AdamW, lr=0.05), 3)],
    ids=["SGD", "AdamW"],
)
def test_backward_fusion_keeps_parameters_and_state_and_next_to_no_gradients(
    make, kept, monkeypatch
):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 4 * 128**2)
    case = type("Case", (Large,), {"optimizer": make})
    size = 4 * 24 * 128 * 129

    assert kept + 0.98 <= peak_bytes(case, None) / size <= kept + 1.2
    assert kept - 0.02 <= peak_bytes(case, "backward") / size <= kept + 0.2


def test_small_parameters_are_left_to_the_step(monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 1024**2)
    training = Loop("backward")
    training.step(0)
    fail_backward_at(training, "second")
    training.net.state_dict()  # a backward that failed halfway has updated nothing
    for step in (2, 3):
        training.step(step)
        assert all(each.grad is not None for each in training.net.parameters())


def test_parameters_updated_by_failed_backward_are_not_used_until_a_checkpoint_is_loaded():
    training = Loop("backward")
    training.step(0)
    saved = copy.deepcopy([training.net.state_dict(), training.opt.state_dict()])
    fail_backward_at(training, "second")
    for use in (
        *(training.opt.step, training.opt.state_dict),
        *(training.net.state_dict, training.fusion.flush),
    ):
        with pytest.raises(FusionError, match="a backward failed after 2 of 6 parameters"):
            use()
    training.net.load_state_dict(saved[0])
    training.opt.load_state_dict(saved[1])
    training.step(1)
    training.fusion.close()
    assert_same(alone_after(range(2)), values(training.net))


class Handover:
    """The lock of updates. When backward releases it, a bucket's update has it before backward
    goes on.
    """

    def __init__(self, fusion):
        self.fusion, self.lock = fusion, threading.Lock()
        self.guard_state, self.is_guarded = fusion._guard_state, threading.Event()
        self.state = None

    def guard(self):
        self.guard_state()
        self.is_guarded.set()

    def update_bucket(self, entered):
        with self.lock, self.fusion._true_state():
            entered.set()
            assert self.is_guarded.wait(60)
            return dict(self.fusion.optimizer.state)

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        if self.state is None:
            entered, pool = threading.Event(), ThreadPoolExecutor()
            self.state = pool.submit(self.update_bucket, entered)
            pool.shutdown(wait=False)
            assert entered.wait(60)


def test_update_that_ends_lets_the_next_one_use_the_state(monkeypatch):
    training = Loop("backward")
    training.step(0)
    handover = Handover(training.fusion)
    monkeypatch.setattr(training.fusion, "_guard_state", handover.guard)
    monkeypatch.setattr(training.fusion, "_updating", handover)
    training.step(1)
    assert handover.state.result()
    training.fusion.close()
    assert_same(alone_after(range(2)), values(training.net))


def test_fusion_cannot_be_closed_without_notice_after_a_failed_backward():
    training = Loop("backward")
    training.step(0)
    fail_backward_at(training, "second")
    with pytest.raises(FusionError, match="a backward failed after 2 of 6 parameters"):
        training.fusion.close()


def trained_gan(*, fused, freezes, first="generator"):
    """Train a GAN, and return the parameters of both models."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    models = {"generator": generator, "discriminator": discriminator}
    optimizers = {name: SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    if fused:
        for name, model in models.items():
            fuse(model, optimizers[name], "backward")
    for name in sorted(models, key=lambda name: name != first) * 4:
        made = generator(torch.randn(5, 4))
        optimizers[name].zero_grad()
        if name == "generator":
            discriminator.requires_grad_(not freezes)
            loss = -discriminator(made).mean()
        else:
            loss = discriminator(made.detach()).mean() - discriminator(torch.randn(5, 8)).mean()
        loss.backward()
        optimizers[name].step()
        discriminator.requires_grad_(True)
    return values(generator) + values(discriminator)


def test_unfrozen_discriminator_is_named_as_the_cause_of_second_gradients():
    with pytest.raises(FusionError, match=r"GAN's generator.*requires_grad_\(False\)"):
        trained_gan(fused=True, freezes=False)


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_discriminator_that_its_generator_freezes_trains_as_without_fusion(first):
    settings = {"freezes": True, "first": first}
    assert_same(trained_gan(fused=False, **settings), trained_gan(fused=True, **settings))


def test_parameter_cannot_be_fused_twice():
    training = Loop("forward")

    with pytest.raises(FusionError, match=r"first\.weight is already fused with this optimizer"):
        fuse(training.net, training.opt)
    with pytest.raises(FusionError, match="with another optimizer"):
        fuse(training.net, SGD(training.net.parameters()))
    training.fusion.close()
    fuse(training.net, SGD(training.net.parameters())).close()


@both
def test_parameters_that_share_memory_are_refused(when):
    model = Net()
    model.third.weight = nn.Parameter(model.first.weight.data)

    with pytest.raises(FusionError, match=r"first\.weight, third\.weight share memory.* one param"):
        fuse(model, SGD(model.parameters()), when)


def test_unknown_optimizer_mode_or_parameter_is_refused():
    model = Net()
    with pytest.raises(FusionError, match="LBFGS is not known"):
        fuse(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="backward"):
        fuse(model, SGD(model.parameters()), "sideways")
    with pytest.raises(FusionError, match="no parameter of the model"):
        fuse(model, SGD(Net().parameters()))
    for when in ("backward", "forward"):
        with pytest.raises(FusionError, match="copies of the modules"):
            fuse(nn.DataParallel(model), SGD(model.parameters()), when)
    with pytest.raises(FusionError, match=r"first\.weight is on meta and has no values yet"):
        fuse(model.to("meta"), SGD(model.parameters()))


def test_torch_func_before_flush_is_refused_naming_flush():
    training = Loop("forward")
    training.step(0)
    training.step(1)
    parameters = dict(training.net.named_parameters())
    x = torch.ones(4, WIDTH)

    def loss(parameters):
        return torch.func.functional_call(training.net, parameters, (x,)).sum()

    with pytest.raises(FusionError, match=r"call flush\(\)"):
        torch.func.grad(loss)(parameters)
    training.fusion.flush()
    assert torch.func.grad(loss)(parameters).keys() == parameters.keys()


def test_a_copy_of_a_fused_model_is_not_fused(tmp_path):
    training = Loop("forward")
    training.step(0)
    training.fusion.flush()
    copied = copy.deepcopy(training.net)
    torch.save(training.net, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    training.step(1)
    for other in (copied, loaded):
        before = [parameter.clone() for parameter in other.parameters()]
        other(torch.ones(4, WIDTH))
        assert all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
@both
def test_a_model_is_not_copied_while_updates_are_missing(when, copied):
    training = Loop(when)
    for step in range(3):
        training.step(step)
    if when == "backward":
        training.opt.zero_grad()
        training.backward(3)

    remedy = {"backward": r"save after step\(\)", "forward": r"call flush\(\)"}
    with pytest.raises(FusionError, match=remedy[when]):
        copied(training.net)


@both
def test_a_closed_fusion_leaves_an_optimizer_that_works(when):
    training = Loop(when)
    for step in range(4):
        training.step(step)
    training.fusion.close()
    for step in range(4, 8):
        training.step(step)
    assert_same(alone_after(range(8)), values(training.net))


@both
def test_unclosed_fused_model_is_garbage_collected(when):
    training = Loop(when)
    training.step(0)
    model = weakref.ref(training.net)
    del training
    gc.collect()
    assert model() is None


def test_fusion_collected_during_a_step_of_another_optimizer_does_not_end_the_step():
    loop = Loop("forward")
    loop.step(0)
    other = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)

    def collect(*_):
        gc.collect()

    collects = register_optimizer_step_pre_hook(collect)
    gc.disable()
    try:
        del loop
        other.step()
    finally:
        gc.enable()
        collects.remove()
