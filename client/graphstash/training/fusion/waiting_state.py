"""WaitingState: replaces an optimizer's state while updates wait, and makes them before any use."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

__all__ = ["WaitingState"]

_METHODS: Final = (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__"),
    *("__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__copy__"),
    *("__reduce__", "__missing__", "get", "keys", "values", "items", "pop", "popitem", "clear"),
    *("update", "setdefault", "copy"),
)


class WaitingState(defaultdict[Any, Any]):
    """A mapping whose every method first makes the waiting updates, then calls the state's method.

    `make_updates` is held weakly.
    """

    def __init__(self, state: defaultdict[Any, Any], make_updates: Callable[[], None]) -> None:
        super().__init__(state.default_factory)
        self.state = state
        self.make_updates = weakref.WeakMethod(make_updates)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle the state itself."""
        return _delegate(self, "__reduce_ex__", protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        from copy import deepcopy

        _delegate(self, "__len__")
        return deepcopy(self.state, memo)


def _delegate(this: WaitingState, name: str, *args: Any, **kwargs: Any) -> Any:
    if (make_updates := this.make_updates()) is not None:
        make_updates()
    return getattr(this.state, name)(*args, **kwargs)


def _method(name: str) -> Callable[..., Any]:
    def call(this: WaitingState, *args: Any, **kwargs: Any) -> Any:
        return _delegate(this, name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in _METHODS:
    setattr(WaitingState, _name, _method(_name))
