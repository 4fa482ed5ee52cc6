"""What the ranks of a process group agree on: their arguments, and how long to wait."""

import math
from datetime import timedelta
from typing import Final, TypeVar

import torch
from torch import distributed

from graphstash.errors import ConfigError

__all__ = [
    "gathered",
    "require_floats",
    "require_same",
    "require_scale",
    "require_wire_type",
    "timeout_of",
]

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


_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Floating-point types that process groups and aggregators add. None of them adds 8-bit floats."""


def require_wire_type(wire_dtype: torch.dtype | None) -> None:
    """Reject a type in which gradients cannot be sent and added.

    Raises:
        ConfigError: the type is no floating-point type of 16 to 64 bits, and not complex.
    """
    is_complex = isinstance(wire_dtype, torch.dtype) and wire_dtype.is_complex
    if not (wire_dtype is None or wire_dtype in _FLOATS or is_complex):
        raise ConfigError(
            f"wire_dtype={wire_dtype}: gradients are sent and added as "
            f"{', '.join(map(str, _FLOATS))}; take one of these, or None for their own type"
        )


def require_floats(dtype: torch.dtype, wire_dtype: torch.dtype | None) -> None:
    """Reject a type that cannot be added, and a conversion that may lose most of a value.

    Raises:
        ConfigError: the elements are 8-bit floats, or would be sent as such; or the types differ,
            and at least one is not a floating-point type.
    """
    sent = wire_dtype or dtype
    for each in (sent, dtype):
        if each.is_floating_point and each not in _FLOATS:
            raise ConfigError(
                f"{each} cannot be added up: take {', '.join(map(str, _FLOATS))} for the tensor "
                "and as wire_dtype="
            )
    if sent == dtype:
        return
    if not (dtype.is_floating_point and sent.is_floating_point):
        raise ConfigError(
            f"{dtype} cannot be sent as wire_dtype={wire_dtype} without losing most of it: "
            "take a floating-point type for tensors of one, and None for others"
        )


def require_scale(scale: float, dtype: torch.dtype) -> None:
    """Reject a factor that makes NaN of zeros, because blocks of zeros are not sent. Reject any
    factor except 1 for a type that may not hold the product.

    Raises:
        ConfigError: the factor is infinite or NaN, or it is not 1 and the type has no fractions.
    """
    if scale != 1.0 and not (dtype.is_floating_point or dtype.is_complex):
        raise ConfigError(f"{dtype} cannot be multiplied by scale={scale}: convert it to a float")
    if not math.isfinite(scale):
        raise ConfigError(f"scale={scale} makes NaN of zeros, which are not sent: take a number")


def timeout_of(group: distributed.ProcessGroup | None) -> timedelta | None:
    """Return the group's timeout, or None if this version of torch does not expose it."""
    try:
        kind = torch.device("cuda" if "nccl" in distributed.get_backend(group) else "cpu")
        timeout = group._get_backend(kind).options._timeout  # type: ignore[union-attr] # None raises below
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None
