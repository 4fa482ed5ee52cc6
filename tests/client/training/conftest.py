"""Promise: training in whole jobs and in other loops equals the plain loop, or is refused.

Several processes reduce, shard and fuse to the same bits. A killed or stopped run resumes to the
same losses. Accelerate, Lightning, Hugging Face's Trainer and torchtitan's loop run the optimizers
and the fusion. A step on torch_xla is one graph, and the host reads results only at boundaries.
"""

from contextlib import ExitStack
from functools import cache

import pytest

from graphstash.training.fusion import partial_step
from support.warm_ranks import WarmRanks


@pytest.fixture(autouse=True)
def every_parameter_is_fused():
    """Fuse even the smallest parameters, which fusion otherwise leaves to `step`."""
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own monkeypatch
        patch.setattr(partial_step, "_UNIT_BYTES", 0)
        yield


@pytest.fixture(scope="session")
def ranks(jobs, tmp_path_factory):
    """Return a function that gives a number of torch.distributed processes, shared by all tests."""
    with ExitStack() as stack:

        def started(world):
            return stack.enter_context(WarmRanks(jobs, tmp_path_factory.mktemp("ranks"), world))

        yield cache(started)
