"""Counts of torch_xla's own metrics."""

import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics


def counts(*names: str) -> list[int]:
    """Return the count of each event once the device is idle."""
    xm.wait_device_ops()  # an execution is counted at its end
    return [_count(name) for name in names]


def _count(name: str) -> int:
    data = xla_metrics.metric_data(name)
    return int(data[0]) if data else xla_metrics.counter_value(name) or 0
