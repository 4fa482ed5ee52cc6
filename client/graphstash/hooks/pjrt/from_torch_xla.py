"""Intercept the path of the plug-in that torch_xla loads.

When torch_xla's runtime starts, its C++ code calls `library_path()` of the plug-in object that is
registered for the device. The seam replaces this method on every object, registered before or
after. `PJRT_DEVICE=LIBRARY` has no object, so the seam registers one.

The seam attaches the library at once if the runtime has started, or if the device had no object,
for example with XLA_REGISTER_INSTALLED_PLUGINS=0. torch_xla then reads the path from the
environment, as the seam does.
"""

import os
from collections.abc import Callable, Mapping
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
"""Variables with a library's path, from torch_xla/csrc/runtime/pjrt_registry.cpp (2.8, 2.9)."""

_KEPT: Final[list[Any]] = []
"""Plug-in objects of this module. torch_xla's C++ code calls them but does not keep them alive."""


class TorchXlaSeam:
    """Calls `attach` with the path of the plug-in that torch_xla is about to load, or has loaded.

    Args:
        attach: Called with the path. It must not raise.

    Raises:
        AttributeError: This version of torch_xla registers plug-ins differently.
    """

    def __init__(self, attach: Callable[[str], None]) -> None:
        self._attach = attach
        self._intercepted: list[Any] = []
        register_plugin = torch_xla._XLAC._register_pjrt_plugin
        registered = dict(plugins._plugin_registry)

        def register(name: str, plugin: Any) -> None:
            self._intercept(plugin)
            register_plugin(name, plugin)

        self._patches = Patches()
        self._patches.replace(torch_xla._XLAC, "_register_pjrt_plugin", register)
        try:
            for plugin in registered.values():
                self._intercept(plugin)
            if _LIBRARY not in registered:
                register(_LIBRARY, _library_plugin())
            device = str(xr.device_type())
            if device not in registered or torch_xla._XLAC._xla_runtime_is_initialized():
                self._attach_now(device, registered.get(device))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore torch_xla's registration and the plug-ins' methods."""
        self._patches.undo()
        for plugin in self._intercepted:
            plugin.__dict__.pop("library_path", None)

    def client_options(self) -> Mapping[str, object]:
        """Return the options that torch_xla passes to a client of the chosen device."""
        plugin = plugins._plugin_registry.get(str(xr.device_type()))
        return dict(plugin.client_create_options()) if plugin is not None else {}

    def _intercept(self, plugin: Any) -> None:
        """Replace the plug-in's `library_path` by one that attaches the path before it returns."""
        library_path = plugin.library_path

        def attached_path() -> str:
            path = str(library_path())
            self._attach(path)
            return path

        plugin.library_path = attached_path
        self._intercepted.append(plugin)

    def _attach_now(self, device: str, plugin: Any) -> None:
        if plugin is not None:
            plugin.library_path()
            return
        values = (os.environ.get(name) for name in _PATH_VARIABLES.get(device, ()))
        path = next((value for value in values if value), None)
        if path is not None:
            self._attach(path)


def _library_plugin() -> Any:
    """Return a plug-in object for `PJRT_DEVICE=LIBRARY`."""

    def library_path(_: Any) -> str:
        return os.environ.get("PJRT_LIBRARY_PATH", "")

    kind = type("LibraryPlugin", (plugins.DevicePlugin,), {"library_path": library_path})
    plugin = kind()
    _KEPT.append(plugin)
    return plugin
