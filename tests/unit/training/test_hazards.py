"""A fused loop ends where the optimizer alone ends, to the bit, or it is refused."""

import pytest
import torch

from graphstash.training import FusionError
from unit.training import hazards


@pytest.mark.parametrize("when", ["backward", "forward"])
@pytest.mark.parametrize("hazard", hazards.HAZARDS, ids=lambda hazard: hazard.name)
def test_a_fused_loop_is_exact_or_refused_with_the_cause(hazard, when):
    alone = hazard.loop(None).run()

    if (cause := hazard.refused.get(when)) is not None:
        with pytest.raises(FusionError, match=cause):
            hazard.loop(when).run()
        return
    torch.testing.assert_close(hazard.loop(when).run(), alone, rtol=0.0, atol=0.0)


def test_a_write_that_torch_does_not_announce_is_refused():
    loop = hazards.Loop("forward")
    for step in range(3):
        loop.step(step)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        loop.net.second.weight.zero_()

    with pytest.raises(FusionError, match=r"second\.weight was written after step\(\)"):
        loop.net(torch.ones(1, hazards.WIDTH))
