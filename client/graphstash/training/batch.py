"""to_device: moves a batch, whatever it is made of, to a device."""

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import torch

__all__ = ["to_device"]

_Batch = TypeVar("_Batch")


def to_device(batch: _Batch, device: "torch.device | str") -> _Batch:
    """A copy of the batch whose tensors are on `device`; all else is as it was.

    Looks into tuples (named ones too), lists, mappings and dataclasses. On torch_xla the tensors
    of a batch travel in one call. On CUDA they go through pinned memory, without waiting, on the
    current stream: what is queued there later sees them.
    """
    import torch

    device = torch.device(device)
    tensors: dict[int, torch.Tensor] = {}

    def collect(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            tensors[id(leaf)] = leaf
        return leaf

    _map(collect, batch)
    moved = dict(zip(tensors, _move(list(tensors.values()), device), strict=True))
    return cast("_Batch", _map(lambda leaf: moved.get(id(leaf), leaf), batch))


def _move(tensors: "list[torch.Tensor]", device: "torch.device") -> "list[torch.Tensor]":
    if device.type == "xla" and tensors:
        import torch_xla.core.xla_model as xm

        return cast("list[torch.Tensor]", xm.send_cpu_data_to_device(tensors, device))
    if device.type == "cuda":
        tensors = [t.pin_memory() if t.device.type == "cpu" else t for t in tensors]
    return [tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors]


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of nested containers with `function` applied to whatever is no container."""
    if isinstance(value, tuple | list):
        parts = [_map(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        mapping = copy.copy(value)
        mapping.update({key: _map(function, value[key]) for key in value})
        return mapping
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, _map(function, getattr(value, field.name)))
        return new
    return function(value)
