"""Places: search what a function or an object reaches for objects of some types.

The search covers closures, defaults, attributes, containers and the globals that functions name. It
does not find objects in frames, generators, slots and C++ objects.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from torch import Tensor

__all__ = ["Place", "search"]

_FOREIGN: Final = {"torch", "numpy", "graphstash", *sys.stdlib_module_names}
"""Packages whose functions and classes are not searched."""

_OF_MODULES: Final = ("_parameters", "_buffers", "_modules")
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)


class Place(NamedTuple):
    """Where an object is: an entry of a dictionary or list, or a variable of a closure."""

    name: str
    holder: Any
    key: Any

    def get(self) -> object:
        """Return what is there now, or None."""
        try:
            return self.holder[self.key] if self.key is not None else self.holder.cell_contents
        except Exception:  # noqa: BLE001 - an empty cell, or a dictionary of the user
            return None

    def set(self, new: object) -> None:
        """Put another object there."""
        if self.key is None:
            self.holder.cell_contents = new
        else:
            self.holder[self.key] = new


def search(
    root: object,
    *kinds: type,
    skips: Callable[[object], bool] = lambda _: False,
    most: int = 100_000,
    widest: int = 100_000,
) -> Iterator[tuple[Place, Any]]:
    """Yield each place with an object of one of the types, and the object, breadth first.

    Args:
        root: a function, container or object.
        kinds: the types.
        skips: returns whether an object is not searched.
        most: number of objects that are searched.
        widest: number of entries of the largest container that is searched.
    """
    queue: list[tuple[str, object]] = [("", root)]
    seen: set[int] = set()
    places: set[tuple[int, object]] = set()
    kept: list[object] = []  # keeps the objects alive, and so their ids
    for name, each in queue:
        if id(each) in seen or len(seen) >= most:
            continue
        seen.add(id(each))
        kept.append(each)
        places_in: list[Place] = []
        with suppress(Exception):  # an object of the user may refuse to be searched
            if not (skips(each) or _width(each) > widest):
                places_in += _places_in(name, each)
        for place in places_in:
            found = place.get()
            if _is_instance(found, *kinds):
                if (id(place.holder), place.key) not in places:
                    places.add((id(place.holder), place.key))
                    kept.append(place.holder)
                    yield place, found
            elif not _is_instance(found, str, bytes, int, float, complex, type(None)):
                queue.append((place.name, found))


def _width(each: Any) -> int:
    return len(each) if _is_instance(each, *_CONTAINERS) else 0


def _places_in(name: str, each: Any) -> Iterator[Place]:
    if isinstance(each, dict):
        yield from (Place(_joined(name, key), each, key) for key in list(each) if key is not None)
    elif isinstance(each, list):
        yield from (Place(name, each, number) for number in range(len(each)))
    elif isinstance(each, tuple | set | frozenset):
        yield from _places_of_values(name, each)
    elif isinstance(each, MethodType):
        yield from _places_of_values(name or "self", (each.__self__, each.__func__))
    elif isinstance(each, partial):
        yield from _places_of_values(name, (each.func, *each.args, *each.keywords.values()))
    elif isinstance(each, FunctionType):
        yield from _places_in_function(each)
    elif not _is_instance(each, type, ModuleType):
        yield from _places_in_object(name, each)


def _places_of_values(name: str, values: Iterable[object]) -> Iterator[Place]:
    """Yield places that cannot be written."""
    values = list(values)
    return (Place(name, values, number) for number in range(len(values)))


def _places_in_function(function: FunctionType) -> Iterator[Place]:
    if _is_foreign(function.__module__):
        return
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Place(variable, cell, None)
    yield from _places_of_values(function.__name__, function.__defaults__ or ())
    yield from _places_of_values(function.__name__, (function.__kwdefaults__ or {}).values())
    names = set(_names_in(code))
    for variable in names & function.__globals__.keys():
        value = function.__globals__[variable]
        if not isinstance(value, ModuleType):
            yield Place(variable, function.__globals__, variable)
        elif not _is_foreign(value.__name__):
            variables = vars(value)
            for key in names & variables.keys():
                yield Place(f"{variable}.{key}", variables, key)


def _places_in_object(name: str, each: Any) -> Iterator[Place]:
    attributes = getattr(each, "__dict__", {})
    yield from (Place(_joined(name, key), attributes, key) for key in list(attributes))
    for kind in type(each).__mro__:
        if not _is_foreign(kind.__module__):
            kinds = (FunctionType, Tensor, list, dict)
            yield from _places_of_values(
                name, [value for value in vars(kind).values() if isinstance(value, kinds)]
            )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_instance(each: object, *kinds: type) -> bool:
    """Return whether an object has one of the types. `isinstance` may run code of a proxy."""
    return issubclass(type(each), kinds)


def _is_foreign(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _FOREIGN


def _joined(name: str, key: object) -> str:
    if key in _OF_MODULES:
        return name
    return f"{name}.{key}" if name and isinstance(key, str) else str(key)
