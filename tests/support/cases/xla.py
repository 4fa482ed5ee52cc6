"""What torch_xla has done so far, by its own metrics."""

import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics

__all__ = ["counts"]


def counts(*names: str) -> list[int]:
    """Return how often each event was counted, when the device is idle."""
    xm.wait_device_ops()  # an execution is counted when it is over
    return [_count(name) for name in names]


def _count(name: str) -> int:
    data = xla_metrics.metric_data(name)
    return int(data[0]) if data else xla_metrics.counter_value(name) or 0
