"""A loop like torchtitan's: model parts with an optimizer each, and distributed checkpoints."""

import pytest
import torch
from torch import nn

from graphstash import training
from support.deferred import Deferred
from support.frameworks import Regression, batches, is_same

STEPS = 6

distributed_checkpoint = Deferred("support.distributed_checkpoint")


class Loop:
    def __init__(self, make, when=None):
        model = Regression()
        self.parts = [
            nn.Sequential(model.first, nn.Tanh(), model.second, nn.Tanh()),
            nn.Sequential(model.third, nn.Tanh()),
        ]
        self.optimizers = [make(part) for part in self.parts]
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
            for optimizer in self.optimizers
        ]
        self.when = when
        self.fusions = [
            training.fuse(part, optimizer, when)
            for part, optimizer in zip(self.parts, self.optimizers, strict=True)
            if when is not None
        ]

    def run(self, first, last):
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        losses = []
        for x in batches(last)[first:]:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for micro_batch in [x] if self.when == "backward" else x.chunk(2):
                output = micro_batch
                for part in self.parts:
                    output = part(output)
                loss = (output - micro_batch.sum(1, keepdim=True)).square().mean()
                loss.backward()
            if self.when != "backward":
                norm = nn.utils.get_total_norm([each.grad for each in parameters], foreach=True)
                nn.utils.clip_grads_with_norm_(parameters, 0.5, norm, foreach=True)
            for each in (*self.optimizers, *self.schedules):
                each.step()
            losses.append(loss.detach())
        return losses

    def state(self):
        """Return the contents of a checkpoint: all parts, and one state for their optimizers."""
        return nn.ModuleList(self.parts), self.optimizers

    def ends(self):
        return [each.state_dict() for each in (*self.parts, *self.optimizers)]


def adamw(part):
    return training.AdamW(part.parameters(), lr=0.01)


def muon(part):
    return training.Muon(training.muon_groups(part, adamw=[], lr=0.01), lr=0.01)


def torchs(part):
    return torch.optim.AdamW(part.parameters(), lr=0.01)


def test_losses_equal_torchs_adamw_and_a_fused_forward_ends_at_the_same_bits():
    ours, theirs, fused = Loop(adamw), Loop(torchs), Loop(adamw, "forward")
    losses = ours.run(0, STEPS)
    torch.testing.assert_close(losses, theirs.run(0, STEPS), rtol=1e-5, atol=1e-6)
    rates = [loop.optimizers[0].param_groups[0]["lr"] for loop in (ours, theirs)]
    assert rates[0] == rates[1] == pytest.approx(0.01 * 0.8**STEPS)
    assert is_same(fused.run(0, STEPS), losses)
    assert [len(fusion._waiting) for fusion in fused.fusions] == [4, 2]
    assert is_same(fused.ends(), ours.ends())


@pytest.mark.parametrize(("make", "when"), [(muon, None), (adamw, "forward"), (muon, "backward")])
def test_a_distributed_checkpoint_resumes_to_the_same_bits(make, when, tmp_path):
    whole = Loop(make, when)
    whole.run(0, 3)
    distributed_checkpoint.save(*whole.state(), tmp_path, is_flat=True)
    schedules = [each.state_dict() for each in whole.schedules]
    losses = whole.run(3, STEPS)

    resumed = Loop(make, when)
    distributed_checkpoint.load(*resumed.state(), tmp_path, is_flat=True)
    for schedule, state in zip(resumed.schedules, schedules, strict=True):
        schedule.load_state_dict(state)
    assert is_same(resumed.run(3, STEPS), losses)
    assert is_same(resumed.ends(), whole.ends())


@pytest.mark.parametrize(("old", "new"), [(torchs, adamw), (adamw, torchs)], ids=["from", "to"])
def test_distributed_checkpoint_is_exchanged_with_torchs_adamw(old, new, tmp_path):
    """Options that only one of the two optimizers has do not change."""
    before, after = Loop(old), Loop(new)
    before.run(0, 3)
    distributed_checkpoint.save(*before.state(), tmp_path, is_flat=True)
    distributed_checkpoint.load(*after.state(), tmp_path, is_flat=True, is_partial=True)
    for mine, its in zip(before.schedules, after.schedules, strict=True):
        its.load_state_dict(mine.state_dict())
    for a, b in zip(before.optimizers, after.optimizers, strict=True):
        assert is_same(a.state_dict()["state"], b.state_dict()["state"])
    torch.testing.assert_close(after.run(3, STEPS), before.run(3, STEPS), rtol=1e-5, atol=1e-6)
