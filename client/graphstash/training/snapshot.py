"""to_host: a copy of a training's state that the next step does not change, of plain types only."""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from numbers import Integral, Real
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstash._errors import ConfigError
from graphstash.training.device import torch_xla_functions

__all__ = ["to_host"]

_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_DICTIONARIES: Final = (dict, OrderedDict, Counter)


def to_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a state to the host; what is there already too.

    On torch_xla all tensors come in one transfer. Nothing is recorded and, after
    `torch_xla.sync()`, nothing is executed. Tensors that share memory share it in the copy.

    Args:
        state: tensors, numbers, strings, bytes and None, in lists, tuples and dictionaries: what
            `torch.load(weights_only=True)` accepts. Numbers of NumPy become Python's.

    Raises:
        ConfigError: anything else; says where.
    """
    tensors: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        tensors[id(tensor)] = tensor
        return tensor

    plain = _map(collect, dict(state), "state")
    copies = dict(zip(tensors, _copies(list(tensors.values())), strict=True))
    copied: dict[str, Any] = _map(lambda tensor: copies[id(tensor)], plain, "state")
    return copied


def _map(function: Callable[[Tensor], Tensor], value: Any, place: str) -> Any:
    """A copy of nested containers with `function` applied to tensors."""
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter:
        return function(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(_map(function, part, f"{place}[{i}]") for i, part in enumerate(value))
    if kind in _DICTIONARIES:
        new = copy.copy(value)
        for key, part in value.items():
            if _map(function, key, f"a key of {place}") is not key:
                raise ConfigError(f"{key!r}, a key of {place}, is a tensor: use a string")
            new[key] = _map(function, part, f"{place}[{key!r}]")
        if kind is OrderedDict:  # a module's state dictionary has its versions in an attribute
            vars(new).update(_map(function, vars(value), place))
        return new
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, "
        "strings, lists, tuples and dictionaries, for it must not run code when it is loaded: "
        "give it one of these forms in state_dict(), and take it back in load_state_dict()"
    )


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    on_xla = [tensor for tensor in tensors if tensor.device.type == "xla"]
    from_xla = iter(torch_xla_functions()._xla_get_cpu_tensors(on_xla) if on_xla else ())
    copies: list[Tensor] = []
    same: dict[Hashable, Tensor] = {}
    for tensor in tensors:
        if tensor.device.type == "xla":
            copies.append(next(from_xla))
            continue
        place = _place(tensor)
        if place not in same:
            same[place] = tensor.detach().to("cpu", copy=True)
        copies.append(same[place])
    return copies


def _place(tensor: Tensor) -> Hashable:
    """Equal for tensors that are the same memory."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor)
    address = tensor.data_ptr()
    return address, tensor.device, tensor.dtype, tensor.shape, tensor.stride()
