"""The parameters of a fusion: their names in FusionError, and the memory that they share."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from graphstash.training.memory import extent_of
from graphstash.training.sharding import local

__all__ = ["FusionError", "Memory", "has_memory", "named"]

_SHOWN: Final = 3


class FusionError(RuntimeError):
    """Fused updates would differ, or already differ, from those of the optimizer without fusion."""


def named(parameters: Iterable[Tensor], names: dict[Tensor, str]) -> str:
    """Return the names of the first three parameters, and how many more there are."""
    found = [names.get(parameter, "a parameter outside of the model") for parameter in parameters]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has strided memory of its own, and is no wrapper of other tensors."""
    is_wrapper = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapper


class Memory:
    """The memory of some parameters; for a DTensor, the memory of its shard."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._places: dict[int, list[tuple[int, int, Tensor]]] = {}
        """By storage: first address, address after the last, parameter."""
        for parameter in parameters:
            storage, first, end = _place(local(parameter))
            self._places.setdefault(storage, []).append((first, end, parameter))

    def shared_with(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the parameters whose address range overlaps that of a strided tensor."""
        storage, first, end = _place(tensor)
        return [
            parameter
            for its_first, its_end, parameter in self._places.get(storage, ())
            if first < its_end and its_first < end
        ]


def _place(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage().data_ptr(), *extent_of(tensor)
