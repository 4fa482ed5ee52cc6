"""A name in a module that stands for something of ours, until it is put back."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["Replaced"]


class Replaced:
    """Replaces a function; `undo` puts it back.

    Args:
        module: where it is looked up by name on every call.
        name: of the function.
        by: makes the replacement from the original.

    Raises:
        AttributeError: there is no such name.
    """

    def __init__(
        self, module: ModuleType, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._module = module
        self._name = name
        self._original = getattr(module, name)
        self._ours = by(self._original)
        setattr(module, name, self._ours)

    def undo(self) -> None:
        """Puts the original back, unless somebody else has replaced ours meanwhile."""
        if getattr(self._module, self._name, None) is self._ours:
            setattr(self._module, self._name, self._original)
