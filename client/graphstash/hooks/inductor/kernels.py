"""Python kernels for torch's own operations, and operations in torch's namespaces.

torch's cache keys cover the kernels in torch's files. A program can add or replace kernels, and
torch offers no way to look up the kernels of a `Library`. So this module separates torch's
libraries from the program's, and refuses the program's kernels. Fake kernels, rules for dispatch
modes, and the functions of a `CustomOpDef` can be looked up, so keys describe them instead.
"""

import inspect
import re
import sys
import weakref
from collections.abc import Iterator
from itertools import chain, compress, filterfalse, repeat
from operator import is_
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import _meta_registrations, library
from torch._library import custom_ops, simple_registry
from torch._library.custom_ops import CustomOpDef

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.inductor.origins import foreign_functions, is_torchs_namespace, name_once
from graphstash.hooks.inductor.versions import HAS_VERSIONS, TableCache, Versions

__all__ = [
    "changed_definitions",
    "check_kernels",
    "fakes_of",
    "foreign_rules",
    "operations_of_program",
]

_T = TypeVar("_T")

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
"""Kernels for operations of ATen in torch's libraries, except those in `_FAKE_KERNELS`."""

_OTHER_DEVICES: Final = ("XLA",) if torch.backends.mps.is_built() else ("XLA", "MPS")
"""Ends of dispatch keys of devices for which Inductor compiles nothing here. torch_xla registers
Python kernels for XLA, and torch 2.11 registers some for Apple's GPUs (MPS)."""

_ALONE: Final = frozenset(
    {
        "_dtensor/mesh_get_process_group/CompositeExplicitAutograd",
        "ao/wait_tensor/CompositeExplicitAutograd",
        "coor/current_device/CompositeExplicitAutograd",
        "coor/current_device_index/CompositeExplicitAutograd",
        "debugprims/load_tensor/BackendSelect",
        "device_mesh/_runtime_compute_coordinate_on_dim/CompositeExplicitAutograd",
        "pippy/_pipe_split/BackendSelect",
    }
)
"""torch's own kernels, in 2.7 to 2.15, for each of which `torch.library.impl` makes a library."""

_GRADIENTS: Final = frozenset(
    {
        "_dtensor/shard_dim_alltoall",
        *(
            f"_c10d_functional/{name}"
            for name in (
                *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce"),
                *("all_reduce_coalesced", "all_to_all_single", "reduce_scatter_tensor"),
                *("reduce_scatter_tensor_coalesced", "wait_tensor", "wait_tensors"),
            )
        ),
        *(
            f"_c10d_functional_autograd/{name}"
            for name in ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor")
        ),
    }
    if hasattr(library, "get_kernel")
    else ()
)
"""Operations whose backward torch 2.15 registers with `torch.library.register_autograd`."""

_OPERATIONS_OF_TORCH: Final = frozenset(
    each.rpartition("/")[0].replace("/", "::") for each in _ALONE
)
"""Operations that torch defines with `torch.library.define`. Programs define others in the same
namespaces: torchao does in `ao`."""

_TABLES: Final = ("_autocast_dtype", "_backend_fns", "_torch_dispatch_fns")
"""Attributes of a `CustomOpDef` that hold dicts."""

_FAKE_KERNELS: Final = {
    id(each): frozenset(each._op_impls)
    for each in vars(_meta_registrations).values()
    if isinstance(each, library.Library)
}
"""By ID of a library in `_meta_registrations`: its fake kernels. torch never frees these."""


def check_kernels() -> None:
    """Refuse Python kernels that a program registered for torch's operations or for all operations.

    Raises:
        UndescribableError: such a kernel exists.
    """
    of_torch, of_program = _find_libraries()
    for each in of_torch:
        known = _FAKE_KERNELS.get(id(each), frozenset())
        if len(each._op_impls) != len(known):  # kernels are never removed
            _check_names(each._op_impls - _KERNELS_OF_TORCH - known)
    operations = operations_of_program()
    for each in of_program:
        if each.ns == "_":
            raise UndescribableError("a program registered a kernel for all operations")
        _check_names(
            kernel
            for kernel in each._op_impls
            if _operation_of(kernel) not in operations and not _is_usual(each, kernel)
        )


def _check_names(kernels: Any) -> None:
    for kernel in sorted(kernels):
        if not kernel.endswith(_OTHER_DEVICES):
            raise UndescribableError(f"a program replaced the kernel {kernel}")


def _operation_of(kernel: str) -> str:
    """Return the name of a kernel's operation without its overload."""
    return kernel.rpartition("/")[0].replace("/", "::").partition(".")[0]


def _is_usual(holder: Any, kernel: str) -> bool:
    """Return whether the kernel is a fake one, or torch's own in a library of one kernel.

    Since 2.8, `allow_override` lets a program replace such a kernel. The dispatcher then lists two.
    """
    if (id(holder), kernel) in _usual:
        return True
    place, _, key = kernel.rpartition("/")
    name = place.replace("/", "::")
    if key == "Meta":
        count = len(fakes_of(name))
    else:
        is_alone = kernel in _ALONE or (key == "Autograd" and place in _GRADIENTS)
        count = int(is_alone and any(each is holder for each in library._keep_alive))
    lines = torch._C._dispatch_dump(name).splitlines() if count else []
    if count == 0 or count != sum(re.match(rf"{key}\b", line) is not None for line in lines):
        return False
    _usual.add((id(holder), kernel))
    return True


def operations_of_program() -> frozenset[str]:
    """Return the operations, without overloads, that a program defined in torch's namespaces."""
    names = [name for each in _find_libraries()[1] for name in each._op_defs]
    return frozenset(name.partition(".")[0] for name in names) - _OPERATIONS_OF_TORCH


def changed_definitions() -> list[CustomOpDef]:
    """Return torch's definitions of operations that a program extended."""
    definitions = _definitions()
    own, (tables, disabled) = _held.of(
        [vars(each) for each in definitions],
        lambda: (
            [getattr(each, name, {}) for each in definitions for name in _TABLES],
            [each._disabled_kernel for each in definitions],
        ),
    )
    state = [own, _versions_of_held.state(tables), *chain.from_iterable(disabled)]
    known = _known_definitions[0]
    if known[0] != state:
        changed = [each for each in definitions if _is_changed(each)]
        _known_definitions[0] = known = (state, changed)
    return known[1]


def foreign_rules() -> list[tuple[str, Any]]:
    """Return a program's fake kernels and dispatch mode rules for torch's operations, labeled."""
    own = operations_of_program()
    table = simple_registry.singleton._data
    _, entries = _known_rules.of([table], lambda: list(table.items()))
    of_entries, holders = _known_holders.of(
        [vars(entry) for _, entry in entries],
        lambda: [
            vars(each)
            for _, entry in entries
            for each in (entry.fake_impl, entry.torch_dispatch_rules)
        ],
    )
    of_holders, (tables, lists) = _known_tables.of(
        holders,
        lambda: (
            [entry.torch_dispatch_rules._data for _, entry in entries],
            [vars(entry.fake_impl).get("kernels", ()) for _, entry in entries],  # 2.8 and later
        ),
    )
    state = [own, of_entries, of_holders, _versions_of_rules.state(tables)]
    state += chain.from_iterable(lists)
    return foreign_functions("rules", state, lambda: _iterate_rules(entries, own))


_known_rules: Final = TableCache[list[tuple[str, Any]]]()
_known_holders: Final = TableCache[list[dict[str, Any]]]()
_known_tables: Final = TableCache[tuple[list[dict[Any, Any]], list[Any]]]()
_versions_of_rules: Final = Versions()


def _iterate_rules(
    entries: list[tuple[str, Any]], own: frozenset[str]
) -> Iterator[tuple[Any, Any]]:
    for name, entry in entries:
        if is_torchs_namespace(name) and name.partition(".")[0] not in own:
            for kernel in fakes_of(name):
                yield ("fake", name), kernel
            for cls, rule in entry.torch_dispatch_rules._data.items():
                yield ("rule", name, cls.__qualname__), rule


def fakes_of(name: str) -> list[Any]:
    """Return the fake kernels of an operation. Before 2.8 there is at most one."""
    entry = simple_registry.singleton._data.get(name)
    held = {} if entry is None else vars(entry.fake_impl)
    kernel = held.get("kernel")
    found = [*([] if kernel is None else [kernel]), *(held.get("kernels") or ())]
    return [_unwrap_fake(each.func) for each in found]


def _unwrap_fake(function: Any) -> Any:
    """Return the fake kernel inside torch's wrapper, whose closure changes at the first call."""
    if getattr(function, "__qualname__", "") != "_check_pystubs_once.<locals>.inner":
        return function
    return inspect.getclosurevars(function).nonlocals["func"]


_held: Final = TableCache[tuple[list[dict[Any, Any]], list[set[str]]]]()
"""The tables and sets of disabled kernels in torch's definitions."""

_versions_of_held: Final = Versions()

_known_definitions: list[tuple[object, list[CustomOpDef]]] = [(None, [])]
"""Cache of `changed_definitions`: state of all that the definitions hold, and the result."""

_all_definitions: list[Any] = [[], []]
"""Cache of `_definitions`: weak references to all definitions, and the result."""


def _definitions() -> list[CustomOpDef]:
    """Return torch's own definitions of operations, which are never freed."""
    if (state := custom_ops.OPDEFS.valuerefs()) != _all_definitions[0]:
        found = [each for ref in state if (each := ref()) is not None]
        found = [each for each in found if is_torchs_namespace(each._namespace)]
        _all_definitions[:] = [state, [e for e in found if name_once(e._init_fn) is not None]]
    known: list[CustomOpDef] = _all_definitions[1]
    return known


def _is_changed(definition: CustomOpDef) -> bool:
    """Return whether a program extended a definition of torch."""
    values = [*vars(definition).values()]
    for name in _TABLES:
        values += getattr(definition, name, {}).values()
    return bool(definition._disabled_kernel) or any(
        isinstance(each, torch.dtype) or (callable(each) and name_once(each) is None)
        for each in values
    )


_owned_by_torch: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()
"""By library: whether torch holds it."""

_usual: set[tuple[int, str]] = set()
"""Cache of `_is_usual`: ID of the library, and kernel. Cleared when the finalizers change."""


def _find_libraries() -> tuple[list[Any], list[Any]]:
    """Return torch's libraries for ATen, and the program's libraries for operations of torch.

    torch's global set of kernel names does not show which library has a kernel, so a replaced
    kernel is not visible there. The libraries are found by their finalizers.
    """
    finalizers: Any = getattr(weakref.finalize, "_registry", None)
    if finalizers is None:
        raise UndescribableError("this Python does not list its finalizers")
    # Keep no values of this dictionary: they keep the arguments of their finalizers alive.
    tables, lists = ([finalizers], []) if HAS_VERSIONS else ([], [list(finalizers)])
    found = _known_libraries.of(tables, lambda: _read_libraries(finalizers), lists=lists)[1]
    return _live_libraries(found.of_torch), _live_libraries(found.of_program)


class _Libraries(NamedTuple):
    """The result of `_find_libraries`, as weak references.

    Attributes:
        finalizers: the finalizers that were read. The set keeps them alive, so that Python does not
            reuse their IDs, but they keep nothing else alive.
    """

    finalizers: frozenset[Any]
    of_torch: list[Any]
    of_program: list[Any]


_last_libraries = _Libraries(frozenset(), [], [])

_known_libraries: Final = TableCache[_Libraries]()


def _read_libraries(finalizers: dict[Any, Any]) -> _Libraries:
    """Add the libraries of finalizers that are new since the last call.

    torch makes finalizers for each graph, but almost never a library.
    """
    global _last_libraries  # noqa: PLW0603 - replaced as a whole: threads share it
    known, present = _last_libraries, list(finalizers)
    added = (finalizers.get(each) for each in filterfalse(known.finalizers.__contains__, present))
    entries = [each for each in added if each is not None and each.func is library._del_library]
    found = [each for entry in entries if (each := entry.weakref()) is not None]
    found = [each for each in found if each.ns == "_" or is_torchs_namespace(each.ns)]
    if any(each not in _owned_by_torch for each in found):
        held = {id(each) for each in _held_by_torch()}
        for each in found:
            _owned_by_torch.setdefault(each, id(each) in held)
    of_torch = [weakref.ref(each) for each in found if _owned_by_torch[each] and each.ns == "aten"]
    of_program = [weakref.ref(each) for each in found if not _owned_by_torch[each]]
    _usual.clear()
    _last_libraries = _Libraries(
        frozenset(present), known.of_torch + of_torch, known.of_program + of_program
    )
    return _last_libraries


def _live_libraries(libraries: list[Any]) -> list[Any]:
    held = [each for ref in libraries if (each := ref()) is not None]
    return [each for each in held if each.m is not None]  # None: the library was destroyed


def _held_by_torch() -> Iterator[library.Library]:
    """Yield the libraries in torch's modules, its definitions and all fake kernels.

    In 2.7, each fake kernel has a library, the program's too; `foreign_rules` returns that kernel.
    """
    modules = [
        list(vars(module).values())
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType)
    ]
    tables = {id(each): each for members in modules for each in _of_kind(dict, members)}
    tables.pop(id(custom_ops.OPDEF_TO_LIB), None)
    for members in (*modules, *(list(each.values()) for each in tables.values())):
        yield from _of_kind(library.Library, members)
    yield from (each._lib for each in _definitions())
    for entry in list(simple_registry.singleton._data.values()):
        if (held := getattr(entry.fake_impl, "lib", None)) is not None:
            yield held


def _of_kind(kind: type[_T], values: list[Any]) -> Iterator[_T]:
    """Yield the values of exactly one type, in C: torch's modules and tables have 70,000 values."""
    return compress(values, map(is_, map(type, values), repeat(kind)))
