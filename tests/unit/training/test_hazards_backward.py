"""Loops whose first step does not tell that backward is too early: they are refused later."""

import pytest
import torch

from graphstash.training import FusionError
from graphstash.training.fusion import partial_step
from unit.training.hazards import Loop, clip


class ClippingAfterAQuietStep(Loop):
    def before_step(self, step):
        if step > 0:
            clip(self.net.parameters())


class ModuleHook(Loop):
    register = "register_full_backward_hook"

    def hook(self):
        def see(module, *_):
            self.see(module.weight)

        getattr(self.net.second, self.register)(see)


class ModuleHookBeforeFuse(ModuleHook):
    def before_fuse(self):
        self.hook()


class ModuleHookAfterFuse(ModuleHook):
    register = "register_full_backward_pre_hook"

    def after_fuse(self):
        self.hook()


class ModuleHookAfterTwoSteps(ModuleHook):
    def after_step(self, step):
        if step == 1:
            self.hook()


@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (ClippingAfterAQuietStep, r"used between backward\(\) and step\(\) \(clipping"),
        (ModuleHookBeforeFuse, "second has a backward hook"),
        (ModuleHookAfterFuse, "second has a backward hook"),
        (ModuleHookAfterTwoSteps, r"second\.weight is read or written between"),
    ],
)
def test_a_loop_that_backward_fusion_would_change_is_refused(loop, cause, monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 64)  # biases are left to the step

    with pytest.raises(FusionError, match=cause):
        loop("backward").run()


def test_parameters_left_to_step_equal_optimizer_alone(monkeypatch):
    monkeypatch.setattr(partial_step, "_UNIT_BYTES", 64)

    torch.testing.assert_close(Loop("backward").run(), Loop(None).run(), rtol=0.0, atol=0.0)
