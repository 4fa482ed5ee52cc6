"""Find what a program added to, or replaced in, the classes of the arguments of an operation.

The code behind a custom operation reads attributes, methods and operators of tensors, their
storages, symbolic numbers and contexts that it gets as arguments. A description of the code has
only the names.
"""

from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any, Final

import torch
from torch.autograd.function import FunctionCtx

from graphstash.hooks.code import package_of

__all__ = ["members_of_program"]

_CLASSES: Final = (
    *(torch.Tensor, torch.nn.Parameter, torch.UntypedStorage, FunctionCtx),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)

_PACKAGES: Final = frozenset({"torch", "typing_extensions"})
"""Packages whose functions are in these classes, in torch 2.7 to 2.15."""


def members_of_program(names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the members that a program added or replaced, each after its place.

    Args:
        names: attributes that the code reads. Operators need no name, and are always included.
    """
    for owner in _CLASSES:
        for name, value in vars(owner).items():
            if (name in names or _is_special(name)) and _is_of_program(name, value):
                yield f"{owner.__name__}.{name}", value


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_of_program(name: str, value: Any) -> bool:
    if isinstance(value, property):
        return any(_is_of_program(name, each) for each in (value.fget, value.fset, value.fdel))
    if isinstance(value, (staticmethod, classmethod)):
        return _is_of_program(name, value.__func__)
    if isinstance(value, FunctionType):
        return package_of(value) not in _PACKAGES or _is_renamed(name, value)
    if isinstance(value, (BuiltinFunctionType, MethodDescriptorType)):
        return _is_renamed(name, value)
    return not _is_special(name) and value is not None


def _is_renamed(name: str, value: Any) -> bool:
    """Return whether a program gave a function of torch another name.

    torch itself does that with operators, such as `__abs__`, so they do not count.
    """
    return not _is_special(name) and value.__name__ != name
