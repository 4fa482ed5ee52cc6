"""What all ranks have to do alike, and what is told on each of them when they do not."""

import torch
from torch import Tensor, distributed

from graphstash.errors import ConfigError

__all__ = ["require_floats", "require_same"]


def require_same(group: distributed.ProcessGroup, mine: str, *, wrong: str, way_out: str) -> None:
    """Waits for the same call of all ranks, and compares what they say.

    Raises:
        ConfigError: on every rank, when they differ; names what was said, and a rank of each.
    """
    said: list[str] = [""] * distributed.get_world_size(group)
    distributed.all_gather_object(said, mine, group=group)
    if len(set(said)) > 1:
        listed = "; ".join(f"rank {said.index(each)}: {each}" for each in dict.fromkeys(said))
        raise ConfigError(f"{wrong} ({listed}): {way_out}")


def require_floats(values: Tensor, wire_dtype: torch.dtype | None) -> None:
    """Makes sure that no imaginary part and no fraction is lost on the way.

    Raises:
        ConfigError: a type that is no floating-point type is sent as another, or the reverse.
    """
    if wire_dtype is None or wire_dtype == values.dtype:
        return
    if not (values.is_floating_point() and wire_dtype.is_floating_point):
        raise ConfigError(
            f"{values.dtype} cannot be sent as wire_dtype={wire_dtype} without losing most of it: "
            "take a floating-point type for tensors of one, and None for others"
        )
