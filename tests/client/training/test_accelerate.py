"""Accelerate's loop, wrapper, scaler and checkpoints with graphstash's optimizers."""

import math

import pytest
import torch

from graphstash import training
from support.device_reads import Reads
from support.frameworks import Regression, batches, framework, is_same, states

STEPS = 6


@pytest.fixture(scope="module")
def accelerate():
    return framework("accelerate")


@pytest.fixture(autouse=True)
def _new_state(accelerate):
    """Reset the settings of an Accelerator, which Accelerate stores in the process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Loop:
    """The loop of Accelerate's documentation."""

    def __init__(
        self, accelerate, make=None, *, precision="no", accumulate=1, clip=None, when=None
    ):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
        )
        self.clip = clip
        model = Regression()
        make = make or (lambda model: training.AdamW(model.parameters(), lr=0.01))
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )
        self.fusion = when and training.fuse(self.model, self.optimizer, when)
        self.seen = 0

    def run(self, steps):
        losses = []
        for x in batches(self.seen + steps)[self.seen :]:
            with self.accelerator.accumulate(self.model):
                self.optimizer.zero_grad()
                output = self.model(x)
                loss = (output - x.sum(1, keepdim=True)).square().mean()
                self.accelerator.backward(loss)
                if self.clip and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
            losses.append(loss.detach())
        self.seen += steps
        return losses

    def states(self):
        return states(self.model, self.optimizer)


SETTINGS = {
    "plain": {},
    "clipped": {"clip": 0.5},
    "accumulated and clipped in bf16": {"accumulate": 2, "clip": 0.5, "precision": "bf16"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_losses_equal_torchs_adamw_and_a_fused_forward_ends_at_the_same_bits(accelerate, settings):
    ours = Loop(accelerate, **settings)
    losses = ours.run(STEPS)
    torchs = Loop(
        accelerate, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01), **settings
    )
    torch.testing.assert_close(losses, torchs.run(STEPS), rtol=1e-5, atol=1e-6)
    assert len(set(map(float, losses))) == STEPS
    rates = [loop.optimizer.param_groups[0]["lr"] for loop in (ours, torchs)]
    assert rates[0] == rates[1] < 0.01

    fused = Loop(accelerate, when="forward", **settings)
    assert is_same(fused.run(STEPS), losses)
    assert len(fused.fusion._waiting) == 6
    assert is_same(fused.states(), ours.states())


@pytest.mark.parametrize("when", ["backward", "forward"])
def test_loaded_state_resumes_to_the_same_bits(accelerate, when, tmp_path):
    whole = Loop(accelerate, when=when)
    whole.run(3)
    whole.accelerator.save_state(tmp_path / "state")
    losses = whole.run(3)

    resumed = Loop(accelerate, when=when)
    resumed.accelerator.load_state(tmp_path / "state")
    resumed.seen = 3
    assert is_same(resumed.run(3), losses)
    assert is_same(resumed.states(), whole.states())


def test_a_fused_backward_ends_at_the_same_bits_or_is_refused(accelerate):
    alone, fused = Loop(accelerate), Loop(accelerate, when="backward")
    assert is_same(fused.run(STEPS), alone.run(STEPS))
    assert is_same(fused.states(), alone.states())
    for settings in ({"clip": 0.5}, {"accumulate": 2}):
        loop = Loop(accelerate, when="backward", **settings)
        with pytest.raises(training.FusionError, match='use when="forward"'):
            loop.run(STEPS)


def test_no_step_reads_the_device(accelerate):
    loop = Loop(accelerate, precision="bf16", accumulate=2, clip=0.5, when="forward")
    loop.run(2)
    with Reads() as reads:
        loop.run(STEPS)
    assert reads.count == 0


class Scaled:
    """Accelerate's optimizer wrapper with a scaler, which an Accelerator on a CPU lacks."""

    def __init__(self, accelerate, make, when=None):
        accelerate.Accelerator(cpu=True)
        self.model = Regression()
        inner = make(self.model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        wrapper = accelerate.optimizer.AcceleratedOptimizer
        self.optimizer = wrapper(inner, scaler=self.scaler)
        self.schedule = accelerate.scheduler.AcceleratedScheduler(schedule, self.optimizer)
        self.fusion = when and training.fuse(self.model, self.optimizer, when)

    def run(self):
        skipped = []
        for number, x in enumerate(batches(STEPS)):
            self.optimizer.zero_grad()
            loss = self.scaler.scale(self.model.loss(x))
            (loss * (math.inf if number in (1, 4) else 1.0)).backward()
            self.optimizer.step()
            self.schedule.step()
            skipped.append(self.optimizer.step_was_skipped)
        return skipped


def unfused(*args, **options):
    return torch.optim.AdamW(*args, **options)


def fused_of_torch(*args, **options):
    return torch.optim.AdamW(*args, fused=True, **options)


def without_amp_scaling(*args, **options):
    return training.AdamW(*args, amp_scaling=False, **options)


@pytest.mark.parametrize(
    ("ours", "theirs", "seen", "when"),
    [
        (training.AdamW, fused_of_torch, False, "forward"),
        (without_amp_scaling, unfused, True, None),
    ],
    ids=["on the device", "on the host"],
)
def test_steps_that_overflow_are_skipped_as_torchs_are(accelerate, ours, theirs, seen, when):
    loop, reference = Scaled(accelerate, ours, when), Scaled(accelerate, theirs)
    with Reads() as reads:
        skipped = loop.run()
    assert reads.count == (STEPS if seen else 0)
    assert skipped == reference.run()
    assert skipped == [seen and number in (1, 4) for number in range(STEPS)]
    torch.testing.assert_close(
        states(loop.model, loop.optimizer)[0], states(reference.model, reference.optimizer)[0]
    )
    assert loop.scaler.get_scale() == reference.scaler.get_scale()
    assert loop.schedule.get_last_lr() == reference.schedule.get_last_lr()
