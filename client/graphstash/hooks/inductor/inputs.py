"""Describe what torch's key omits about the inputs of a graph."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._inductor.utils import tensor_is_aligned
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.inductor.describer import Describer
from graphstash.hooks.inductor.target import GPUS

__all__ = ["describe_ranges", "describe_relations", "input_lines"]


def describe_relations(inputs: list[Any]) -> Iterator[str]:
    """Describe the properties of inputs that AOTAutograd reads and torch's key omits.

    If a graph mutates an input that shares memory with another one, AOTAutograd compiles both as
    views of one base, with their offsets. It compiles a mutation of a leaf, which has no history,
    differently. Kernels for GPUs may need aligned addresses, and do not check the addresses of
    parameters.
    """
    storages: dict[int, list[int]] = {}
    bases: dict[int, int] = {}
    for at, tensor in enumerate(inputs):
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.requires_grad and not tensor.is_leaf:
            yield f"history {at}"
        if tensor.device.type in GPUS and not tensor_is_aligned(tensor):
            yield f"not aligned {at}"
        if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor):
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(at)
            bases.setdefault(id(_base(tensor)), at)
    for places in storages.values():
        for at in places if len(places) > 1 else ():
            tensor, first = inputs[at], inputs[places[0]]
            base = _base(tensor)
            yield (
                f"memory {at} of {places[0]}, base of {bases[id(base)]}, same {tensor is first}, "
                f"offset {tensor.storage_offset()}, base {base.dtype} {base.shape} {base.stride()} "
                f"{base.storage_offset()} {base.requires_grad} of {base.untyped_storage().nbytes()}"
            )


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def describe_ranges(inputs: list[Any]) -> Iterator[str]:
    """Describe the ranges of dynamic sizes, in the order of the inputs.

    An executable is right only within its range, and its guards contain the range.
    """
    found: dict[Any, Any] = {}
    for each in inputs:
        for size in each.shape if isinstance(each, torch.Tensor) else (each,):
            if isinstance(size, torch.SymInt):
                ranges = size.node.shape_env.var_to_range
                found |= {symbol: ranges.get(symbol) for symbol in _symbols(size)}
    yield from (f"range {number} {each}" for number, each in enumerate(found.values()))


def _symbols(size: torch.SymInt) -> list[Any]:
    return sorted(size.node.expr.free_symbols, key=str)


def input_lines(describer: Describer, value: Any) -> Iterator[str]:
    """Describe the classes of an input. Raise `UndescribableError` for one that may hide state."""
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)
    if value is not None and not isinstance(value, (*known, int, float, complex, str)):
        yield _describe_opaque(describer, getattr(value, "real_obj", value))
        return
    if not isinstance(value, torch.Tensor) or describer.is_known(type(value).__module__):
        if hasattr(value, "device_mesh") and not _has_stable_key(value):
            raise UndescribableError("torch's key of a DTensor's mesh differs in each process")
        return
    if not is_traceable_wrapper_subclass(value):
        raise UndescribableError(f"an input is a {type(value).__qualname__}")
    names, context = value.__tensor_flatten__()
    yield f"input {describer.describe(type(value))} {names} {describer.describe(context)}"
    for name in names:
        yield from input_lines(describer, getattr(value, name))


def _describe_opaque(describer: Describer, value: Any) -> str:
    """Describe an opaque object that a graph gets as an input, which fake kernels may read.

    Since torch 2.11, a graph may get a constant object. Objects that may change are refused.
    """
    kind = type(value)
    opaque = getattr(torch._library, "opaque_object", None)  # since 2.10
    names = ("is_opaque_constant_type", "is_opaque_value_type")  # the second one until 2.13
    is_value = next((getattr(opaque, each) for each in names if hasattr(opaque, each)), None)
    if is_value is None or not is_value(kind) or not hasattr(value, "__dict__"):
        raise UndescribableError(f"an input is a {kind.__qualname__}")
    return f"opaque {describer.describe(kind)} {describer.describe(vars(value))}"


def _has_stable_key(value: Any) -> bool:
    """Return whether torch's key of a DTensor is equal in every process.

    torch 2.7 hashes strings into the key. In torch 2.15, a mesh that is an input of the graph
    enters the graph's key by its address.
    """
    return (
        hasattr(value, "_stable_hash_for_caching")
        and "device_mesh" not in (value.__tensor_flatten__()[0])
    )
