"""Patches: what the hook replaced inside torch, and the way back."""

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]

_log = logging.getLogger("graphstash")


class Patches:
    """Replaces attributes and settings; `undo` puts everything back, last replaced first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, new: object) -> None:
        """Sets an attribute of a class or a module.

        An attribute that was inherited is deleted again by `undo`, and a static method comes back
        as one: what stood in the owner itself is kept, not what `getattr` makes of it.
        """
        inherited = name not in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, new)

        def undo() -> None:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def switch_on(self, config: Any, name: str, *, unset: bool | None = None) -> None:
        """Sets a setting of torch to True unless it was given a value, or does not exist.

        Args:
            config: a configuration module of torch.
            name: the setting's name.
            unset: its value when nobody has set it.

        The setting lives in this process only. An environment variable would reach children that
        have no hook; there torch would look for a Redis.
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
                _log.debug("putting torch back failed", exc_info=True)
