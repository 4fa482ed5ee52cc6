"""A loop as torchtitan's: model parts with an optimizer each, and distributed checkpoints."""

import pytest
import torch
from torch import nn

from graphstash import training
from support.deferred import Deferred
from support.frameworks import Regression, batches, is_same

STEPS = 6

dcp = Deferred("torch.distributed.checkpoint")
state_dict = Deferred("torch.distributed.checkpoint.state_dict")

# Of one process, and of what torch itself deprecates when it writes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


class Parts:
    """The state of all model parts."""

    def __init__(self, parts):
        self.parts = parts

    def state_dict(self):
        return {
            k: v for part in self.parts for k, v in state_dict.get_model_state_dict(part).items()
        }

    def load_state_dict(self, state):
        for part in self.parts:
            options = state_dict.StateDictOptions(strict=False)
            state_dict.set_model_state_dict(part, state, options=options)


class Optimizers:
    """An optimizer for each part, with one state for all; each entry has a parameter's name."""

    def __init__(self, parts, make):
        self.parts = parts
        self.flat = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
        self.optimizers = [make(part) for part in parts]

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self):
        pairs = zip(self.parts, self.optimizers, strict=True)
        states = [state_dict.get_optimizer_state_dict(*pair, options=self.flat) for pair in pairs]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state):
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            state_dict.set_optimizer_state_dict(
                part, optimizer, optim_state_dict=state, options=self.flat
            )


class Schedules:
    def __init__(self, optimizers):
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
            for optimizer in optimizers
        ]

    def step(self):
        for schedule in self.schedules:
            schedule.step()

    def state_dict(self):
        return self.schedules[0].state_dict()

    def load_state_dict(self, state):
        for schedule in self.schedules:
            schedule.load_state_dict(state)


class Loop:
    def __init__(self, make, when=None):
        model = Regression()
        self.parts = [Part(first=model.first, second=model.second), Part(third=model.third)]
        self.optimizers = Optimizers(self.parts, make)
        self.schedules = Schedules(self.optimizers.optimizers)
        self.when = when
        self.fusions = [
            training.fuse(part, optimizer, when)
            for part, optimizer in zip(self.parts, self.optimizers.optimizers, strict=True)
            if when is not None
        ]

    def run(self, first, last):
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        losses = []
        for x in batches(last)[first:]:
            self.optimizers.zero_grad()
            for micro_batch in [x] if self.when == "backward" else x.chunk(2):
                output = micro_batch
                for part in self.parts:
                    output = part(output)
                loss = (output - micro_batch.sum(1, keepdim=True)).square().mean()
                loss.backward()
            if self.when != "backward":
                norm = nn.utils.get_total_norm([each.grad for each in parameters], foreach=True)
                nn.utils.clip_grads_with_norm_(parameters, 0.5, norm, foreach=True)
            self.optimizers.step()
            self.schedules.step()
            losses.append(loss.detach())
        return losses

    def state(self):
        return {
            "model": Parts(self.parts),
            "optimizer": self.optimizers,
            "lr_scheduler": self.schedules,
        }


class Part(nn.Module):
    """Some layers, whose parameters have other names than those of other parts."""

    def __init__(self, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def adamw(part):
    return training.AdamW(part.parameters(), lr=0.01)


def muon(part):
    return training.Muon(training.muon_groups(part, adamw=[], lr=0.01), lr=0.01)


def torchs(part):
    return torch.optim.AdamW(part.parameters(), lr=0.01)


def ends(loop):
    return [loop.state()[name].state_dict() for name in ("model", "optimizer")]


def test_losses_equal_torchs_adamw_and_a_fused_forward_ends_at_the_same_bits():
    ours, theirs, fused = Loop(adamw), Loop(torchs), Loop(adamw, "forward")
    losses = ours.run(0, STEPS)
    torch.testing.assert_close(losses, theirs.run(0, STEPS), rtol=1e-5, atol=1e-6)
    rates = [loop.optimizers.optimizers[0].param_groups[0]["lr"] for loop in (ours, theirs)]
    assert rates[0] == rates[1] == pytest.approx(0.01 * 0.8**STEPS)
    assert is_same(fused.run(0, STEPS), losses)
    assert [len(fusion._waiting) for fusion in fused.fusions] == [4, 2]
    assert is_same(ends(fused), ends(ours))


@pytest.mark.parametrize(("make", "when"), [(muon, None), (adamw, "forward"), (muon, "backward")])
def test_a_distributed_checkpoint_resumes_to_the_same_bits(make, when, tmp_path):
    whole = Loop(make, when)
    whole.run(0, 3)
    dcp.save(whole.state(), checkpoint_id=tmp_path, no_dist=True)
    losses = whole.run(3, STEPS)

    resumed = Loop(make, when)
    dcp.load(resumed.state(), checkpoint_id=tmp_path, no_dist=True)
    assert is_same(resumed.run(3, STEPS), losses)
    assert is_same(ends(resumed), ends(whole))


@pytest.mark.parametrize(("old", "new"), [(torchs, adamw), (adamw, torchs)], ids=["from", "to"])
def test_distributed_checkpoint_is_exchanged_with_torchs_adamw(old, new, tmp_path):
    """Options that only one of the two has stay as they are."""
    before, after = Loop(old), Loop(new)
    before.run(0, 3)
    dcp.save(before.state(), checkpoint_id=tmp_path, no_dist=True)
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(after.state(), checkpoint_id=tmp_path, planner=partial, no_dist=True)
    pairs = zip(before.optimizers.optimizers, after.optimizers.optimizers, strict=True)
    for a, b in pairs:
        assert is_same(a.state_dict()["state"], b.state_dict()["state"])
    torch.testing.assert_close(after.run(3, STEPS), before.run(3, STEPS), rtol=1e-5, atol=1e-6)
