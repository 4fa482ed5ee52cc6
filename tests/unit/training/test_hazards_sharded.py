"""A fused loop of DTensors ends where the optimizer alone ends, to the bit, or is refused."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from graphstash.training import FusionError
from unit.training.hazards import Loop, Net


@pytest.fixture(scope="module", autouse=True)
def group():
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def tensor_parallel():
    last = ColwiseParallel(output_layouts=Replicate())
    parts = {"first": ColwiseParallel(), "second": RowwiseParallel(), "third": last}
    return parallelize_module(Net(), init_device_mesh("cpu", (1,)), parts)


def fully_sharded():
    net = Net()
    for layer in (net.first, net.second, net.third):
        fully_shard(layer)
    return fully_shard(net)


def shards(loop):
    return [each.to_local() for each in loop.net.parameters()]


class Sharded(Loop):
    def run(self, steps=6):
        values = super().run(steps)
        return [getattr(each, "_local_tensor", each) for each in values]


def averages_after(self, step):
    self.see(*(each.full_tensor() for each in (self.net.first.weight, self.net.second.weight)))


def clamps_after(self, step):
    with torch.no_grad():
        for shard in shards(self):
            shard.clamp_(-0.2, 0.2)


class KeepsShards(Sharded):
    kept = ()

    def after_step(self, step):
        with torch.no_grad():
            if step == 1:
                self.kept = shards(self)
            for shard in self.kept:
                shard.mul_(0.9)

    def before_step(self, step):
        self.see(*self.kept)


def decays_before(self, step):
    if step > 1:
        with torch.no_grad():
            for each in self.net.parameters():
                each.mul_(0.9)


def logs_before(self, step):
    if step > 1:
        self.see(self.net.second.weight.full_tensor())


def clips_before(self, step):
    if step > 1:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)


def scales_shards_before(self, step):
    if step > 1:
        self.net.second.weight.grad.to_local().mul_(0.1)


def zeroes_before(self, step):
    if step > 1:
        self.opt.zero_grad()


def keeps_gradients_once(self, step):
    if step != 3:
        self.opt.zero_grad()
    self.loss(step).backward()
    self.opt.step()


def of(method, function):
    return type(function.__name__, (Sharded,), {method: function})


LOOPS = [
    (Sharded, ""),
    (of("after_step", averages_after), ""),
    (of("after_step", clamps_after), ""),
    (KeepsShards, ""),
    (of("before_step", decays_before), "read or written between"),
    (of("before_step", logs_before), "read or written between"),
    (of("before_step", clips_before), "used between"),
    (of("before_step", scales_shards_before), "used between"),
    (of("before_step", zeroes_before), "removed between"),
    (of("step", keeps_gradients_once), "still that of the last step"),
]


@pytest.mark.parametrize(
    ("model", "when"),
    [
        (tensor_parallel, "backward"),
        pytest.param(tensor_parallel, "forward", marks=pytest.mark.extended),
        (fully_sharded, "backward"),
    ],
)
@pytest.mark.parametrize(("loop", "refused"), LOOPS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_fused_loop_of_shards_is_exact_or_refused(loop, refused, model, when):
    loop = type(loop.__name__, (loop,), {"model": staticmethod(model)})
    if refused and when == "backward":
        with pytest.raises(FusionError, match=refused):
            loop(when).run()
        return
    torch.testing.assert_close(loop(when).run(), loop(None).run(), rtol=0.0, atol=0.0)
