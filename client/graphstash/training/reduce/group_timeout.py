"""How long a process group waits for ranks that are not coming."""

from datetime import timedelta

import torch
from torch import distributed

__all__ = ["timeout_of"]


def timeout_of(group: distributed.ProcessGroup | None) -> timedelta | None:
    """What the group was given; None where this version of torch does not tell."""
    try:
        kind = torch.device("cuda" if "nccl" in distributed.get_backend(group) else "cpu")
        timeout = group._get_backend(kind).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None
