"""Find out quickly whether any of many dictionaries has changed.

In CPython up to 3.13, a dictionary has a version, a number that every change of the dictionary
changes (PEP 509). A comparison of versions takes a fraction of the time that one of all members
takes, and every key needs many of them. Python without such versions compares the members.
"""

import ctypes
import sys
from collections.abc import Sequence
from gc import get_referents
from itertools import chain, count
from operator import is_
from types import ModuleType
from typing import Any, Final, NamedTuple

__all__ = ["HAS_VERSIONS", "Versions", "version_of"]

_OFFSET: Final = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)


class _Known(NamedTuple):
    """Dictionaries, where their versions are, and a number that other dictionaries do not get."""

    tables: Sequence[dict[Any, Any]]
    versions: list[ctypes.c_uint64]
    number: int


class Versions:
    """Compares dictionaries with what they held before. Thread-safe."""

    def __init__(self) -> None:
        self._known = _Known((), [], 0)

    def state(self, tables: Sequence[dict[Any, Any]]) -> object:
        """Return a value that is equal to an earlier one only if no table has changed since.

        Read the tables afterwards: a change in between is then seen later. A value that changes
        inside, such as a list, is no change of its table. Pass the same sequence again, if
        possible, because comparing two sequences takes longer.
        """
        if not HAS_VERSIONS:
            return [
                *map(len, tables),
                *chain.from_iterable(tables),
                *chain.from_iterable(map(dict.values, tables)),
            ]
        known = self._known
        if tables is not known.tables:
            if len(tables) != len(known.tables) or not all(map(is_, tables, known.tables)):
                known = _Known(tables, [version_of(each) for each in tables], next(_numbers))
            self._known = known = known._replace(tables=tables)
        return known.number, b"".join(known.versions)


_numbers = count(1)


def version_of(table: dict[Any, Any]) -> ctypes.c_uint64:
    """Return the version of a dictionary, where CPython keeps it: behind its size."""
    if not HAS_VERSIONS:
        return ctypes.c_uint64()
    return ctypes.c_uint64.from_address(id(table) + _OFFSET)


class _Instance:
    def __init__(self) -> None:
        self.member = 0


def _has_versions() -> bool:
    """Return whether each change of a dictionary changes its version, and no reading does."""
    if sys.implementation.name != "cpython" or dict.__basicsize__ < _OFFSET + 8:
        return False
    module, owner, instance = ModuleType("module"), type("Owner", (), {}), _Instance()
    return all(
        _is_version_of(each, table)
        for each, table in (
            (module, vars(module)),
            (owner, get_referents(vars(owner))[0]),  # `vars` returns a view, which has no version
            (instance, vars(instance)),
        )
    )


def _is_version_of(owner: Any, table: dict[str, Any]) -> bool:
    version = ctypes.c_uint64.from_address(id(table) + _OFFSET)
    seen = [version.value]
    for value in range(1, _REPEATS):  # CPython specializes the statement
        owner.member = value
        seen.append(version.value)
    del owner.member
    seen.append(version.value)
    if type(owner) is _Instance:
        for value in range(_REPEATS):
            table["member"] = value
            seen.append(version.value)
        table.clear()
        seen.append(version.value)
    is_read = not hasattr(owner, "member") and "member" not in [*table]
    return len({*seen}) == len(seen) and is_read and version.value == seen[-1]


_REPEATS: Final = 100

HAS_VERSIONS: Final = _has_versions()
"""Whether this Python's dictionaries have versions."""
