"""Tensors that a step reaches outside of its state, and what a call of the step did to them.

A capture runs the Python of a step once more, and a comparison makes one step three times. Tensors
outside of `state` would change each time. `Outside` finds those that a call has written, by their
versions, or replaced, by their places.

It searches closures, defaults, attributes, containers and the globals that functions name. It does
not find tensors in frames, generators, slots and C++ objects, replaced attributes of classes, nor
writes that change no version: through `.data` or NumPy, and those of inference tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple, cast

from torch import Tensor
from torch.optim import Optimizer

from graphstash.training.traced.state import State
from graphstash.training.traced.step import TracedStep

__all__ = ["NO_CHANGES", "Changes", "Outside", "Place"]

_MAX_OBJECTS: Final = 100_000
"""Objects that are searched."""

_FOREIGN: Final = ("torch", "numpy", "graphstash", "builtins", "typing", "collections", "functools")
"""Packages whose functions and classes are not searched."""

_OF_MODULES: Final = ("_parameters", "_buffers", "_modules")


class Place(NamedTuple):
    """Where a tensor is: an entry of a dictionary or list, or a variable of a closure."""

    name: str
    holder: Any
    key: Any

    def get(self) -> object:
        """Return what is there now, or None."""
        try:
            return self.holder[self.key] if self.key is not None else self.holder.cell_contents
        except Exception:  # noqa: BLE001 - an empty cell, or a dictionary of the user
            return None

    def set(self, tensor: Tensor) -> None:
        """Put a tensor there."""
        if self.key is None:
            self.holder.cell_contents = tensor
        else:
            self.holder[self.key] = tensor


class Changes(NamedTuple):
    """What a call did to tensors outside of the state.

    Attributes:
        written: by name, the tensors that it wrote in place.
        replaced: the places where it put another tensor, and that tensor.
    """

    written: dict[str, Tensor]
    replaced: list[tuple[Place, Tensor]]

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """Return the names of written tensors and of places with another tensor."""
        return {*self.written}, {place.name for place, _ in self.replaced}


NO_CHANGES: Final = Changes({}, [])


class Outside:
    """The tensors that a function reaches outside of its state, when this was made."""

    def __init__(self, function: Callable[..., object], state: State) -> None:
        inside = [*state.tensors(), *state.parameters]
        inside += [each.grad for each in state.parameters if each.grad is not None]
        self._inside = {
            id(tensor): tensor for tensor in inside
        }  # also keeps the tensors alive, and so their ids
        self._found: list[tuple[Place, Tensor, int]] = []
        for place, tensor in _search(function):
            if id(tensor) not in self._inside and not tensor.is_inference():
                self._found.append((place, tensor, tensor._version))

    def tensors(self) -> list[Tensor]:
        """Return the tensors."""
        return [tensor for _, tensor, _ in self._found]

    def changes(self) -> Changes:
        """Return what has changed since."""
        written = {place.name: each for place, each, was in self._found if each._version != was}
        now = [(place, place.get(), tensor) for place, tensor, _ in self._found]
        replaced = [
            (place, found)
            for place, found, tensor in now
            if isinstance(found, Tensor) and found is not tensor and id(found) not in self._inside
        ]
        return Changes(written, replaced)

    def restore_places(self) -> None:
        """Put all tensors back where they were. Their values stay."""
        for place, tensor, _ in self._found:
            if isinstance(place.get(), Tensor):
                place.set(tensor)


def _search(function: Callable[..., object]) -> Iterator[tuple[Place, Tensor]]:
    """Yield each place with a tensor, breadth first."""
    queue: list[tuple[str, object]] = [("", function)]
    seen: set[int] = set()
    places: set[tuple[int, object]] = set()
    kept: list[object] = []  # keeps the objects alive, see `Outside`
    for name, each in queue:
        if id(each) in seen or len(seen) >= _MAX_OBJECTS:
            continue
        seen.add(id(each))
        kept.append(each)
        places_in: list[Place] = []
        with suppress(Exception):  # an object of the user may refuse to be searched
            places_in += _places_in(name, each)
        for place in places_in:
            found = place.get()
            if _is_a(found, Tensor):
                if (id(place.holder), place.key) not in places:
                    places.add((id(place.holder), place.key))
                    kept.append(place.holder)
                    yield place, cast("Tensor", found)
            elif not _is_a(found, str, bytes, int, float, complex, type(None)):
                queue.append((place.name, found))


def _places_in(name: str, each: Any) -> Iterator[Place]:
    if isinstance(each, dict):
        yield from (Place(_joined(name, key), each, key) for key in list(each) if key is not None)
    elif isinstance(each, list):
        yield from (Place(name, each, number) for number in range(len(each)))
    elif isinstance(each, tuple | set | frozenset):
        yield from _of(name, each)
    elif isinstance(each, MethodType):
        yield from _of(name or "self", (each.__self__, each.__func__))
    elif isinstance(each, partial):
        yield from _of(name, (each.func, *each.args, *each.keywords.values()))
    elif isinstance(each, FunctionType):
        yield from _places_in_function(each)
    elif not (_is_a(each, type, ModuleType, Optimizer, TracedStep) or _is_state(each)):
        yield from _places_in_object(name, each)


def _of(name: str, values: Iterable[object]) -> Iterator[Place]:
    """Yield places that cannot be written."""
    values = list(values)
    return (Place(name, values, number) for number in range(len(values)))


def _places_in_function(function: FunctionType) -> Iterator[Place]:
    if _is_foreign(function.__module__):
        return
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield Place(variable, cell, None)
    yield from _of(function.__name__, function.__defaults__ or ())
    yield from _of(function.__name__, (function.__kwdefaults__ or {}).values())
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
            yield from _of(
                name, [value for value in vars(kind).values() if isinstance(value, kinds)]
            )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_a(each: object, *kinds: type) -> bool:
    """Return whether an object has one of the types. `isinstance` may run code of a proxy."""
    return issubclass(type(each), kinds)


def _is_state(each: object) -> bool:
    return all(hasattr(type(each), name) for name in ("device_tensors", "refresh"))


def _is_foreign(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _FOREIGN


def _joined(name: str, key: object) -> str:
    if key in _OF_MODULES:
        return name
    return f"{name}.{key}" if name and isinstance(key, str) else str(key)
