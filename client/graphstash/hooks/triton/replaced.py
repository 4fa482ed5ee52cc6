"""What a program has replaced or added inside Triton.

Triton's key hashes Triton's files. It does not change if a program replaces a function of Triton's
library, a pass of a compiler or a number in a module. This module remembers the members of Triton's
modules and classes when they are first seen: those that Triton imports itself before the hook is
installed, and others at the next look-up of a kernel.
"""

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, Final

__all__ = ["replaced_members"]

_OWN: Final = frozenset(
    {
        # Triton and Python assign these while they run.
        *("__cache_cls", "__cache_cls_nme", "_allocator", "_profile_allocator", "_abc_impl"),
        *("__warningregistry__", "__annotations__", "__annotations_cache__", "__doc__"),
        # Triton calls these around a compilation. They change no kernel.
        *("cache_hook", "compiled_hook", "jit_cache_hook", "jit_post_compile_hook"),
    }
)
"""Members whose values may change without a change of any kernel."""

_ABSENT: Final = object()

_known: Final[dict[str, tuple[Any, list[int], dict[str, Any]]]] = {}
"""By name of a module or class: the object, the IDs of its members, and the members of Triton."""


def replaced_members() -> Iterator[tuple[str, Any]]:
    """Yield each member that is not Triton's: its place, and its value. None: it was deleted."""
    _remember(len(sys.modules))
    for place, (owner, ids, members) in _known.items():
        present = vars(owner)
        if [*map(id, present.values())] == ids:
            continue
        for name in sorted({*members, *present} - _OWN):
            value = present.get(name)
            is_same = value is members.get(name, _ABSENT)
            if (
                not is_same
                and not isinstance(value, ModuleType)
                and _root_of(value) != "graphstash"
            ):
                yield f"{place}.{name}", value


@lru_cache(maxsize=1)
def _remember(_module_count: int) -> None:
    """Remember the members of modules that were loaded since the last call."""
    for name, owner in _owners():
        if name not in _known:
            present = dict(vars(owner))
            members = {key: each for key, each in present.items() if not _is_foreign(each)}
            ids = [*map(id, present.values())] if len(members) == len(present) else []
            _known[name] = (owner, ids, members)


def _owners() -> Iterator[tuple[str, Any]]:
    """Yield Triton's modules and their classes, each with its name."""
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "triton" and isinstance(module, ModuleType):
            yield name, module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield f"{name}.{value.__qualname__}", value


def _is_foreign(value: Any) -> bool:
    root = _root_of(value)
    return root not in {"", "triton", "graphstash"} and root not in sys.stdlib_module_names


def _root_of(value: Any) -> str:
    """Return the package of a Python function, or an empty string for any other value."""
    value = getattr(value, "__func__", value)  # static and class methods
    if not isinstance(value, FunctionType):
        return ""
    return str(value.__globals__.get("__name__")).partition(".")[0]


_remember(len(sys.modules))
