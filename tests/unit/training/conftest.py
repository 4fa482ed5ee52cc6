"""Promise: each part of training equals its reference to the bit, or is refused with the cause.

Optimizers, loss scales and clipping equal torch's or a public implementation's. Fused and traced
steps end where the plain loop ends. Data and random numbers resume at their position. The protocol
of aggregators gives exact sums on a network with any faults.
"""

import pytest

from graphstash.training.fusion import partial_step


@pytest.fixture(autouse=True)
def every_parameter_is_fused():
    """Fuse even the smallest parameters, which fusion otherwise leaves to `step`."""
    with pytest.MonkeyPatch.context() as patch:  # a test may undo its own monkeypatch
        patch.setattr(partial_step, "_UNIT_BYTES", 0)
        yield
