"""Find out quickly whether any of many dictionaries has changed.

In CPython up to 3.13, each dictionary has a version number, and every change of the dictionary
gives it a new one (PEP 509). Every key compares thousands of dictionaries, and comparing their
versions takes a fraction of the time that comparing their members takes. On a Python whose
dictionaries have no versions, this module compares the members.
"""

import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from gc import get_referents
from itertools import chain, count
from operator import is_
from types import ModuleType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

__all__ = ["HAS_VERSIONS", "TableCache", "Versions", "version_of"]

_OFFSET: Final = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)

_T = TypeVar("_T")


class _Known(NamedTuple):
    """Dictionaries, and a number that other dictionaries do not get.

    Attributes:
        versions: where CPython keeps their versions, or None if some have none.
    """

    tables: Sequence[Mapping[Any, Any]]
    versions: list[ctypes.c_uint64] | None
    number: int


class Versions:
    """Detects whether dictionaries have changed since an earlier call. Thread-safe."""

    def __init__(self) -> None:
        self._known = _Known((), [], 0)

    def state(self, tables: Sequence[Mapping[Any, Any]]) -> object:
        """Return a value that is equal to an earlier one only if no table has changed since.

        Call this method before you read the tables: if a table changes while you read it, the next
        state differs. A list that is a value of a table may change while the state stays equal,
        because the table still holds the same list. Pass the same sequence in each call if you can:
        comparing two sequences takes longer.
        """
        known = self._known
        if tables is not known.tables:
            if len(tables) != len(known.tables) or not all(map(is_, tables, known.tables)):
                known = _Known(tables, _versions_of(tables), next(_numbers))
            self._known = known = known._replace(tables=tables)
        if known.versions is None:
            return [
                *map(len, tables),
                *chain.from_iterable(tables),
                *chain.from_iterable(each.values() for each in tables),
            ]
        return known.number, b"".join(known.versions)


class TableCache(Generic[_T]):
    """Keeps a result that was computed from dictionaries and lists until one of them changes.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._last: tuple[object, _T] | None = None  # replaced as a whole: threads share it
        self._versions = Versions()

    def of(
        self,
        tables: Sequence[Mapping[Any, Any]],
        read: Callable[[], _T],
        *,
        lists: Sequence[list[Any]] = (),
    ) -> tuple[object, _T]:
        """Return the state of the dictionaries, see `Versions`, and the result of `read`.

        Calls `read` only if the state has changed since the last call, or a member of `lists`.
        """
        state = self._versions.state(tables)
        if lists:
            state = [state, *map(len, lists), *chain.from_iterable(lists)]
        last = self._last
        if last is None or last[0] != state:
            self._last = last = (state, read())
        return last


def _versions_of(tables: Sequence[Mapping[Any, Any]]) -> list[ctypes.c_uint64] | None:
    # A subclass or another mapping may hold its members elsewhere, and has no version that changes
    # with them.
    if not HAS_VERSIONS or any(type(each) not in _PLAIN for each in tables):
        return None
    return [version_of(cast("dict[Any, Any]", each)) for each in tables]


_PLAIN: Final = (dict, defaultdict)

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
