"""Sharded parameters: DTensors of FSDP2 (`fully_shard`) and of tensor parallelism.

Each process has one shard of every parameter, gradient and state. An elementwise update uses only
the shards. An operation on a whole tensor (a norm, whether any gradient is infinite) combines the
shards' results, in one message for all tensors that the same processes share.

    local     the shard, which shares its memory with the DTensor
    Sums      sums and maxima over the processes that share a parameter
    full      the whole tensor, on every process; `distributed_like` shards it again

FullyShardedDataParallel, which FSDP2 replaces, has plain tensors: a shard is a part of a flat
tensor that joins several parameters (`is_flattened`). This module cannot restore whole tensors from
them.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast

import torch
from torch import Tensor, distributed, nn

from graphstash.training.lent import Lent

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = [
    "Sums",
    "aligned",
    "distributed_like",
    "full",
    "is_flat_parallel",
    "is_flattened",
    "is_fully_sharded",
    "is_sharded",
    "local",
    "sharded_like",
]


_PLAIN: Final = (Tensor, nn.Parameter)
"""Types to test first: looking up a missing attribute takes ten times as long."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def is_flattened(parameter: Tensor) -> bool:
    """Return whether FullyShardedDataParallel has made the parameter a part of a flat tensor."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def is_fully_sharded(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """Return whether `fully_shard()` has sharded the module."""
    return isinstance(module, _fsdp_class("FSDPModule"))


def is_flat_parallel(module: nn.Module) -> bool:
    """Return whether the module is a FullyShardedDataParallel."""
    return isinstance(module, _fsdp_class("FullyShardedDataParallel"))


def _fsdp_class(name: str) -> Any:
    """Return a class of torch.distributed.fsdp, or () if nothing has imported that yet (2 s)."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, without a copy, or a plain tensor itself."""
    return _of(tensor).to_local() if is_sharded(tensor) else tensor


def aligned(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient sharded like its parameter, and add up partial sums if there are any."""
    if not is_sharded(gradient) or _of(gradient).placements == _of(parameter).placements:
        return gradient
    return _of(gradient).redistribute(placements=_of(parameter).placements)


def full(tensor: Tensor) -> Tensor:
    """Return a whole tensor; for a DTensor, every process of its mesh must call this."""
    return _of(tensor).full_tensor() if is_sharded(tensor) else tensor


def distributed_like(value: Tensor, like: object) -> Tensor:
    """Shard a whole tensor like `like`; every process of the mesh must call it.

    Return the value itself if it is sharded, or if `like` is not a sharded tensor of its shape.
    """
    is_template = isinstance(like, Tensor) and is_sharded(like) and like.shape == value.shape
    if not is_template or is_sharded(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = _of(like).device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, _of(like).placements)


def sharded_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return state that is sharded as its parameter is, if it has the parameter's shape.

    If one of them is sharded, every process of its mesh must call this.
    """
    if is_sharded(value) and not _are_sharded_alike(value, parameter):
        value = full(value)
    return distributed_like(value, parameter)


def _are_sharded_alike(a: Tensor, b: Tensor) -> bool:
    if not (is_sharded(a) and is_sharded(b)):
        return False
    return (_of(a).device_mesh, _of(a).placements) == (_of(b).device_mesh, _of(b).placements)


def _of(tensor: object) -> "DTensor":
    return cast("DTensor", tensor)


class Sums:
    """Combines numbers that each process computed from its shards, one number per parameter.

    Two objects are equal if their parameters are sharded alike, so an object can be part of a key.

    Args:
        parameters: the optimizer's parameters, DTensors or not.
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
        """Return whether any parameter is sharded."""
        return bool(self._places)

    def of(self, chosen: Sequence[int]) -> "Sums":
        """Return the object for some of the parameters, chosen and ordered by number."""
        index_of = {number: index for index, number in enumerate(chosen)}
        part = Sums()
        kept = [
            (place, tuple(index_of[number] for number in numbers if number in index_of))
            for place, numbers in self._places
        ]
        part._places = tuple((place, numbers) for place, numbers in kept if numbers)
        return part

    def sums(self, numbers: Sequence[Tensor]) -> list[Tensor]:
        """Return the sum over the shards for each parameter, as scalars.

        Gathers the numbers and adds them in the order of the ranks. An all-reduce over three or
        more ranks adds in an order that depends on the position in the message, so a sum would
        depend on the other parameters.
        """
        summed = list(numbers)
        for (mesh, *dimensions), indices in self._places:
            stacked = torch.stack([numbers[n] for n in indices])
            for dimension in dimensions:
                group = mesh.get_group(dimension)
                by_rank = [torch.empty_like(stacked) for _ in range(group.size())]
                with Lent(*by_rank, stacked):
                    distributed.all_gather(by_rank, stacked, group=group)
                stacked = reduce(torch.add, by_rank)
            for n, number in zip(indices, stacked, strict=True):
                summed[n] = number
        return summed

    def maximum(self, number: Tensor) -> Tensor:
        """Reduce a number, in place, to its maximum over all processes that share a parameter."""
        for (mesh, *dimensions), _ in self._places:
            for dimension in dimensions:
                operation = distributed.ReduceOp.MAX
                with Lent(number):
                    distributed.all_reduce(number, op=operation, group=mesh.get_group(dimension))
        return number
