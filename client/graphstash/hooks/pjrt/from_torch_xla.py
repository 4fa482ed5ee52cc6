"""torch_xla: asks a registered device plug-in for `library_path()` when its runtime starts.

That call is C++ into Python, so every registered object can be told from there, those that are
registered later included. `PJRT_DEVICE=LIBRARY` has a plug-in in C++, which reads PJRT_LIBRARY_PATH
at that time; one in Python that does the same takes its place. Without dynamic plug-ins
(XLA_REGISTER_INSTALLED_PLUGINS=0) the path comes from the environment alone: then, or when the
runtime is there already, the library of the chosen device is attached at once.
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
"""Where the library of a device is, by torch_xla/csrc/runtime/pjrt_registry.cpp (2.8, 2.9)."""

_KEPT: Final[list[Any]] = []
"""C++ calls a registered plug-in, but does not keep its Python half alive."""


class TorchXlaSeam:
    """Tells of the plug-in that torch_xla is about to load, or has loaded.

    Args:
        attach: called with the path; must not raise.

    Raises:
        AttributeError: this torch_xla registers plug-ins in another way.
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
        """Leaves torch_xla as it was."""
        self._patches.undo()
        for plugin in self._told:
            plugin.__dict__.pop("library_path", None)

    def _tell(self, plugin: Any) -> None:
        """Has the plug-in's answer passed on before torch_xla gets it."""
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
    """What `PJRT_DEVICE=LIBRARY` means, in Python."""

    def library_path(_: Any) -> str:
        return os.environ.get("PJRT_LIBRARY_PATH", "")

    kind = type("LibraryPlugin", (plugins.DevicePlugin,), {"library_path": library_path})
    plugin = kind()
    _KEPT.append(plugin)
    return plugin
