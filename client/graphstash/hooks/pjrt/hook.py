"""The pjrt hook: replaces the compile functions in the table of a PJRT plug-in.

A plug-in (TPU, Neuron, CUDA, CPU) is a shared library with one table of functions. All frameworks
in a process call through this table. A replaced function therefore affects all of them, including
frameworks that have already loaded the plug-in.

    from_torch_xla             reports the plug-ins that torch_xla loads
    plugins, api, abi          find a plug-in and call its functions
    interceptor                replaces the functions, and keeps exceptions out of C++
    call                       serves or publishes one compilation
    fingerprint, canonical     make the key

The hook serves torch_xla 2.8 and newer, whose persistent cache cannot load executables of a plug-in
(pytorch/xla#9094). The torch_xla hook serves older versions.

This hook attaches to JAX only if the jax hook is off. The jax hook is better, because its key
ignores source lines, and with both hooks, the server would store JAX's programs twice. If JAX and
torch_xla share a plug-in in one process, this hook serves both.
"""

import ctypes
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from graphstash._compile.cache import CompileCache
from graphstash.hooks.client_options import options_by_jax
from graphstash.hooks.import_hook import after_import
from graphstash.hooks.partitioners import Partitioners
from graphstash.hooks.patching import Patches
from graphstash.hooks.pjrt.abi import FIRST_MINOR, POINTER_BYTES, TRIED_MINORS, Function
from graphstash.hooks.pjrt.plugins import Plugin, loaded_plugins, plugin_at

if TYPE_CHECKING:
    from graphstash.hooks.pjrt.from_torch_xla import TorchXlaSeam
    from graphstash.hooks.pjrt.interceptor import Interceptor

__all__ = ["PjrtHook", "install"]

_log = logging.getLogger("graphstash")

_FIRST_TORCH_XLA: Final = (2, 8)

_NEEDED: Final = (
    Function.ERROR_DESTROY,
    Function.ERROR_MESSAGE,
    Function.ERROR_GET_CODE,
    Function.CLIENT_PLATFORM_NAME,
    Function.CLIENT_PLATFORM_VERSION,
    Function.CLIENT_COMPILE,
    Function.EXECUTABLE_DESTROY,
    Function.EXECUTABLE_SERIALIZE,
    Function.LOADED_EXECUTABLE_GET_EXECUTABLE,
    Function.EXECUTABLE_DESERIALIZE_AND_LOAD,
)


def install(cache: CompileCache) -> "PjrtHook | None":
    """Install the hook for the plug-ins of torch_xla and JAX, loaded now or later. Warn and return
    None on platforms other than 64-bit Linux.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != POINTER_BYTES:
        _log.warning("graphstash: the pjrt hook supports only 64-bit Linux; it is not installed")
        return None
    return PjrtHook(cache)


class PjrtHook:
    """The installed hook: owns the patches of plug-ins and frameworks."""

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._owner = os.getpid()
        self._closed = False
        self._lock = threading.Lock()  # guards the next field; never held during a compilation
        self._interceptors: dict[int, Interceptor | None] = {}
        self._patches = Patches()
        self._torch_xla: TorchXlaSeam | None = None
        self._partitioners: Partitioners | None = None
        self._run_after_import("torch_xla", self._attach_to_torch_xla)
        if not cache.config.wants_hook("jax"):
            self._run_after_import("jax", self._attach_to_jax)

    def close(self) -> None:
        """Restore plug-ins and frameworks. Running calls finish: callbacks are never freed."""
        self._closed = True
        with self._lock:
            interceptors, self._interceptors = self._interceptors, {}
        self._patches.undo()
        if self._torch_xla is not None:
            self._torch_xla.close()
        for interceptor in interceptors.values():
            if interceptor is not None:
                interceptor.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """Use the child's cache in the callbacks, which the child inherits with the tables."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._cache = cache
        self._owner = os.getpid()
        return True

    def _current_cache(self) -> CompileCache | None:
        """Return the cache. None if the hook is closed, or in a forked child without a session."""
        return self._cache if not self._closed and self._owner == os.getpid() else None

    def _late_options(self) -> Mapping[str, object] | None:
        """Return the options of a client that started before the hook, or None if unknown."""
        xla_bridge = sys.modules.get("jax._src.xla_bridge")
        by_jax = [each for each in getattr(xla_bridge, "_backends", ()) if each != "cpu"]
        if self._torch_xla is not None:
            return None if by_jax else self._torch_xla.client_options()
        return options_by_jax(xla_bridge, by_jax[0]) if len(by_jax) == 1 else None

    def _run_after_import(self, framework: str, action: Callable[[], None]) -> None:
        """Call `action` after the framework's import: at once if it is already imported."""
        after_import(framework, partial(self._run_or_warn, framework, action))

    def _run_or_warn(self, framework: str, action: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame
            version = getattr(sys.modules.get(framework), "__version__", "of an unknown version")
            _log.warning(
                "graphstash: the pjrt hook cannot be installed into %s %s: %r; what it compiles "
                "is not shared",
                framework,
                version,
                error,
            )

    def _attach_to_torch_xla(self) -> None:
        version = re.match(r"(\d+)\.(\d+)", str(sys.modules["torch_xla"].__version__))
        if version is not None and tuple(map(int, version.groups())) < _FIRST_TORCH_XLA:
            return  # the torch_xla hook serves it
        from graphstash.hooks.pjrt.from_torch_xla import TorchXlaSeam

        self._torch_xla = TorchXlaSeam(self._attach_path)

    def _attach_to_jax(self) -> None:
        """Attach the plug-ins that are already loaded, and each other plug-in before JAX loads it.

        JAX 0.4.31 to 0.10.2 load all plug-ins by this function, with this name and these arguments.
        """
        from jax._src import xla_bridge
        from jaxlib import xla_client

        self._partitioners = Partitioners(xla_client, xla_bridge)
        self._partitioners.observe(self._patches)
        self._patches.wrap(xla_client, "load_pjrt_plugin_dynamically", self._wrap_load)
        for plugin in loaded_plugins():
            self._attach(plugin)

    def _wrap_load(self, load_plugin: Callable[..., Any]) -> Callable[..., Any]:
        def load(plugin_name: str, library_path: str) -> Any:
            self._attach_path(str(library_path))
            return load_plugin(plugin_name, library_path)

        return load

    def _attach_path(self, path: str) -> None:
        """Attach the plug-in at a path. Never raises."""
        if self._closed:
            return
        try:
            plugin = plugin_at(path)
            if plugin is not None:
                self._attach(plugin)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame
            # If the library cannot be loaded, the framework's own attempt reports that.
            _log.debug("no hook in %s: %r", path, error)

    def _attach(self, plugin: Plugin) -> None:
        with self._lock:
            if plugin.api.table in self._interceptors:
                return
            self._interceptors[plugin.api.table] = None
            if self._is_known(plugin):
                # Import late: only a process with a plug-in needs the interceptor.
                from graphstash.hooks.pjrt.interceptor import Interceptor

                try:
                    interceptor = Interceptor(
                        plugin,
                        self._current_cache,
                        partitioners=lambda: self._partitioners,
                        late_options=self._late_options,
                    )
                except OSError as error:
                    _log.warning("graphstash: %s is not shared: %s", plugin.path, error)
                    return
                self._interceptors[plugin.api.table] = interceptor

    @staticmethod
    def _is_known(plugin: Plugin) -> bool:
        api = plugin.api
        if api.major != 0 or api.minor < FIRST_MINOR or not api.has(*_NEEDED):
            _log.warning(
                "graphstash: the pjrt hook does not support PJRT %d.%d of %s (it needs 0.%d or "
                "newer, with serialization); what it compiles is not shared",
                api.major,
                api.minor,
                plugin.path,
                FIRST_MINOR,
            )
            return False
        if not TRIED_MINORS[0] <= api.minor <= TRIED_MINORS[1]:
            _log.warning(
                "graphstash: the pjrt hook was tested with PJRT 0.%d to 0.%d, not 0.%d of %s; it "
                "is installed, because the interface only grows",
                *TRIED_MINORS,
                api.minor,
                plugin.path,
            )
        return True
