"""The timeout of a process group: how long it waits for missing ranks."""

from datetime import timedelta

import torch
from torch import distributed

__all__ = ["timeout_of"]


def timeout_of(group: distributed.ProcessGroup | None) -> timedelta | None:
    """Return the group's timeout, or None if this version of torch does not expose it."""
    try:
        kind = torch.device("cuda" if "nccl" in distributed.get_backend(group) else "cpu")
        timeout = group._get_backend(kind).options._timeout  # type: ignore[union-attr] # None raises below
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None
