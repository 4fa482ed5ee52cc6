"""The pjrt hook: stands in for the compile functions in the table of a PJRT plug-in.

A plug-in (TPU, Neuron, CUDA, CPU) is a shared library with one table of functions, which every
framework in the process calls through. So what is put there is seen by all of them, whenever they
got hold of the table, and no framework has to know.

    from_torch_xla             learns which plug-ins there are, or will be
    plugins, api, abi          find one, and speak with it
    interceptor                stands in its table, and raises nothing into C++
    call                       what is done about a call
    fingerprint, canonical     the key

It serves torch_xla 2.8 and newer, whose own persistent cache cannot load from a plug-in
(pytorch/xla#9094); older ones have the torch_xla hook. JAX is served only where the jax hook is
switched off: that one sits above, knows programs without their source lines, and would store
everything a second time. A plug-in that JAX shares with torch_xla in one process is served for
both.
"""

import ctypes
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from graphstash._compile.cache import CompileCache
from graphstash.hooks.import_hook import when_imported
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
    """Puts the cache into the plug-ins that are loaded and those that will be.

    Returns:
        The hook, or None when it was not installed; a warning says why.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != POINTER_BYTES:
        _log.warning("graphstash: the pjrt hook supports only 64-bit Linux; it is not installed")
        return None
    return PjrtHook(cache)


class PjrtHook:
    """Owns everything that was put into plug-ins and frameworks."""

    def __init__(self, cache: CompileCache) -> None:
        self._cache = cache
        self._owner = os.getpid()
        self._closed = False
        self._lock = threading.Lock()  # guards the next; never held while something compiles
        self._interceptors: dict[int, Interceptor | None] = {}
        self._patches = Patches()
        self._torch_xla: TorchXlaSeam | None = None
        self._follow("torch_xla", self._into_torch_xla)
        if "jax" not in cache.config.hooks:
            self._follow("jax", self._into_jax)

    def close(self) -> None:
        """Puts everything back; calls in flight finish in functions that are never freed."""
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
        """The child has a copy of every table, with our functions in it: they get its cache."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._cache = cache
        self._owner = os.getpid()
        return True

    def _cache_now(self) -> CompileCache | None:
        """None in a child that has no session of its own: the cache is its parent's."""
        return self._cache if not self._closed and self._owner == os.getpid() else None

    def _follow(self, framework: str, action: Callable[[], None]) -> None:
        """Calls `action` when the framework is there: now, or when it has been imported."""
        careful = partial(self._careful, framework, action)
        if framework in sys.modules:
            careful()
        else:
            when_imported(framework, careful)

    def _careful(self, framework: str, action: Callable[[], None]) -> None:
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

    def _into_torch_xla(self) -> None:
        version = re.match(r"(\d+)\.(\d+)", str(sys.modules["torch_xla"].__version__))
        if version is not None and tuple(map(int, version.groups())) < _FIRST_TORCH_XLA:
            return  # the torch_xla hook's
        from graphstash.hooks.pjrt.from_torch_xla import TorchXlaSeam

        self._torch_xla = TorchXlaSeam(self._attach_path)

    def _into_jax(self) -> None:
        """By its path a plug-in is loaded, and its table patched, right before JAX loads it.

        The function has had this name and these arguments in JAX 0.4.31 to 0.10.2, for TPUs, GPUs
        and all other plug-ins.
        """
        from jaxlib import xla_client

        self._patches.wrap(xla_client, "load_pjrt_plugin_dynamically", self._attach_before)
        for plugin in loaded_plugins():
            self._attach(plugin)

    def _attach_before(self, load_plugin: Callable[..., Any]) -> Callable[..., Any]:
        def load(plugin_name: str, library_path: str) -> Any:
            self._attach_path(str(library_path))
            return load_plugin(plugin_name, library_path)

        return load

    def _attach_path(self, path: str) -> None:
        """Attaches the plug-in at a path; never raises."""
        if self._closed:
            return
        try:
            plugin = plugin_at(path)
            if plugin is not None:
                self._attach(plugin)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame
            # A library that cannot be loaded is its framework's to report.
            _log.debug("no hook in %s: %r", path, error)

    def _attach(self, plugin: Plugin) -> None:
        with self._lock:
            if plugin.api.table in self._interceptors:
                return
            self._interceptors[plugin.api.table] = None
            if self._is_known(plugin):
                # Only a process with a plug-in needs it.
                from graphstash.hooks.pjrt.interceptor import Interceptor

                try:
                    interceptor = Interceptor(plugin, self._cache_now)
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
