"""Registrations for torch's own operations, which affect the compilation of every graph.

torch's keys hash torch's files, and thus torch's own registrations. Programs add lowerings,
decompositions, patterns and kernels to the same tables. This module describes torch's functions in
these tables by name and the user's by code, so even a removed entry changes the description.
"""

import sys
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain
from types import FrameType, ModuleType
from typing import Any, Final, TypeAlias

import torch
from torch._decomp import global_decomposition_table
from torch._decomp.decompositions_for_rng import extra_random_decomps
from torch._inductor import lowering
from torch._inductor.codegen import common
from torch._inductor.codegen.common import device_codegens
from torch._inductor.decomposition import decompositions
from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad, split_cat
from torch._inductor.pattern_matcher import PatternMatcherPass
from torch._inductor.virtualized import V
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from graphstash.hooks.code import CodeDescriber, UndescribableError
from graphstash.hooks.inductor.kernels import check_kernels, foreign_rules
from graphstash.hooks.inductor.origins import (
    foreign_functions,
    foreign_in,
    is_torchs,
    is_torchs_namespace,
    name_once,
)
from graphstash.hooks.inductor.tables import changed_table
from graphstash.hooks.inductor.versions import TableCache, Versions

__all__ = [
    "OF_USER",
    "compilers_of",
    "is_torchs_operator",
    "kernels_of_operator",
    "registered_for_torch",
    "tables",
]

_TABLES_OF_PASSES: Final = ("PRE_GRAD_PATTERNS", "POST_GRAD_PATTERNS")
"""Tables of passes in `split_cat`."""

OF_USER: Final = "lowering of the user"
"""Name of the table of `register_custom_op_autotuning` (2.15). Its functions are closures of torch
around objects of torch that hold the user's functions, so they look like torch's."""

_user_lowerings: Final[dict[Any, Any] | None] = getattr(lowering, "user_lowerings", None)

_TABLES_OF_DEVICES: Final = ("custom_backend_passes", "device_op_overrides_dict")
"""Tables in `common` with an object for each device. torch 2.7 lacks the first one."""

_COMPILERS: Final = ("fw_compiler", "bw_compiler", "inference_compiler", "partition_fn")


def tables() -> Iterator[tuple[str, Any]]:
    """Yield the tables of functions by operation, each with its name."""
    yield "lowering", lowering.lowerings
    if _user_lowerings is not None:
        yield OF_USER, _user_lowerings
    yield "decomposition", decompositions
    yield "decomposition of random numbers", extra_random_decomps
    for name, table in global_decomposition_table.items():
        yield f"decomposition.{name}", table


def registered_for_torch(describer: CodeDescriber) -> Iterator[str]:
    """Describe the registrations for torch's own operations, one line each.

    Raises:
        UndescribableError: a registration has no description.
    """
    check_kernels()
    if table := changed_table():
        raise UndescribableError(f"a program changed the table {table}")
    digest, foreign = _table_entries()
    yield digest
    of_user = (*_foreign_kernels(), *_foreign_patterns(), *_foreign_constraints())
    for label, function in (*foreign, *of_user, *_foreign_backends(), *foreign_rules()):
        yield f"{label}={describer.registered(function)}"
    if (handler := _user_choices()) is not None:
        yield f"choices={describer.describe(handler)}"


def compilers_of(describer: CodeDescriber, settings: Any) -> Iterator[str]:
    """Describe the functions that a backend passes to AOTAutograd instead of Inductor's.

    Raises:
        UndescribableError: a function has no description.
    """
    given = _passed_compilers(settings)
    # torch may have copied its table before a program changed an entry: describe the differences.
    for target, function in _changed_decompositions(given.get("decompositions") or {}):
        name = describer.registered(function) if _is_foreign(function) else name_once(function)
        yield f"given {_target_name(target)}={name}"
    for name in _COMPILERS:
        for each in foreign_in(given.get(name), set()):
            yield f"{name}={describer.registered(each)}"


def _changed_decompositions(table: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the decompositions in a table that differ from torch's present ones."""
    if table is decompositions:
        return []

    def read() -> list[tuple[Any, Any]]:
        present = {**decompositions, **extra_random_decomps}
        targets = present.keys() | table.keys() if table != present else ()
        # Sort by name: the order of a set of operations differs in each process.
        return [
            (target, function)
            for target in sorted(targets, key=_target_name)
            if (function := table.get(target)) is not present.get(target)
        ]

    return _known_differing.of([table, decompositions, extra_random_decomps], read)[1]


_known_differing: Final = TableCache[list[tuple[Any, Any]]]()


def is_torchs_operator(operator: HigherOrderOperator) -> bool:
    """Return whether a higher-order operator and all its kernels belong to torch."""
    return name_once(type(operator)) is not None and all(
        name_once(each) is not None for _, each in kernels_of_operator(operator)
    )


def kernels_of_operator(operator: HigherOrderOperator) -> list[tuple[Any, Any]]:
    """Return the Python kernels of a higher-order operator, each with its key."""
    held = (operator.py_kernels, operator.python_key_table, operator.functorch_table)
    return [pair for each in held for pair in list(each.items())]


def _passed_compilers(settings: Any) -> dict[str, Any]:
    """Return the compilers passed to AOTAutograd: from its settings, or from this thread's call.

    Raises:
        UndescribableError: neither has a forward compiler.
    """
    held = {name: getattr(settings, name, None) for name in ("decompositions", *_COMPILERS)}
    # Never this function's own frame: the cycle would keep the variables of all callers.
    frame: FrameType | None = sys._getframe(1)
    while held["fw_compiler"] is None:
        if frame is None:
            raise UndescribableError("the compilers of a backend are not known")
        if frame.f_globals.get("__name__") == "torch._functorch.aot_autograd":
            held |= {name: frame.f_locals[name] for name in held if name in frame.f_locals}
        frame = frame.f_back
    return held


def _table_entries() -> tuple[str, list[tuple[str, Any]]]:
    """Return a digest of torch's functions in the tables, and the other functions."""
    return _known_entries.of([table for _, table in tables()], _read_entries)[1]


_known_entries: Final = TableCache[tuple[str, list[tuple[str, Any]]]]()


def _read_entries() -> tuple[str, list[tuple[str, Any]]]:
    names: list[str] = []
    foreign: list[tuple[str, Any]] = []
    for label, table in tables():
        for target, function in list(table.items()):
            if not is_torchs_namespace(_namespace_of(target)):
                continue
            name = None if label == OF_USER else name_once(function)
            if name is None:
                foreign.append((f"{label} {target}", function))
                continue
            # Inductor adds these when it first compiles an operation without a lowering. A process
            # that finds its graphs in the cache lacks them.
            if not name.startswith("function torch._inductor.lowering.fallback_handler."):
                names.append(f"{label} {_target_name(target)} {name}")
    digest = sha256("\n".join(sorted(names)).encode()).hexdigest()
    return f"tables {digest}", foreign


def _namespace_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, HigherOrderOperator):
        return "higher_order"
    return str(getattr(target, "namespace", "") or getattr(target, "_qualified_op_name", "aten"))


def _target_name(target: Any) -> str:
    name = getattr(target, "__name__", "")
    return str(target) if isinstance(target, (OpOverload, OpOverloadPacket, str)) else name


def _is_foreign(function: Any) -> bool:
    return function is not None and not is_torchs(function)


def _torch_namespaces() -> list[dict[str, Any]]:
    held = vars(torch.ops)
    return _known_namespaces.of(
        [held], lambda: [vars(held[name]) for name in list(held) if is_torchs_namespace(name)]
    )[1]


_known_namespaces: Final = TableCache[list[dict[str, Any]]]()


def _packets() -> list[dict[str, Any]]:
    """Return the overloads of each torch operation that was used so far."""
    held = _torch_namespaces()
    return _known_packets.of(
        held,
        lambda: [
            vars(each)
            for namespace in held
            for each in list(namespace.values())
            if isinstance(each, OpOverloadPacket)
        ],
    )[1]


_known_packets: Final = TableCache[list[dict[str, Any]]]()


def _operations() -> tuple[list[OpOverload], list[dict[Any, Any]]]:
    """Return all overloads, and the Python kernels of each."""
    packets = _packets()
    return _known_operations.of(packets, lambda: _read_operations(packets))[1]


_known_operations: Final = TableCache[tuple[list[OpOverload], list[dict[Any, Any]]]]()


def _read_operations(
    packets: list[dict[str, Any]],
) -> tuple[list[OpOverload], list[dict[Any, Any]]]:
    found = [each for packet in packets for each in list(packet.values())]
    operations = [each for each in found if isinstance(each, OpOverload)]
    return operations, [each.py_kernels for each in operations]


_versions_of_kernels: Final = Versions()


def _foreign_kernels() -> list[tuple[str, Any]]:
    """Return the kernels that programs registered for torch's operations with `py_impl`."""
    operations, tables_of_kernels = _operations()
    state = _versions_of_kernels.state(tables_of_kernels)
    return foreign_functions(
        "kernels",
        state,
        lambda: (
            ((operation, key), kernel)
            for operation, kernels in zip(operations, tables_of_kernels, strict=True)
            for key, kernel in kernels.items()
            if not isinstance(kernel, torch._C.DispatchKey)
        ),
    )


_Passes: TypeAlias = list[tuple[tuple[str, str, Any], PatternMatcherPass]]
"""Inductor's passes, each with its module, its name and its index or key there."""


def _find_passes() -> tuple[object, _Passes]:
    """Return the state of torch's modules that hold passes, and the passes."""
    modules = [joint_graph, post_grad, pre_grad]
    held = [vars(each) for each in modules]
    _, lists = _known_lists.of(
        held,
        lambda: [each for table in held for each in list(table.values()) if isinstance(each, list)],
    )
    named = {name: getattr(split_cat, name, {}) for name in _TABLES_OF_PASSES}
    tables = [*held, *named.values()]
    return _known_passes.of(tables, lambda: _read_passes(modules, named), lists=lists)


_known_lists: Final = TableCache[list[list[Any]]]()
_known_passes: Final = TableCache[_Passes]()


def _read_passes(modules: list[ModuleType], named: dict[str, Any]) -> _Passes:
    found = [
        ((module.__name__, name, at), each)
        for module in modules
        for name, value in list(vars(module).items())
        for at, each in enumerate(value if isinstance(value, list) else [value])
    ]
    found += [
        ((split_cat.__name__, name, own), each)
        for name, table in named.items()
        for own, each in list(table.items())
    ]
    return [(place, each) for place, each in found if isinstance(each, PatternMatcherPass)]


def _foreign_patterns() -> list[tuple[str, Any]]:
    """Return the user's functions in the patterns of Inductor's graph passes."""
    of_passes, passes = _find_passes()
    tables = [each.patterns for _, each in passes]
    of_tables, lists = _known_patterns.of(
        tables, lambda: list(chain.from_iterable(list(each.values()) for each in tables))
    )
    # A program may change a list while its table holds the same list.
    state = [of_passes, of_tables, *map(len, lists), *chain.from_iterable(lists)]
    return foreign_functions(
        "patterns",
        state,
        lambda: (
            (("pattern", *place, entry.pattern), held)
            for (place, _), table in zip(passes, tables, strict=True)
            for entry in chain.from_iterable(list(table.values()))
            for name in ("extra_check", "handler", "normalize_args")
            if (held := getattr(entry, name, None)) is not None
        ),
    )


_known_patterns: Final = TableCache[list[list[Any]]]()


def _foreign_constraints() -> list[tuple[str, Any]]:
    """Return the layout constraints that programs added to torch's own operations."""
    table: dict[Any, Any] = getattr(lowering, "_maybe_layout_constraints", {})
    return foreign_functions(
        "constraints",
        [*table, *table.values()],
        lambda: (
            (("layout", operation), constraint)
            for operation, constraint in list(table.items())
            if constraint is not None and is_torchs_namespace(_namespace_of(operation))
        ),
    )


def _foreign_backends() -> list[tuple[str, Any]]:
    """Return the user's classes that generate code for a device, and its passes for a device."""
    entries = list(device_codegens.items())
    others = [
        ((table, device), held)
        for table in _TABLES_OF_DEVICES
        for device, held in list(getattr(common, table, {}).items())
        if held is not None
    ]
    return foreign_functions(
        "backends",
        [entries, others],
        lambda: (
            *(
                (("backend", device, name), held)
                for device, entry in entries
                for name, held in vars(entry).items()
                if held is not None
            ),
            *others,
        ),
    )


def _user_choices() -> Any:
    """Return the user's handler of Inductor's choices, or None for torch's handler."""
    handler: Any = V.choices
    return None if type(handler).__module__.partition(".")[0] == "torch" else handler
