"""Replace attributes and settings of a compiler, and restore them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Patches"]

_log = logging.getLogger("graphstash")


class Patches:
    """Replacements of a hook in its compiler. `undo` restores the latest replacement first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: object) -> None:
        """Set an attribute of a class or a module.

        `undo` deletes an attribute that the owner inherits, and restores a static method as such.
        If another tool has replaced the attribute meanwhile, `undo` leaves it.
        """
        inherited = name not in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, new)

        def undo() -> None:
            if vars(owner).get(name) is not new:
                return
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], object]) -> None:
        """Replace a function by `wrapper(function)`.

        Raises:
            AttributeError: the owner has no such function.
        """
        self.replace(owner, name, wrapper(getattr(owner, name)))

    def switch_on(self, config: Any, name: str) -> None:
        """Set a setting of torch to True if it exists and its value is None.

        An environment variable would also switch it on in child processes without the hook.
        """
        if hasattr(config, name) and getattr(config, name) is None:
            setattr(config, name, True)
            self._undo.append(lambda: setattr(config, name, None))

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Restore all replacements if the block raises, because no caller could."""
        try:
            yield
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore all replacements."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:  # noqa: BLE001 - the other replacements are still restored
                _log.debug("putting a patch back failed", exc_info=True)
