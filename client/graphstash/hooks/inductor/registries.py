"""Registrations for torch's own operations, which take part in compiling every graph.

torch's keys cover torch's files, and therefore torch's own registrations. Programs add lowerings,
decompositions, patterns of graph passes and kernels to the same tables. This module describes the
entry of each torch operation: torch's functions by name, the user's functions by code. Removing an
entry, or copying it from another operation, therefore also changes the description.
"""

import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from hashlib import sha256
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import _meta_registrations, library
from torch._decomp import global_decomposition_table
from torch._decomp.decompositions_for_rng import extra_random_decomps
from torch._inductor import lowering
from torch._inductor.codegen.common import device_codegens
from torch._inductor.decomposition import decompositions
from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad, split_cat
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from graphstash.hooks.code import CodeDescriber, UndescribableError
from graphstash.hooks.inductor.libraries import libraries

__all__ = [
    "compilers_of",
    "is_torchs",
    "is_torchs_namespace",
    "is_torchs_operator",
    "kernels_of_operator",
    "registered_for_torch",
    "tables",
]

_OWN: Final = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_native"),
        *("_quantized", "_test", "aten", "c10d", "c10d_functional", "coor", "cplib"),
        *("debug_mode_ops", "debugprims", "export", "flex_gemm"),
        *("flex_lib", "fsdp", "higher_order", "inductor", "mempool", "mkl", "mkldnn"),
        *("mkldnn_prepacked", "onednn", "onnx", "onnx_symbolic", "prepacked", "prim", "prims"),
        *("profiler", "quantization", "quantized", "quantized_decomposed", "rngprims", "sparse"),
        *("static_runtime", "streams", "symm_mem"),
    }
)
"""Namespaces of the operations in torch 2.7 and 2.15."""

_KERNELS_OF_TORCH: Final = frozenset(
    {
        *("aten/_foreach_mm/CUDA", "aten/linalg_polar.out/CUDA", "aten/linalg_polar/CUDA"),
        *("aten/bmm/CUDA", "aten/to_dense/FuncTorchDynamicLayerFrontMode"),
        "aten/to_dense/PythonTLSSnapshot",
        *(
            f"aten/{name}/FuncTorchBatched"
            for name in (
                *("addr", "huber_loss_backward", "mse_loss_backward", "nll_loss2d_backward"),
                *("nll_loss2d_forward", "nll_loss_backward", "nll_loss_forward"),
                "smooth_l1_loss_backward",
            )
        ),
    }
)
"""Python kernels for operations of ATen in torch 2.7 and 2.15, except those in `_FAKE_KERNELS`."""

_FAKE_KERNELS: Final = {
    id(each): frozenset(each._op_impls)
    for each in vars(_meta_registrations).values()
    if isinstance(each, library.Library)
}
"""Kernels in torch's libraries of fake kernels, by ID. These libraries live as long as torch."""

_PACKAGES: Final = frozenset(
    {"functorch", "graphstash", "sympy", "torch", "torchgen", *sys.stdlib_module_names}
) - {"__main__"}
"""Packages whose functions belong to torch or Python."""

_COMPILERS: Final = ("fw_compiler", "bw_compiler", "inference_compiler", "partition_fn")

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_VALUES: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)

_MAX_DEPTH: Final = 6


class _ForeignError(Exception):
    """A function does not belong to torch, or contains such a function."""


def tables() -> Iterator[tuple[str, Any]]:
    """Return the tables of functions by operation, each with its name."""
    yield "lowering", lowering.lowerings
    yield "decomposition", decompositions
    yield "decomposition of random numbers", extra_random_decomps
    for name, table in global_decomposition_table.items():
        yield f"decomposition.{name}", table


def is_torchs_namespace(name: str) -> bool:
    """Return whether a namespace, or the namespace of an operation, belongs to torch."""
    return name.partition("::")[0] in _OWN


def is_torchs(function: Any) -> bool:
    """Return whether a function and all that it wraps or contains belong to torch."""
    try:
        _name(function, 0)
    except _ForeignError:
        return False
    return True


_names: dict[int, tuple[Any, str | None]] = {}
"""By ID of a function: the function, and its name if it belongs to torch."""


def _name_once(function: Any) -> str | None:
    """Return the name of a function of torch, or None for other functions. Cached."""
    if id(function) not in _names:
        try:
            name = _name(function, 0)
        except _ForeignError:
            name = None
        _names[id(function)] = (function, name)
    return _names[id(function)][1]


def registered_for_torch(describer: CodeDescriber) -> Iterator[str]:
    """Describe the registrations for torch's own operations, one line each.

    Raises:
        UndescribableError: a registration has no description.
    """
    _check_kernels()
    digest, foreign = _entries()
    yield digest
    of_user = (*_foreign_kernels(), *_foreign_patterns(), *_foreign_constraints())
    for label, function in (*foreign, *of_user, *_foreign_backends()):
        yield f"{label}={describer.registered(function)}"
    if (handler := _choices()) is not None:
        yield f"choices={describer.describe(handler)}"
    for library_of_user in libraries():
        if library_of_user.replaces_kernels:
            yield f"library {library_of_user.digest}"


def compilers_of(describer: CodeDescriber, settings: Any) -> Iterator[str]:
    """Describe the functions that a backend passed to AOTAutograd in place of Inductor's.

    Raises:
        UndescribableError: a function has no description.
    """
    given = _given(settings)
    # torch copies its table once, so a program can change an entry too late.
    table = given.get("decompositions") or {}
    present = table if table is decompositions else {**decompositions, **extra_random_decomps}
    for target in present.keys() | table.keys() if table != present else ():
        function = table.get(target)
        if function is not present.get(target):
            name = describer.registered(function) if _is_foreign(function) else _name(function, 0)
            yield f"given {_target(target)}={name}"
    for name in _COMPILERS:
        for each in _foreign_in(given.get(name), set()):
            yield f"{name}={describer.registered(each)}"


def is_torchs_operator(operator: HigherOrderOperator) -> bool:
    """Return whether a higher-order operator and all its kernels belong to torch."""
    return _name_once(type(operator)) is not None and all(
        _name_once(each) is not None for _, each in kernels_of_operator(operator)
    )


def kernels_of_operator(operator: HigherOrderOperator) -> list[tuple[Any, Any]]:
    """Return the Python kernels of a higher-order operator, each with its key."""
    held = (operator.py_kernels, operator.python_key_table, operator.functorch_table)
    return [pair for each in held for pair in list(each.items())]


def _given(settings: Any) -> dict[str, Any]:
    """Return the compilers passed to AOTAutograd: from its settings, or from this thread's call.

    Raises:
        UndescribableError: both are absent.
    """
    held = {name: getattr(settings, name, None) for name in ("decompositions", *_COMPILERS)}
    frame = sys._getframe()
    while held["fw_compiler"] is None:
        if (caller := frame.f_back) is None:
            raise UndescribableError("the compilers of a backend are not known")
        frame = caller
        if frame.f_globals.get("__name__") == "torch._functorch.aot_autograd":
            held |= {name: frame.f_locals[name] for name in held if name in frame.f_locals}
    return held


_known_entries: list[Any] = [None, ("", [])]
"""The keys and values of all tables, and the result of `_entries` for them."""


def _entries() -> tuple[str, list[tuple[str, Any]]]:
    """Return a digest of torch's functions in the tables, and the other functions."""
    # This runs for every graph. Lists of the same objects compare without a call in Python.
    state = [[*table, *table.values()] for _, table in tables()]
    if _known_entries[0] == state:
        found: tuple[str, list[tuple[str, Any]]] = _known_entries[1]
        return found
    names: list[str] = []
    foreign: list[tuple[str, Any]] = []
    for label, table in tables():
        for target, function in list(table.items()):
            if not is_torchs_namespace(_namespace(target)):
                continue
            if (name := _name_once(function)) is None:
                foreign.append((f"{label} {target}", function))
                continue
            # Inductor adds these at its first operation without a lowering. A process
            # that finds its graphs never does.
            if not name.startswith("function torch._inductor.lowering.fallback_handler."):
                names.append(f"{label} {_target(target)} {name}")
    digest = sha256("\n".join(sorted(names)).encode()).hexdigest()
    result = (f"tables {digest}", foreign)
    _known_entries[:] = [state, result]
    return result


def _namespace(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, HigherOrderOperator):
        return "higher_order"
    return str(getattr(target, "namespace", "") or getattr(target, "_qualified_op_name", "aten"))


def _target(target: Any) -> str:
    name = getattr(target, "__name__", "")
    return str(target) if isinstance(target, OpOverload | OpOverloadPacket | str) else name


def _name(value: Any, depth: int) -> str:  # noqa: PLR0911 - a case each
    """Return the name of a function of torch, with the names of the functions that it contains.

    Raises:
        _ForeignError: one of them does not belong to torch.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, _VALUES):
        return f"{type(value).__name__}.{value}"
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return f"operation {value}"
    if isinstance(value, FunctionType):
        _check(str(value.__globals__.get("__name__")))
        cells = [_name(_content(cell), depth + 1) for cell in value.__closure__ or ()]
        return f"function {value.__module__}.{value.__qualname__} {cells}"
    if isinstance(value, partial):
        held = (value.func, value.args, value.keywords)
        return f"partial {_name(held, depth + 1)}"
    if isinstance(value, MethodType):
        owner = _name(value.__self__, depth + 1)
        is_generated = "__name__" not in getattr(value.__func__, "__globals__", {})
        function = value.__name__ if is_generated else _name(value.__func__, depth + 1)
        return f"method {owner} {function}"
    if isinstance(value, list | tuple | dict):
        items = value.items() if isinstance(value, dict) else value
        return f"{type(value).__name__} {[_name(each, depth + 1) for each in items]}"
    if isinstance(value, BuiltinFunctionType | type | ModuleType):
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
        _check(str(module or "builtins"))
        return f"{module}.{getattr(value, '__qualname__', value.__name__)}"
    _check(type(value).__module__)
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _check(module: str) -> None:
    root = module.partition(".")[0]
    if root not in _PACKAGES:
        raise _ForeignError(module)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_foreign(function: Any) -> bool:
    return function is not None and not is_torchs(function)


def _foreign_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Return the functions in a compiler of a backend that do not belong to torch."""
    if value is None or type(value) in _PLAIN or id(value) in seen:
        return
    seen.add(id(value))
    if callable(value) and not isinstance(value, torch.nn.Module):
        try:
            _check(_module_of(value))
        except _ForeignError:
            yield value  # a partial with its arguments, and a method with its object
            return
    for each in _held_by(value):
        yield from _foreign_in(each, seen)


def _held_by(value: Any) -> Iterable[Any]:
    """Return the values in a container, a partial, or a function or callable object of torch."""
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, list | tuple | set | frozenset | dict):
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        return [_content(cell) for cell in value.__closure__ or ()]
    return (getattr(value, "compiler_fn", None),)


def _module_of(function: Any) -> str:
    """Return the module that defines a function, a class or the class of an object."""
    while isinstance(function, MethodType | partial):
        function = function.__func__ if isinstance(function, MethodType) else function.func
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__"))
    if hasattr(function, "__wrapped__"):  # written in C, such as what `functools.cache` returns
        return _module_of(function.__wrapped__)
    named = isinstance(function, BuiltinFunctionType | type)
    return str((function if named else type(function)).__module__ or "builtins")


def _check_kernels() -> None:
    """Refuse Python kernels that a program registered in place of ATen's, or for all operations.

    Raises:
        UndescribableError: such a kernel exists; torch does not return it.
    """
    for each in _libraries():
        if each.ns == "_":
            raise UndescribableError("a program registered a kernel for all operations")
        fake = _FAKE_KERNELS.get(id(each), frozenset())
        if len(each._op_impls) == len(fake):  # kernels are only added
            continue
        # Inductor does not compile for XLA, and torch_xla registers such kernels.
        for kernel in sorted(each._op_impls - _KERNELS_OF_TORCH - fake):
            if not kernel.endswith("XLA"):
                raise UndescribableError(f"a program replaced the kernel {kernel}")


_known_libraries: list[list[Any]] = [[], []]
"""The finalizers of this process, and the result of `_libraries` for them."""


def _libraries() -> list[Any]:
    """Return the libraries that hold Python kernels for ATen or for all operations.

    torch lists the kernels of all libraries, but a library may replace a kernel of another one.
    Each library has a finalizer.
    """
    finalizers: Any = getattr(weakref.finalize, "_registry", None)
    if finalizers is None:
        raise UndescribableError("this Python does not list its finalizers")
    if (state := list(finalizers)) != _known_libraries[0]:
        alive = [
            entry.weakref
            for entry in list(finalizers.values())
            if entry.func is library._del_library
        ]
        found = [each for each in alive if getattr(each(), "ns", "") in {"_", "aten"}]
        _known_libraries[:] = [state, found]
    held = [each for entry in _known_libraries[1] if (each := entry()) is not None]
    return [each for each in held if each.m is not None]  # None: the library was destroyed


@lru_cache(maxsize=1)
def _packets(_count: int) -> list[dict[str, Any]]:
    """Return the overloads of each used operation of ATen."""
    found = list(vars(torch.ops.aten).values())
    return [vars(each) for each in found if isinstance(each, OpOverloadPacket)]


@lru_cache(maxsize=1)
def _operations(count: int, _overload_count: int) -> tuple[list[OpOverload], list[dict[Any, Any]]]:
    """Return the overloads, and their Python kernels."""
    found = [each for packet in _packets(count) for each in list(packet.values())]
    operations = [each for each in found if isinstance(each, OpOverload)]
    return operations, [each.py_kernels for each in operations]


def _foreign_kernels() -> list[tuple[str, Any]]:
    """Return the kernels that a program registered for ATen with `py_impl`."""
    count = len(vars(torch.ops.aten))
    operations, tables_of_kernels = _operations(count, sum(map(len, _packets(count))))
    keys = chain.from_iterable(tables_of_kernels)
    kernels = chain.from_iterable(map(dict.values, tables_of_kernels))
    state = [*map(len, tables_of_kernels), *keys, *kernels]
    return _remembered(
        "kernels",
        state,
        lambda: (
            ((operation, key), kernel)
            for operation, kernels in zip(operations, tables_of_kernels, strict=True)
            for key, kernel in kernels.items()
            if not isinstance(kernel, torch._C.DispatchKey)
        ),
    )


def _passes() -> Iterator[tuple[tuple[str, str, Any], PatternMatcherPass]]:
    """Return Inductor's passes, each with its module, its name and its place under the name."""
    for module in (joint_graph, post_grad, pre_grad):
        for name, value in list(vars(module).items()):
            for at, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, PatternMatcherPass):
                    yield (module.__name__, name, at), each
    for name in ("PRE_GRAD_PATTERNS", "POST_GRAD_PATTERNS"):
        for own, each in getattr(split_cat, name, {}).items():
            yield (split_cat.__name__, name, own), each


def _foreign_patterns() -> list[tuple[str, Any]]:
    """Return functions of the user in the patterns of Inductor's graph passes."""
    found = [
        (place, list(chain.from_iterable(list(one.patterns.values())))) for place, one in _passes()
    ]
    return _remembered(
        "patterns",
        found,
        lambda: (
            (("pattern", *place, entry.pattern), held)
            for place, entries in found
            for entry in entries
            for name in ("extra_check", "handler", "normalize_args")
            if (held := getattr(entry, name, None)) is not None
        ),
    )


def _foreign_constraints() -> list[tuple[str, Any]]:
    """Return the layout constraints that a program added to torch's own operations."""
    table: dict[Any, Any] = getattr(lowering, "_maybe_layout_constraints", {})
    return _remembered(
        "constraints",
        [*table, *table.values()],
        lambda: (
            (("layout", operation), constraint)
            for operation, constraint in list(table.items())
            if constraint is not None and is_torchs_namespace(_namespace(operation))
        ),
    )


def _foreign_backends() -> list[tuple[str, Any]]:
    """Return the user's classes that generate code for a device."""
    entries = list(device_codegens.items())
    return _remembered(
        "backends",
        entries,
        lambda: (
            (("backend", device, name), held)
            for device, entry in entries
            for name, held in vars(entry).items()
            if held is not None
        ),
    )


_remembered_states: dict[str, tuple[Any, list[tuple[str, Any]]]] = {}


def _remembered(
    what: str, state: Any, functions: Callable[[], Iterable[tuple[Any, Any]]]
) -> list[tuple[str, Any]]:
    """Return the functions of the user; search again only if the state has changed.

    Each comes with the words of its label. Python compares lists of the same objects fast.
    """
    if what not in _remembered_states or _remembered_states[what][0] != state:
        found = [
            (" ".join(map(str, words)), each)
            for words, each in functions()
            if _name_once(each) is None
        ]
        _remembered_states[what] = (state, found)
    return _remembered_states[what][1]


def _choices() -> Any:
    """Return the user's handler of Inductor's choices, or None for torch's handler."""
    handler: Any = V.choices
    return None if type(handler).__module__.partition(".")[0] == "torch" else handler
