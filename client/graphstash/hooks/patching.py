"""Replaces attributes and settings of a compiler, and puts them back."""

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]

_log = logging.getLogger("graphstash")


class Patches:
    """What a hook has replaced in its compiler; `undo` puts it back, last replaced first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: object) -> None:
        """Sets an attribute of a class or a module.

        An attribute that was inherited is deleted again by `undo`, and a static method comes back
        as one: what stood in the owner itself is kept, not what `getattr` makes of it. `undo` does
        nothing if another tool has replaced the attribute in the meantime.
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
        """Replaces a function by `wrapper(function)`.

        Raises:
            AttributeError: the owner has no such function.
        """
        self.replace(owner, name, wrapper(getattr(owner, name)))

    def switch_on(self, config: Any, name: str, *, unset: bool | None = None) -> None:
        """Sets a setting of torch to True unless it differs from `unset`, or does not exist.

        The setting lives in this process only: an environment variable would reach child processes
        that have no hook.
        """
        if hasattr(config, name) and getattr(config, name) is unset:
            setattr(config, name, True)
            self._undo.append(lambda: setattr(config, name, unset))

    def undo(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:  # noqa: BLE001 - the others are put back all the same
                _log.debug("putting a patch back failed", exc_info=True)
