"""What the ranks of a process group agree on: their arguments, and how long to wait."""

from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed

from graphstash.errors import ConfigError

__all__ = ["gathered", "require_floats", "require_same", "timeout_of"]

T = TypeVar("T")


def gathered(group: distributed.ProcessGroup, mine: T) -> list[T]:
    """Return the values of all ranks, by rank; a collective call."""
    values = [mine] * distributed.get_world_size(group)
    distributed.all_gather_object(values, mine, group=group)
    return values


def require_same(group: distributed.ProcessGroup, mine: str, *, wrong: str, advice: str) -> None:
    """Check that `mine` is the same text on all ranks; a collective call.

    Raises:
        ConfigError: the texts differ; on every rank. The message has each text and its first rank.
    """
    texts = gathered(group, mine)
    if len(set(texts)) > 1:
        listed = "; ".join(f"rank {texts.index(each)}: {each}" for each in dict.fromkeys(texts))
        raise ConfigError(f"{wrong} ({listed}): {advice}")


def require_floats(values: Tensor, wire_dtype: torch.dtype | None) -> None:
    """Reject a conversion that may lose most of a value.

    Raises:
        ConfigError: the types differ, and at least one is not a floating-point type.
    """
    if wire_dtype is None or wire_dtype == values.dtype:
        return
    if not (values.is_floating_point() and wire_dtype.is_floating_point):
        raise ConfigError(
            f"{values.dtype} cannot be sent as wire_dtype={wire_dtype} without losing most of it: "
            "take a floating-point type for tensors of one, and None for others"
        )


def timeout_of(group: distributed.ProcessGroup | None) -> timedelta | None:
    """Return the group's timeout, or None if this version of torch does not expose it."""
    try:
        kind = torch.device("cuda" if "nccl" in distributed.get_backend(group) else "cpu")
        timeout = group._get_backend(kind).options._timeout  # type: ignore[union-attr] # None raises below
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None
