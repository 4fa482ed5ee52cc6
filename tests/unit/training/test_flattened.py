"""Operations on whole tensors refuse the flat shards of FullyShardedDataParallel."""

import pytest
import torch
from torch import distributed, nn

from graphstash import ConfigError
from graphstash.training import LAMB, AdamW, LossScale, Muon, clip_grad_norm_
from graphstash.training.loop.parallel import DistributedTorch
from support.processes import python

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(params=[False, True], ids=["flat", "views"])
def model(request):
    """A model of the first of two processes. No message is sent."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        torch.manual_seed(0)
        yield FullyShardedDataParallel(
            nn.Linear(4, 4), use_orig_params=request.param, device_id=torch.device("cpu")
        )
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "remedy"), [(LAMB, r"fully_shard\(\), or use AdamW"), (Muon, "use_muon=False")]
)
def test_optimizers_that_need_whole_parameters_refuse_flat_shards(model, make, remedy):
    with pytest.raises(ValueError, match=remedy):
        make(model.parameters())


def test_a_loss_scale_refuses_to_decide_from_one_shard(model):
    optimizer, scale = AdamW(model.parameters()), LossScale()
    scale.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(ValueError, match=r"fully_shard\(\), or train in bf16"):
        scale.step(optimizer)
    with pytest.raises(ValueError, match=r"fully_shard\(\), or train in bf16"):
        scale.unscale_(optimizer)


def test_training_loop_refuses_flat_shards(model):
    with pytest.raises(ConfigError, match=r"shard it with fully_shard\(\)"):
        DistributedTorch(torch.device("cpu")).wrap(model)


def test_clipping_refuses_the_norm_of_one_shard(model):
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"clip_grad_norm_\(\) of the wrapped model"):
        clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.extended
def test_a_loop_that_shards_nothing_does_not_import_fsdp():
    """The import adds half the time of the import of torch."""
    program = "import sys; from graphstash.training import fuse, train; print(*sys.modules)"
    imported = python(program, check=True).stdout.split()
    assert "graphstash.training.fusion.backward" in imported
    assert "graphstash.training.loop.parallel" in imported
    assert {"torch.distributed.fsdp", "torch._dynamo", "sympy"}.isdisjoint(imported)
