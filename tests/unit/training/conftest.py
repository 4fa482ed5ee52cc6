"""The parts of training, each beside its reference: equal to the bit, or refused with the cause.

Optimizers, loss scales and clipping go as torch's or a public implementation's; fused and traced
steps end where the plain loop ends; data and random numbers go on where they stood; the protocol of
aggregators gives exact sums on a network with any faults.
"""

import pytest

from graphstash.training.fusion import partial_step


@pytest.fixture(autouse=True)
def every_parameter_is_fused():
    """The models here are so small that all of their parameters would be left to `step`."""
    with pytest.MonkeyPatch.context() as patch:  # not the test's own, which it may undo
        patch.setattr(partial_step, "_UNIT_BYTES", 0)
        yield
