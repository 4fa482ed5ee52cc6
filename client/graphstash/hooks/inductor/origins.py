"""Tell torch's own functions and namespaces from those of programs."""

import enum
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from graphstash.hooks.code import content_of

__all__ = [
    "PACKAGES",
    "foreign_functions",
    "foreign_in",
    "is_torchs",
    "is_torchs_namespace",
    "name_once",
]

_OWN: Final = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native"),
        *("_quantized", "_test", "ao", "aten", "bucketing", "c10d", "c10d_functional", "coor"),
        *("cplib", "debug_mode_ops", "debugprims", "device_mesh", "export", "flex_gemm"),
        *("flex_lib", "fsdp", "higher_order", "inductor", "mempool", "mkl", "mkldnn"),
        *("mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "pippy", "prepacked", "prim"),
        *("prims", "profiler", "quantization", "quantized", "quantized_decomposed", "rngprims"),
        *("sparse", "static_runtime", "streams", "symm_mem"),
    }
)
"""Namespaces of the operations in torch 2.7 and 2.15."""

PACKAGES: Final = frozenset(
    {"functorch", "graphstash", "sympy", "torch", "torchgen", *sys.stdlib_module_names}
) - {"__main__"}
"""Packages whose functions belong to torch or Python."""

_PLAIN: Final = frozenset({bool, int, float, complex, str, bytes, type(None)})

# Tuples are made once, unlike `list | dict`: the first key names thousands of functions.
_VALUES: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)
_OPERATIONS: Final = (OpOverload, OpOverloadPacket, HigherOrderOperator)
_CONTAINERS: Final = (list, tuple, dict)
_NAMED: Final = (BuiltinFunctionType, type, ModuleType)
_HOLD_CODE: Final = (torch.nn.Module, torch.jit.ScriptFunction)
"""Classes of torch whose objects hold a program's code, such as `GraphModule`."""
_FREQUENT: Final = frozenset({FunctionType, OpOverload, *_CONTAINERS})
"""Types that are compared first: most values have one of them."""

_MAX_DEPTH: Final = 6


class _ForeignError(Exception):
    """A function is of a program, or contains such a function."""


def is_torchs_namespace(name: str) -> bool:
    """Return whether a namespace, or an operation by its qualified name, belongs to torch."""
    return name.partition("::")[0] in _OWN


def is_torchs(function: Any) -> bool:
    """Return whether a function, with all that it wraps or contains, belongs to torch."""
    try:
        _name(function)
    except _ForeignError:
        return False
    return True


_names: dict[int, tuple[Any, str | None]] = {}
"""By ID of a function: the function, and its name if it belongs to torch."""


def name_once(function: Any) -> str | None:
    """Return the name of a function of torch, or None for other functions. Cached."""
    if id(function) not in _names:
        try:
            name = _name(function)
        except _ForeignError:
            name = None
        _names[id(function)] = (function, name)
    return _names[id(function)][1]


def _name(value: Any, depth: int = 0) -> str:  # noqa: PLR0911 - a case each
    """Return the name of a function of torch, with the names of the functions that it contains.

    Raises `_ForeignError` if one of them is of a program.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind not in _FREQUENT and isinstance(value, _VALUES):
        return f"{kind.__name__}.{value}"
    if depth > _MAX_DEPTH:
        return "..."
    if kind is OpOverload or (kind not in _FREQUENT and isinstance(value, _OPERATIONS)):
        return f"operation {value}"
    if kind is FunctionType:
        _check_module(str(value.__globals__.get("__name__")))
        cells = [_name(content_of(cell), depth + 1) for cell in value.__closure__ or ()]
        return f"function {value.__module__}.{value.__qualname__} {cells}"
    if isinstance(value, partial):
        held = (value.func, value.args, value.keywords)
        return f"partial {_name(held, depth + 1)}"
    if isinstance(value, MethodType):
        owner = _name(value.__self__, depth + 1)
        is_generated = "__name__" not in getattr(value.__func__, "__globals__", {})
        function = value.__name__ if is_generated else _name(value.__func__, depth + 1)
        return f"method {owner} {function}"
    if isinstance(value, _CONTAINERS):
        items = value.items() if isinstance(value, dict) else value
        return f"{type(value).__name__} {[_name(each, depth + 1) for each in items]}"
    if isinstance(value, _NAMED):
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
        _check_module(str(module or "builtins"))
        return f"{module}.{getattr(value, '__qualname__', value.__name__)}"
    _check_module("" if isinstance(value, _HOLD_CODE) else type(value).__module__)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _check_module(module: str) -> None:
    root = module.partition(".")[0]
    if root not in PACKAGES:
        raise _ForeignError(module)


def foreign_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the functions of programs in a backend's compiler."""
    if value is None or type(value) in _PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if callable(value) and not isinstance(value, torch.nn.Module):
        try:
            _check_module(_module_of(value))
        except _ForeignError:
            yield value  # whole: a partial has arguments, a method has an object
            return
    for each in _held_by(value):
        yield from foreign_in(each, seen)


def _held_by(value: Any) -> Iterable[Any]:
    """Return the values in a container, partial, method, function or callable object."""
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, list | tuple | set | frozenset | dict):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        return [content_of(cell) for cell in value.__closure__ or ()]
    return (getattr(value, "compiler_fn", None),)


def _module_of(function: Any) -> str:
    """Return the module that defines a function, a class or the class of an object."""
    while isinstance(function, MethodType | partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    if hasattr(function, "__wrapped__"):  # written in C, such as results of `functools.cache`
        return _module_of(function.__wrapped__)
    named = isinstance(function, BuiltinFunctionType | type)
    return str((function if named else type(function)).__module__ or "builtins")


_remembered_states: dict[str, tuple[Any, list[tuple[str, Any]]]] = {}


def foreign_functions(
    name: str, state: Any, functions: Callable[[], Iterable[tuple[Any, Any]]]
) -> list[tuple[str, Any]]:
    """Return the functions that do not belong to torch, each with its label.

    `functions` returns each function with the words of its label. The result is cached by name
    until `state` changes. A list is a good state: Python compares lists of the same objects fast.
    """
    if name not in _remembered_states or _remembered_states[name][0] != state:
        found = [
            (" ".join(map(str, words)), each)
            for words, each in functions()
            if name_once(each) is None
        ]
        _remembered_states[name] = (state, found)
    return _remembered_states[name][1]
