"""Describe the functions, methods and classes that a program replaced inside torch's compiler.

torch's keys hash torch's files. They do not change if a program assigns its own function to a
module or a class of torch, such as `torch._inductor.graph.GraphLowering.run = mine`. This module
detects a program's function by the file of its code, even if the program assigned it before the
hook was installed. It also compares each class with its methods at the first reading, and so
detects that a method was deleted or replaced by another method of torch.

It does not detect that a program assigns code to a function (`f.__code__ = ...`), replaces an
object of a class of torch or a value that is neither callable nor a descriptor, or changes a list
or dictionary. `registries` describes the tables of functions by operation.

Every key contains this description, and the compiler has about 1,400 modules and classes with
30,000 members. Comparing their versions takes 0.1 ms, comparing all members 2 ms, see `versions`.
"""

import ctypes
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, partial, partialmethod, singledispatchmethod
from gc import get_referents
from itertools import compress, count
from operator import is_not, ne
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from graphstash.hooks.code import CodeDescriber, UndescribableError, content_of, package_of
from graphstash.hooks.inductor.origins import PACKAGES, is_torchs_namespace, name_once
from graphstash.hooks.inductor.versions import HAS_VERSIONS, version_of

__all__ = ["replaced_in_torch"]

_COMPILER: Final = (
    *("torch._decomp", "torch._dispatch", "torch._dynamo.backends", "torch._dynamo.utils"),
    *("torch._dynamo.device_interface", "torch._functorch", "torch._guards"),
    *("torch._higher_order_ops", "torch._inductor", "torch._library", "torch._meta_registrations"),
    *("torch._native", "torch._ops", "torch._prims", "torch._prims_common", "torch._refs"),
    *("torch._subclasses", "torch.fx", "torch.utils._ordered_set", "torch.utils._python_dispatch"),
    *("torch.utils._pytree", "torch.utils._sympy", "torch.utils._triton"),
)
"""Packages and modules that take part in compiling a graph after torch has made its key."""

_GENERATED: Final = "torch._inductor.runtime.compile_tasks."
"""Package of the modules that Inductor generates."""

_IMPORTED: Final = PACKAGES | {
    *("ck4inductor", "cuda", "cutlass", "cutlass_cppgen", "cutlass_library", "einops", "filelock"),
    *("flash_attn", "halide", "jinja2", "libfb", "mpmath", "mtia", "networkx", "numpy", "optree"),
    *("origami", "packaging", "psutil", "pycute", "pydot", "redis", "rich", "scipy", "tabulate"),
    *("torch_xla", "tqdm", "triton", "tvm_ffi", "typing_extensions", "yaml", "z3"),
}
"""Packages from which torch's modules import functions (2.7 to 2.15), and torch_xla, which replaces
functions of torch."""

_TRANSPARENT: Final = frozenset({"tensordict"})
"""Packages whose replacements of torch's functions differ from them only for containers of the
package, which no graph contains. The key contains a digest of the package's files."""

_SKIPPED: Final = frozenset({"__builtins__", "__loader__", "__spec__"})
"""Names in a module that Python or a test runner assigns."""

_ASSIGNED: Final = frozenset({"torch.fx.graph_module._CodeOnlyModule.forward"})
"""Members that torch assigns right before it reads them, each time it unpickles a graph."""

_DATA: Final = frozenset(
    {
        *(bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset),
        *(type(None), type(Ellipsis), ModuleType),
    }
)
"""Types of values that hold no code, or whose contents are not compared."""

_MAX_DEPTH: Final = 6

_FOLDER: Final = str(Path(torch.__file__).parent)
"""Beginning of `co_filename` in torch's code: Python takes it from the module's `__file__`."""

_ABSENT: Final = object()


class _Owner(NamedTuple):
    """A module or class: its name, its members, and its members at the first reading."""

    place: str
    table: dict[str, Any]
    first: dict[str, Any]


class _State(NamedTuple):
    """The last reading. Immutable, because several threads may compile.

    Attributes:
        last: number of all modules of the process, and the name of the last one.
        versions: where CPython keeps the version of each owner's dictionary.
        signature: the versions, as bytes.
        found: by number of an owner: its replaced members.
    """

    modules: dict[str, ModuleType]
    last: tuple[int, str]
    owners: list[_Owner]
    versions: list[ctypes.c_uint64]
    signature: bytes
    values: list[dict[str, Any]]
    found: dict[int, list[tuple[str, Any]]]


_state = _State({}, (0, ""), [], [], b"", [], {})


def replaced_in_torch(describer: CodeDescriber) -> Iterator[str]:
    """Describe what a program replaced inside torch's compiler, one line each. Raises
    `UndescribableError` with the place of a replacement that has no description.
    """
    for place, value in _find_replaced():
        try:
            yield f"{place}={_describe(describer, value)}"
        except UndescribableError as error:
            raise UndescribableError(f"a program replaced {place}: {error}") from error


def _describe(describer: CodeDescriber, value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if (name := None if _is_foreign(value) else name_once(value)) is not None:
        return name
    if type(value).__module__ == "functools" and hasattr(value, "cache_parameters"):
        return f"cached {value.cache_parameters()} {_describe(describer, value.__wrapped__)}"
    if isinstance(value, FunctionType) and _is_transparent(value):
        return f"{value.__module__}.{value.__qualname__} {_digest_of(package_of(value))}"
    for each in _walk(value):
        module = each.__globals__.get("__name__") if isinstance(each, FunctionType) else None
        if str(module).startswith("torch.") and not _is_in_torch(each, str(module)):
            # A describer would name this function as torch's, without its code.
            raise UndescribableError(f"{each.__qualname__} runs as a part of {module}")
    return describer.registered(value)


def _is_transparent(function: FunctionType) -> bool:
    """Return whether a function and the functions that it reads are of one of these packages, or of
    torch, and the program has not replaced them.
    """
    package = package_of(function)
    if package not in _TRANSPARENT:
        return False
    members = function.__globals__
    read = [function, *(members.get(name) for name in function.__code__.co_names)]
    return all(
        _is_code_of(each, package) or not _is_foreign(each)
        for each in read
        if isinstance(each, FunctionType)
    )


def _is_code_of(function: FunctionType, package: str) -> bool:
    return package_of(function) == package and Path(function.__code__.co_filename).is_relative_to(
        _folder_of(package)
    )


def _folder_of(package: str) -> Path:
    return Path(str(sys.modules[package].__file__)).parent


@cache
def _digest_of(package: str) -> str:
    folder = _folder_of(package)
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _walk(value: Any, depth: int = 0) -> Iterator[Any]:
    yield value
    if depth < _MAX_DEPTH:
        for each in _held_by(value):
            yield from _walk(each, depth + 1)


def _find_replaced() -> list[tuple[str, Any]]:
    """Return the replaced members, each with its place, sorted by place."""
    global _state  # noqa: PLW0603 - replaced as a whole: no thread sees a part of a new state
    state = _with_new_modules(_state)
    state = _state = _with_changes(state)
    found = [
        (place, value)
        for number, members in state.found.items()
        for name, value in members
        if (place := f"{state.owners[number].place}.{name}") not in _ASSIGNED
    ]
    return sorted(found, key=lambda each: each[0])


def _with_new_modules(state: _State) -> _State:
    """Return the state with the modules that were imported or replaced since."""
    last = (len(sys.modules), next(reversed(sys.modules)))
    if last == state.last:
        return state
    names: list[str] = []
    for name in reversed(sys.modules):
        if name == state.last[1] and last[0] - len(names) == state.last[0]:
            break
        names.append(name)
    modules = {
        name: module
        for name in reversed(names)
        if _is_of_compiler(name) and isinstance(module := sys.modules.get(name), ModuleType)
    }
    new = [
        (name, vars(module))
        for name, module in modules.items()
        if state.modules.get(name) is not module
    ]
    return _with_owners(state, new)._replace(last=last, modules={**state.modules, **modules})


def _is_of_compiler(name: str) -> bool:
    return (
        name.startswith("torch.")
        and f"{name}.".startswith(_PREFIXES)
        and not name.startswith(_GENERATED)
    )


_PREFIXES: Final = tuple(f"{each}." for each in _COMPILER)


def _with_owners(state: _State, new: list[tuple[str, dict[str, Any]]]) -> _State:
    if not new:
        return state
    owners, versions = list(state.owners), list(state.versions)
    signature, values = [state.signature], list(state.values)
    found = dict(state.found)
    present = {id(each.table) for each in owners}
    known: set[int] = set()
    while new:
        place, table = new.pop()
        if id(table) in present:
            continue
        present.add(id(table))
        version = version_of(table)
        signature.append(bytes(version))  # before the values: a later change is then seen
        versions.append(version)
        owner = _Owner(place, table, dict(table))
        values.append(owner.first)
        if replaced := _foreign_among(owner.first, known):
            found[len(owners)] = replaced
        owners.append(owner)
        new += _classes_in(owner.first)
    return state._replace(
        owners=owners,
        versions=versions,
        signature=b"".join(signature),
        values=values,
        found=found,
    )


def _classes_in(members: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the classes of the compiler among some members, each with its place and members."""
    for value in members.values():
        if isinstance(value, type) and _is_of_compiler(module := str(value.__module__)):
            # `vars` returns a view, which has no version.
            yield f"{module}.{value.__qualname__}", get_referents(vars(value))[0]


def _with_changes(state: _State) -> _State:
    """Return the state with the present members of the owners that have changed."""
    if HAS_VERSIONS:
        signature = b"".join(state.versions)
        if signature == state.signature:
            return state
        changed: Iterable[int] = _numbers_of_changed(state.signature, signature)
    else:
        signature, changed = state.signature, range(len(state.owners))
    values, found = list(state.values), dict(state.found)
    new: list[tuple[str, dict[str, Any]]] = []
    for number in changed:
        owner, before = state.owners[number], values[number]
        values[number] = now = dict(owner.table)
        if not (differing := _changed_members(before, now)):
            continue
        kept = [each for each in found.pop(number, ()) if each[0] not in differing]
        if replaced := kept + _replaced_among(differing, owner):
            found[number] = replaced
        new += _classes_in(differing)
    changed_state = state._replace(signature=signature, values=values, found=found)
    return _with_owners(changed_state, new)


def _numbers_of_changed(before: bytes, now: bytes) -> Iterator[int]:
    """Yield the numbers of the owners whose versions differ. Compares blocks first, because torch
    changes about ten owners for each graph.
    """
    for start in range(0, len(now), _BLOCK):
        old, new = before[start : start + _BLOCK], now[start : start + _BLOCK]
        if old != new:
            versions = (memoryview(each).cast("Q") for each in (old, new))
            yield from compress(count(start // 8), map(ne, *versions))


_BLOCK: Final = 8 * 64


def _changed_members(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the members that differ. Omit data: torch changes its counters for each graph."""
    if [*before] == [*now]:
        differ = list(map(is_not, now.values(), before.values()))
        pairs = zip(compress(now.values(), differ), compress(before.values(), differ), strict=True)
        found = dict(zip(compress(now, differ), pairs, strict=True))
    else:
        names = dict.fromkeys((*before, *now))
        each = {name: (now.get(name, _ABSENT), before.get(name, _ABSENT)) for name in names}
        found = {name: pair for name, pair in each.items() if pair[0] is not pair[1]}
    return {
        name: value
        for name, (value, other) in found.items()
        if not (type(value) in _DATA and type(other) in _DATA)
    }


def _foreign_among(members: dict[str, Any], known: set[int]) -> list[tuple[str, Any]]:
    """Return the members that are a program's. Adds the IDs of torch's members to `known`."""
    found = []
    for name, value in members.items():
        kind = type(value)
        if kind in _DATA or kind in _known_kinds or id(value) in known:
            continue
        if (
            kind is FunctionType
            and value.__closure__ is None
            and value.__code__.co_filename in _known_files
            and id(value.__globals__) in _known_globals
        ):
            continue  # most members
        if name not in _SKIPPED and _is_foreign(value):
            found.append((name, value))
        else:
            known.add(id(value))
    return found


def _replaced_among(differing: dict[str, Any], owner: _Owner) -> list[tuple[str, Any]]:
    """Return the members that are a program's, and the methods that it replaced or deleted."""
    found = _foreign_among(differing, set())
    if "__spec__" in owner.first:  # a module: Dynamo itself replaces functions there for a while
        return found
    named = {name for name, _ in found}
    found += [
        (name, value)
        for name, value in differing.items()
        if name not in named and _is_replaced(owner.first.get(name, _ABSENT), value)
    ]
    return found


def _is_replaced(before: Any, now: Any) -> bool:
    """Return whether a function of torch was deleted or replaced by another one."""
    if before is now or not isinstance(before, _METHODS):
        return False
    if not _ADAPTERS.isdisjoint({_root_package(before), _root_package(now)}) or _is_foreign(before):
        return False
    # When torch first compiles, it disables Dynamo for some of its functions.
    return _without_dynamo(before) is not _without_dynamo(now)


_METHODS: Final = (FunctionType, type, staticmethod, classmethod, property)

_ADAPTERS: Final = frozenset({"graphstash", "torch_xla"})
"""Packages that replace functions of torch without a change of any graph."""


def _without_dynamo(value: Any) -> Any:
    """Return the function inside `torch.compiler.disable`."""
    while isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable"):
        value = value._torchdynamo_orig_callable
    return value


def _is_foreign(value: Any, depth: int = 0) -> bool:
    """Return whether a value is code of a program, or wraps such code."""
    if is_function := type(value) is FunctionType:
        is_foreign = _is_function_foreign(value)
    elif isinstance(value, (type, BuiltinFunctionType)):
        is_foreign = _is_module_foreign(str(value.__module__ or "builtins"))
    elif isinstance(value, _OPERATIONS):
        is_foreign = not is_torchs_namespace(_namespace_of(value))
    elif isinstance(value, _WRAPPERS) or _is_wrapper(value):
        is_foreign = False
    else:
        return _is_object_foreign(value)
    return is_foreign or (
        depth < _MAX_DEPTH
        and (is_function or not isinstance(value, _HOLD_NOTHING))
        and any(
            type(each) not in _DATA and _is_foreign(each, depth + 1) for each in _held_by(value)
        )
    )


_OPERATIONS: Final = (OpOverload, OpOverloadPacket, CustomOpDef)
_HOLD_NOTHING: Final = (type, *_OPERATIONS)


def _namespace_of(operation: Any) -> str:
    names = ("_namespace", "namespace", "_qualified_op_name")
    return next(str(found) for name in names if (found := getattr(operation, name, "")))


def _is_object_foreign(value: Any) -> bool:
    """Return whether an object that wraps no function is a program's callable or descriptor."""
    module = str(type(value).__module__)
    if not _is_module_foreign(module) and module != "unittest.mock":
        _known_kinds.add(type(value))
        return False
    return callable(value) or hasattr(type(value), "__get__")


_known_kinds: Final[set[type]] = set()
"""Classes of torch, and of the packages it imports, whose objects wrap no functions."""

_WRAPPERS: Final = (
    *(staticmethod, classmethod, property, MethodType, partial, partialmethod),
    *(cached_property, singledispatchmethod),
)


def _is_wrapper(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "functools" or kind.__module__.startswith("triton.")


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, FunctionType):
        held = [content_of(cell) for cell in value.__closure__ or ()]
        return [each for each in held if callable(each) or isinstance(each, _WRAPPERS)]
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__) if callable(value.__self__) else (value.__func__,)
    names = ("func", "__func__", "__wrapped__", "fn")
    return [each for name in names if (each := getattr(value, name, None)) is not None]


def _is_function_foreign(function: FunctionType) -> bool:
    module = function.__globals__.get("__name__")
    if not isinstance(module, str):
        return not _is_generated_by_torch(function)
    if _is_module_foreign(module):
        return True
    return module.startswith("torch.") and not _is_in_torch(function, module)


def _is_in_torch(function: FunctionType, module: str) -> bool:
    """Return whether a function has the globals of a torch module and code from a torch file."""
    if id(function.__globals__) not in _known_globals:
        if function.__globals__ is not vars(sys.modules.get(module, ModuleType(""))):
            return False
        _known_globals[id(function.__globals__)] = function.__globals__
    file, name = function.__code__.co_filename, function.__name__
    if file in _known_files:
        return True
    if file.startswith(_FOLDER):
        _known_files.add(file)
        return True
    return file.startswith("<") and name.startswith("__") and name.endswith("__")  # `dataclass`


_known_files: Final[set[str]] = set()
"""Files of torch's code. A look-up is quicker than a comparison of the folder."""

_known_globals: Final[dict[int, dict[str, Any]]] = {}
"""By ID: the members of torch's modules."""


def _is_generated_by_torch(function: FunctionType) -> bool:
    """Return whether Inductor generated this function, which has no module."""
    code, held = function.__code__, function.__globals__.get("fn")
    if held is not None:  # `cache_on_self`
        return isinstance(held, FunctionType) and not _is_foreign(held)
    return code.co_names == ("_default",)  # `DefaultHandler`


@cache
def _is_module_foreign(module: str) -> bool:
    root = module.partition(".")[0]
    return root not in _IMPORTED and not root.startswith("namedtuple_")


def _root_package(value: Any) -> str:
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return package_of(value)
    module = value.__module__ if isinstance(value, type) else type(value).__module__
    return str(module).partition(".")[0]
