"""A fused loop ends where the optimizer alone ends, to the bit, or is refused."""

import functools

import pytest
import torch

from graphstash.training import FusionError, fuse
from graphstash.training.fusion import partial_step
from unit.training.hazards import HAZARDS, WIDTH, Loop, Net, clip

LOOPS = {hazard.name: hazard.loop for hazard in HAZARDS}
FUSED = [(hazard, when) for hazard in HAZARDS for when in ("backward", "forward")]
IN_TURN = FUSED[::4] + FUSED[3::4]
"""Each loop in one of the ways: `make test` runs a loop that is exact in both in one of them."""
EXACT = [
    pytest.param(*each, marks=[] if each in IN_TURN or each[0].refused else pytest.mark.extended)
    for each in FUSED
    if each[1] not in each[0].refused
]
REFUSED = [(hazard, when) for hazard, when in FUSED if when in hazard.refused]


def name_of(given):
    return given if isinstance(given, str) else given.name


@functools.cache
def unfused(loop):
    return loop(None).run()


@pytest.mark.parametrize("unit_bytes", [0, pytest.param(300, marks=pytest.mark.extended)])
@pytest.mark.parametrize(("hazard", "when"), EXACT, ids=name_of)
def test_a_fused_loop_is_exact(hazard, when, unit_bytes, monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", unit_bytes)
    fused = hazard.loop(when).run()
    torch.testing.assert_close(fused, unfused(hazard.loop), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(("hazard", "when"), REFUSED, ids=name_of)
def test_an_inexact_fusion_is_refused_with_the_cause(hazard, when):
    with pytest.raises(FusionError, match=hazard.refused[when]):
        hazard.loop(when).run()


@pytest.mark.parametrize(
    "name",
    [
        *("accumulated", "norm_clipped", "negated", "clipped_in_closure"),
        *("Scaled", "ScaledByTorch", "FusedOfTorchScaled", "ForeachOfTorchScaled"),
        *("ReentrantTied", "RereadInCheckpoint"),
    ],
)
def test_unsupported_backward_fusion_is_refused_before_any_change(name):
    loop = LOOPS[name]("backward")
    before = [parameter.clone() for parameter in loop.net.parameters()]
    with pytest.raises(FusionError, match='when="forward"'):
        loop.step(0)
    assert all(map(torch.equal, before, loop.net.parameters()))


def test_a_write_that_torch_does_not_announce_is_refused():
    loop = Loop("forward")
    for step in range(3):
        loop.step(step)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        loop.net.second.weight.zero_()

    with pytest.raises(FusionError, match=r"second\.weight was written after step\(\)"):
        loop.net(torch.ones(1, WIDTH))


@pytest.mark.parametrize("when", ["backward", "forward"])
@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (lambda: torch.nn.Sequential(torch.nn.LazyLinear(2)), "0.weight is of a lazy module"),
        (lambda: torch.jit.script(Net()), "ScriptModule .* runs without hooks"),
    ],
    ids=["lazy", "scripted"],
)
def test_a_model_without_values_or_hooks_is_refused(model, cause, when):
    made = model()
    with pytest.raises(FusionError, match=cause):
        fuse(made, torch.optim.AdamW(made.parameters()), when)


# Loops whose first step does not reveal that backward is too early. `step` updates the biases.


class ClippingAfterAQuietStep(Loop):
    def before_step(self, step):
        if step > 0:
            clip(self.net.parameters())


class ClippedBiases(Loop):
    def before_step(self, step):
        if step > 0:
            clip([each for each in self.net.parameters() if each.dim() == 1])


class ModuleHook(Loop):
    def hook(self, register):
        getattr(self.net.second, register)(lambda module, *_: self.see(module.weight))


class ModuleHookBeforeFuse(ModuleHook):
    def before_fuse(self):
        self.hook("register_full_backward_hook")


class ModuleHookAfterFuse(ModuleHook):
    def after_fuse(self):
        self.hook("register_full_backward_pre_hook")


class ModuleHookAfterTwoSteps(ModuleHook):
    def after_step(self, step):
        if step == 1:
            self.hook("register_full_backward_hook")


@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (ClippingAfterAQuietStep, r"used between backward\(\) and step\(\) \(clipping"),
        (ClippedBiases, r"3 gradients .* were changed between backward\(\) and step\(\)"),
        (ModuleHookBeforeFuse, "second has a backward hook"),
        (ModuleHookAfterFuse, "second has a backward hook"),
        (ModuleHookAfterTwoSteps, r"second\.weight is read or written between"),
        (Loop, None),
    ],
)
def test_a_loop_with_parameters_left_to_step_is_exact_or_refused(loop, cause, monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 144)
    if cause is None:
        torch.testing.assert_close(loop("backward").run(), loop(None).run(), rtol=0.0, atol=0.0)
        return
    with pytest.raises(FusionError, match=cause):
        loop("backward").run()
