"""Intercept the path of the plug-in that torch_xla loads.

When torch_xla's runtime starts, its C++ code calls `library_path()` of the device's registered
Python object. The seam replaces this method on every object, registered now or later. For
`PJRT_DEVICE=LIBRARY`, which torch_xla implements in C++, the seam registers a Python object that
also reads PJRT_LIBRARY_PATH at that time. Without dynamic plug-ins
(XLA_REGISTER_INSTALLED_PLUGINS=0), torch_xla reads the path from the environment. Then, and if the
runtime has started already, the seam attaches the selected device's library immediately.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import torch_xla
import torch_xla.runtime as xr
from torch_xla.experimental import plugins

from graphstash.hooks.patching import Patches

__all__ = ["TorchXlaSeam"]

_LIBRARY: Final = "LIBRARY"

_PATH_VARIABLES: Final = {
    _LIBRARY: ("PJRT_LIBRARY_PATH",),
    "TPU": ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH"),
    "XPU": ("XPU_LIBRARY_PATH",),
    "NEURON": ("NEURON_LIBRARY_PATH",),
}
"""Variables with a device's library, from torch_xla/csrc/runtime/pjrt_registry.cpp (2.8, 2.9)."""

_KEPT: Final[list[Any]] = []
"""Registered Python objects. C++ calls such an object, but does not keep it alive."""


class TorchXlaSeam:
    """Calls `attach` with the path of the plug-in that torch_xla is about to load, or has loaded.

    Args:
        attach: Called with the path. It must not raise.

    Raises:
        AttributeError: This version of torch_xla registers plug-ins differently.
    """

    def __init__(self, attach: Callable[[str], None]) -> None:
        self._attach = attach
        self._told: list[Any] = []
        register_plugin = torch_xla._XLAC._register_pjrt_plugin
        registered = dict(plugins._plugin_registry)

        def register(name: str, plugin: Any) -> None:
            self._tell(plugin)
            register_plugin(name, plugin)

        self._patches = Patches()
        self._patches.replace(torch_xla._XLAC, "_register_pjrt_plugin", register)
        for plugin in registered.values():
            self._tell(plugin)
        if _LIBRARY not in registered:
            register(_LIBRARY, _library_plugin())
        device = str(xr.device_type())
        if device not in registered or torch_xla._XLAC._xla_runtime_is_initialized():
            self._attach_now(device, registered.get(device))

    def close(self) -> None:
        """Restore torch_xla's registration and the plug-ins' methods."""
        self._patches.undo()
        for plugin in self._told:
            plugin.__dict__.pop("library_path", None)

    def _tell(self, plugin: Any) -> None:
        """Replace the plug-in's `library_path`, to attach the path before torch_xla receives it."""
        library_path = plugin.library_path

        def told() -> str:
            path = str(library_path())
            self._attach(path)
            return path

        plugin.library_path = told
        self._told.append(plugin)

    def _attach_now(self, device: str, plugin: Any) -> None:
        if plugin is not None:
            plugin.library_path()
            return
        values = (os.environ.get(name) for name in _PATH_VARIABLES.get(device, ()))
        path = next((value for value in values if value), None)
        if path is not None:
            self._attach(path)


def _library_plugin() -> Any:
    """Return a registered object that implements `PJRT_DEVICE=LIBRARY` in Python."""

    def library_path(_: Any) -> str:
        return os.environ.get("PJRT_LIBRARY_PATH", "")

    kind = type("LibraryPlugin", (plugins.DevicePlugin,), {"library_path": library_path})
    plugin = kind()
    _KEPT.append(plugin)
    return plugin
