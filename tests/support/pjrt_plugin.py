"""The PJRT plug-in for the CPU, and an adapter for torch_xla 2.9."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

# A package of this Python contains the plug-in, for any framework.
import xla_plugins.xla_cpu_pjrt as plugin_package

LIBRARY = Path(plugin_package.__file__).with_name("xla_cpu_pjrt.so")

EXECUTE, PLUGIN_SIZE = 55, 112


_kept: list[object] = []
"""Functions that the plug-in may call until the process exits."""


def use_in_jax() -> None:
    """Select the plug-in for JAX. Call this function before JAX creates a client."""
    os.environ["PJRT_NAMES_AND_LIBRARY_PATHS"] = f"other:{LIBRARY}"
    os.environ["JAX_PLATFORMS"] = "other"
    if "jax" in sys.modules:  # JAX has already read the variable
        sys.modules["jax"].config.update("jax_platforms", "other")


def widen_execute_options() -> None:
    """Adapt torch_xla 2.9 to this plug-in. The adapter is independent of graphstash.

    torch_xla passes a `PJRT_ExecuteOptions` of 80 bytes. The plug-in is newer and requires 112
    bytes. Its `PJRT_LoadedExecutable_Execute` therefore gets a longer copy, padded with zeros.
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
