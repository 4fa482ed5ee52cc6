"""What a program has replaced or added inside Triton.

Triton's key hashes Triton's files. It does not change if a program replaces a function of Triton's
library, a pass of a compiler or a number in a module. This module remembers the members of Triton's
modules and classes when they are first seen: those that Triton imports itself before the hook is
installed, and others at the next look-up of a kernel. It also remembers the contents of tables,
such as the table of compilers, and the code and defaults of functions.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, Final

from triton.backends import backends

from graphstash.hooks.code import package_of

__all__ = ["changed_in_place", "globals_of", "replaced_members"]

_OWN: Final = frozenset(
    {
        # Triton and Python assign these while they run.
        *("__cache_cls", "__cache_cls_nme", "_allocator", "_profile_allocator", "_abc_impl"),
        *("__warningregistry__", "__annotations__", "__annotations_cache__", "__doc__"),
        "__slotnames__",  # of a class, after a copy of an object of the class
        "__builtins__",  # a table of Python, to which notebooks and test runners add names
        # Triton calls these around a compilation. They change no kernel.
        *("cache_hook", "compiled_hook", "jit_cache_hook", "jit_post_compile_hook"),
        # These choose arguments and options, which keys contain.
        *("autotune", "heuristics", "Autotuner", "Config", "Heuristics"),
        # Triton calls these around a launch, and assigns these while it profiles one.
        *("launch_enter_hook", "launch_exit_hook", "profiling_on", "command_line"),
        # Tables that Triton fills while it runs. `modules` is that of Python.
        *("_triton_jit_function_registry", "dtype2str", "modules", "specialize_impl_cache"),
        *("_value2member_map_", "active_hooks"),
        "iterator",  # pybind11 adds this class when a C++ list is iterated first
    }
)
"""Members whose values may change without a change of any kernel."""

_OF_LAUNCHES: Final = re.compile(
    r"triton\.((backends\.\w+|runtime)\.driver|runtime\.autotuner|testing)"
)
"""Modules that find a GPU, and that launch, tune and measure kernels on it. Triton assigns their
members when a GPU starts. They change no kernel: keys contain the GPU, arguments and options for
which they ask Triton to compile."""

_ABSENT: Final = object()

_known: Final[dict[str, tuple[Mapping[str, Any], list[int], dict[str, Any]]]] = {}
"""By name of a module or class: its present members, their first IDs, and the members of Triton."""

_tables: Final[dict[str, tuple[Any, list[Any], list[int]]]] = {}
"""By place of a table in Triton: the table, its first contents, and their IDs, or none if a program
has changed the table before.
"""

_functions: Final[list[tuple[str, FunctionType]]] = []
"""Triton's functions, each with its place."""

_parts: Final[list[tuple[Any, ...]]] = []
"""The parts of each of these functions that a program can assign, as they were first."""


_kernels: Final[list[tuple[str, Any, tuple[Any, ...]]]] = []
"""Triton's functions in its own language: place, function, and text and options at first."""


def replaced_members() -> Iterator[tuple[str, Any]]:
    """Yield each member that is not Triton's, or has another text: its place, and its value. None:
    it was deleted.
    """
    _remember(len(sys.modules))
    for place, (present, ids, members) in _known.items():
        if [*map(id, present.values())] == ids:
            continue
        for name in sorted({*members, *present} - _OWN):
            value = present.get(name)
            is_expected = _root_of(value) == "graphstash" or _is_submodule(place, name, value)
            if not is_expected and value is not members.get(name, _ABSENT):
                yield f"{place}.{name}", value
    for place, kernel, before in _kernels:
        if _text_and_options(kernel) != before:
            yield f"text of {place}", kernel


def changed_in_place() -> str:
    """Return the place of a table or function that a program has changed, or an empty string."""
    _remember(len(sys.modules))
    for place, (table, _, ids) in _tables.items():
        if [*map(id, _contents_of(table))] != ids:
            return place
    present = [(f.__code__, f.__defaults__, f.__kwdefaults__) for _, f in _functions]
    if present == _parts:
        return ""
    return next(
        place
        for (place, _), before, now in zip(_functions, _parts, present, strict=True)
        if before != now
    )


@lru_cache(maxsize=1)
def _remember(_module_count: int) -> None:
    """Remember the members of modules that were loaded since the last call."""
    for name, owner in _owners():
        if name not in _known:
            present = dict(owner)
            members = {key: each for key, each in present.items() if not _is_foreign(each)}
            ids = [*map(id, present.values())] if len(members) == len(present) else []
            _known[name] = (owner, ids, members)
            for key, each in members.items():
                if key not in _OWN:
                    _remember_parts(f"{name}.{key}", each)


def _remember_parts(place: str, value: Any) -> None:
    """Remember what a table contains, or what a program can assign in a function."""
    value = getattr(value, "__func__", value)  # static and class methods
    if type(value) in (dict, list, set):
        contents = _contents_of(value)
        is_tritons = not any(map(_is_foreign, contents))
        _tables[place] = (value, contents, [*map(id, contents)] if is_tritons else [])
    elif type(value) is FunctionType:
        _functions.append((place, value))
        _parts.append((value.__code__, value.__defaults__, value.__kwdefaults__))
    elif type(value).__module__ == "triton.runtime.jit":
        _kernels.append((place, value, _text_and_options(value)))


def _text_and_options(kernel: Any) -> tuple[Any, ...]:
    return tuple(getattr(kernel, name, None) for name in ("src", "noinline", "debug"))


def _contents_of(table: Any) -> list[Any]:
    return [*table, *table.values()] if type(table) is dict else [*table]


def _is_submodule(place: str, name: str, value: Any) -> bool:
    """Return whether a value is a module of Triton that Python stored when it was imported."""
    return isinstance(value, ModuleType) and value is sys.modules.get(f"{place}.{name}")


def _owners() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the members of Triton's modules and of their classes, each with its name."""
    for name, members in _modules():
        yield name, members
        own = members.get("__name__")
        for value in list(members.values()):
            if isinstance(value, type) and value.__module__ == own:
                yield f"{name}.{value.__qualname__}", vars(value)


def _modules() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, module in sorted(sys.modules.items()):
        is_tritons = name.partition(".")[0] == "triton" and isinstance(module, ModuleType)
        if is_tritons and not _OF_LAUNCHES.fullmatch(name):
            yield name, vars(module)
    for name, backend in backends.items():
        # Triton 3.3 loads the modules of its compilers without an entry in `sys.modules`.
        if backend.compiler.__module__ == name:
            yield f"triton.backends.{name}.compiler of Triton", globals_of(backend.compiler)


def globals_of(compiler: type) -> Mapping[str, Any]:
    """Return the members of the module that defines a compiler."""
    function = next(each for each in vars(compiler).values() if type(each) is FunctionType)
    return function.__globals__


def _is_foreign(value: Any) -> bool:
    root = _root_of(value)
    own = {"", "triton", "graphstash", *backends}  # names of modules, see `_modules`
    return root not in own and root not in sys.stdlib_module_names


def _root_of(value: Any) -> str:
    """Return the package of a function, kernel or class; an empty string for any other value."""
    if isinstance(value, type):
        return value.__module__.partition(".")[0]
    if type(value).__module__ == "triton.runtime.jit":
        value = getattr(value, "fn", value)
    value = getattr(value, "__func__", value)  # static and class methods
    # A function that `dataclass` generates in a module outside `sys.modules` has no package.
    return package_of(value) if isinstance(value, FunctionType) else ""


_remember(len(sys.modules))
