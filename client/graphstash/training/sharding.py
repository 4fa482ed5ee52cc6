"""Sharded parameters: DTensors of FSDP2 (`fully_shard`) and of tensor parallelism.

Each process has a shard of every parameter, of its gradient and of its state. An update that looks
at single elements is made of the shards alone; what looks at a whole tensor (a norm, whether any
gradient is infinite) adds up what the shards say, in one message for all of them.

    local     the shard, which shares its memory with the DTensor
    Sums      sums and maxima over the processes that share a parameter
    full      the whole tensor, on every process; a DTensor is `distributed_like` another again

FullyShardedDataParallel, which FSDP2 replaces, has plain tensors instead: its shards are parts of
several parameters in one row (`is_flattened`). Nothing here can look at whole ones.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, distributed, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Sums", "aligned", "distributed_like", "full", "is_flattened", "is_sharded", "local"]


_PLAIN: Final = (Tensor, nn.Parameter)
"""What nearly all tensors are; to look for an attribute that is missing takes ten times as long."""


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def is_flattened(parameter: Tensor) -> bool:
    """Whether FullyShardedDataParallel has made it a part of a flat tensor."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, without a copy; another tensor itself."""
    return _of(tensor).to_local() if is_sharded(tensor) else tensor


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient that is sharded as its parameter; tensor parallelism may leave sums to be made."""
    if not is_sharded(gradient) or _of(gradient).placements == _of(parameter).placements:
        return gradient
    return _of(gradient).redistribute(placements=_of(parameter).placements)


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; every process of its mesh has to ask for it. Others as they are."""
    return _of(tensor).full_tensor() if is_sharded(tensor) else tensor


def distributed_like(value: Tensor, like: object) -> Tensor:
    """A whole tensor, sharded as `like` is; every process of the mesh has to call it.

    What is not sharded, or not of the shape of `like`, stays as it is.
    """
    is_meant = isinstance(like, Tensor) and is_sharded(like) and like.shape == value.shape
    if not is_meant or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = _of(like).device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, _of(like).placements)


def _of(tensor: object) -> "DTensor":
    return cast("DTensor", tensor)


class Sums:
    """Adds up numbers of shards, one number per parameter.

    Equal where the parameters are sharded alike, so that it can be part of a key.

    Args:
        parameters: as the optimizer has them, DTensors or not.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        places: dict[tuple[Any, ...], list[int]] = {}
        for number, parameter in enumerate(parameters):
            if not is_sharded(parameter):
                continue
            placements = _of(parameter).placements
            sharded = [n for n, placement in enumerate(placements) if placement.is_shard()]
            if sharded:
                places.setdefault((_of(parameter).device_mesh, *sharded), []).append(number)
        self._places = tuple((place, tuple(numbers)) for place, numbers in places.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sums) and self._places == other._places

    def __hash__(self) -> int:
        return hash(self._places)

    def __bool__(self) -> bool:
        """Whether anything is sharded."""
        return bool(self._places)

    def of(self, chosen: Sequence[int]) -> "Sums":
        """The same for some of the parameters, which are given by their numbers."""
        place_of = {number: place for place, number in enumerate(chosen)}
        part = Sums()
        kept = [
            (place, tuple(place_of[number] for number in numbers if number in place_of))
            for place, numbers in self._places
        ]
        part._places = tuple((place, numbers) for place, numbers in kept if numbers)
        return part

    def sums(self, numbers: Sequence[Tensor]) -> list[Tensor]:
        """Of each parameter, the sum of its shards' numbers, each [].

        Added up by rank, so that a sum does not depend on what is summed with it: a collective sum
        of three and more adds in an order that the place in the message decides.
        """
        summed = list(numbers)
        for (mesh, *dimensions), which in self._places:
            stacked = torch.stack([numbers[n] for n in which])
            for dimension in dimensions:
                group = mesh.get_group(dimension)
                of_all = [torch.empty_like(stacked) for _ in range(group.size())]
                distributed.all_gather(of_all, stacked, group=group)
                stacked = reduce(torch.add, of_all)
            for n, number in zip(which, stacked, strict=True):
                summed[n] = number
        return summed

    def maximum(self, number: Tensor) -> Tensor:
        """The largest of one number over all processes that share a parameter; in place."""
        for (mesh, *dimensions), _ in self._places:
            for dimension in dimensions:
                operation = distributed.ReduceOp.MAX
                distributed.all_reduce(number, op=operation, group=mesh.get_group(dimension))
        return number
