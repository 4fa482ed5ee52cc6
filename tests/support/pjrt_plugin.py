"""The PJRT plug-in for the CPU, and torch_xla 2.9 made to fit it."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# One package brings it, for whatever framework: wherever this Python has its packages.
import xla_plugins.xla_cpu_pjrt as plugin_package

__all__ = ["LIBRARY", "use_in_jax", "widen_execute_options"]

LIBRARY = Path(plugin_package.__file__).with_name("xla_cpu_pjrt.so")

EXECUTE, PLUGIN_SIZE = 55, 112


_kept: list[object] = []
"""Functions that the plug-in calls as long as the process runs."""


def use_in_jax() -> None:
    """Choose the plug-in for JAX; called before JAX has a client."""
    os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"other:{LIBRARY}"
    os.environ["JAX_PLATFORMS"] = "other"
    if "jax" in sys.modules:  # it has read the variable
        sys.modules["jax"].config.update("jax_platforms", "other")


def widen_execute_options() -> None:
    """Make torch_xla 2.9 and this plug-in fit; nothing to do with graphstash.

    torch_xla hands over `PJRT_ExecuteOptions` of 80 bytes; the plug-in is newer, knows 112, and
    refuses less. So its `PJRT_LoadedExecutable_Execute` gets a longer copy, with zeroes behind.
    """
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    library = ctypes.CDLL(str(LIBRARY))
    library.GetPjrtApi.restype = ctypes.c_void_p
    slot = ctypes.c_void_p.from_address(library.GetPjrtApi() + 40 + 8 * EXECUTE)
    real = function(slot.value or 0)

    def execute(args: int) -> Any:
        pointer = ctypes.c_void_p.from_address(args + 24)  # PJRT_ExecuteOptions *options
        old = pointer.value or 0
        wide = ctypes.create_string_buffer(PLUGIN_SIZE)
        ctypes.memmove(wide, old, ctypes.c_size_t.from_address(old).value)
        ctypes.c_size_t.from_address(ctypes.addressof(wide)).value = PLUGIN_SIZE
        pointer.value = ctypes.addressof(wide)
        try:
            return real(args)
        finally:
            pointer.value = old

    wrapped = function(execute)
    _kept.append(wrapped)
    slot.value = ctypes.cast(wrapped, ctypes.c_void_p).value
