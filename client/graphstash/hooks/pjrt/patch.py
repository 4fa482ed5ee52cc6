"""Replaces a pointer in a plug-in's table, and puts it back.

A pointer is stored in one move, so a thread that reads it meanwhile sees the old or the new one.
What it has read it may call at any time later: callbacks are therefore never freed.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from graphstash.hooks.pjrt.abi import POINTER_BYTES, Function
from graphstash.hooks.pjrt.api import FUNCTION_TYPE, Api
from graphstash.hooks.pjrt.plugins import is_writable

__all__ = ["Patch"]

_KEPT: Final[list[Any]] = []
"""Every callback of this process."""

_MEMORY: Final = Path("/proc/self/mem")


class Patch:
    """One function of one table, replaced by Python.

    Args:
        api: the table as it was.
        function: which one.
        stand_in: gets the address of the arguments, returns a `PJRT_Error *` or 0; must not raise.

    Raises:
        OSError: the kernel does not let the table be written.
    """

    def __init__(self, api: Api, function: Function, stand_in: Callable[[int], int]) -> None:
        self._address = api.address_of(function)
        self._original = api.pointer(function)
        callback = FUNCTION_TYPE(stand_in)
        _KEPT.append(callback)
        self._ours = ctypes.cast(callback, ctypes.c_void_p).value or 0
        _store(self._address, self._ours)

    def close(self) -> None:
        """Puts the plug-in's own function back, unless somebody else stands before us by now.

        Raises:
            OSError: the kernel does not let the table be written.
        """
        if ctypes.c_uint64.from_address(self._address).value == self._ours:
            _store(self._address, self._original)


def _store(address: int, value: int) -> None:
    if is_writable(address):
        ctypes.c_uint64.from_address(address).value = value
        return
    # A table of constants may lie in pages that are read-only after relocation. The kernel writes
    # to them for a debugger, and for the process itself, without a change of their protection.
    with _MEMORY.open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(value.to_bytes(POINTER_BYTES, "little"))
