import pytest

from graphstash.training.fusion import partial_step


@pytest.fixture(autouse=True)
def every_parameter_is_fused():
    """The models here are so small that all of their parameters would be left to `step`."""
    with pytest.MonkeyPatch.context() as patch:  # not the test's own, which it may undo
        patch.setattr(partial_step, "_UNIT_BYTES", 0)
        yield
