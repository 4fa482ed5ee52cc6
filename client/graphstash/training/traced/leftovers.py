"""Leftovers: what a recorded step leaves uncomputed besides what it is known to change."""

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from graphstash.training.traced.bindings import XLA
from graphstash.training.traced.record import show

__all__ = ["executions", "leftovers"]


def executions() -> int:
    """How many graphs torch_xla has looked up in its cache, which it does to execute one."""
    counts = (XLA._xla_counter_value(name) for name in ("CachedCompile", "UncachedCompile"))
    return sum(count or 0 for count in counts)


def leftovers(device: str, roots: Sequence[Tensor]) -> str | None:
    """Describes the uncomputed tensors that are not among `roots`; None if there are none."""
    if _count(device) == len(roots):
        return None
    gc.collect()
    number = _count(device) - len(roots)
    if number == 0:
        return None
    known = {XLA._xla_get_tensor_id(root) for root in roots}
    found = {
        show(x)
        for x in gc.get_objects()
        if type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "xla"
        and XLA._check_tensor_need_materialization([x])[0]
        and XLA._xla_get_tensor_id(x) not in known
    }
    return f"{number}: {', '.join(sorted(found)[:3]) or 'none that Python can see'}"


def _count(device: str) -> int:
    return sum(XLA._check_device_tensor_need_materialization(device))
