"""The triton hook: fetches kernels into Triton's own cache, and publishes compiled kernels.

Before Triton compiles a kernel, it asks its cache manager for the kernel. After compiling, it
passes the files of the kernel to the manager. The hook replaces the manager in this process only.
Triton's environment variables can also set it, but child processes without graphstash would inherit
them.

    kernels        the managers: look-up, publication, and the lease in between
    kernel         the files of one complete, shareable kernel, and their format in an artifact
    fingerprint    the key
    source         the values that a kernel reads and Triton's key omits

Without `graphstash run` or `graphstash.install()`, set Triton's variables:

    TRITON_CACHE_MANAGER=graphstash.hooks.triton:SharedCacheManager

or, if one more look-up for every kernel on the disk is acceptable,

    TRITON_CACHE_MANAGER=triton.runtime.cache:RemoteCacheManager
    TRITON_REMOTE_CACHE_BACKEND=graphstash.hooks.triton:SharedCacheBackend

The hook does not share launchers, which the host's C compiler builds. It does not share autotuning
results (`TRITON_CACHE_AUTOTUNING`), which depend on the load of one machine.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import triton
from triton.runtime import cache as triton_cache

from graphstash._compile.cache import CompileCache
from graphstash.hooks.patching import Patches
from graphstash.hooks.triton import SPEC
from graphstash.hooks.triton.kernels import Kernels, SharedCacheManager

__all__ = ["TritonHook", "install"]

_log = logging.getLogger("graphstash")

_MANAGER_VARIABLE: Final = "TRITON_CACHE_MANAGER"
_BACKEND_VARIABLE: Final = "TRITON_REMOTE_CACHE_BACKEND"
_OURS: Final = "graphstash.hooks.triton"
_REMOTE: Final = "triton.runtime.cache:RemoteCacheManager"
_GLOBAL: Final = "__cache_cls"


def install(cache: CompileCache) -> "TritonHook | None":
    """Install the hook.

    Returns:
        The hook, or None if it cannot be installed. A warning gives the reason.
    """
    if not SPEC.is_supported(triton.__version__):
        return None
    chosen = _chosen_manager()
    if chosen and not _is_ours(chosen):
        _log.warning(
            "graphstash: triton uses the cache manager %s, so kernels are not shared; set %s to "
            "%s:SharedCacheManager, or unset it, to share them",
            chosen,
            _MANAGER_VARIABLE,
            _OURS,
        )
        return None
    return TritonHook(cache, manager=None if chosen else SharedCacheManager)


class TritonHook:
    """Sets Triton's cache manager, and wraps `triton.compile` so that a lease ends with the call.

    `manager` is None if the user has chosen a manager of this package.
    """

    def __init__(self, cache: CompileCache, *, manager: type[SharedCacheManager] | None) -> None:
        self._kernels = Kernels(cache)
        self._patches = _watch_compile(self._kernels)
        self._manager = manager
        with self._patches.all_or_none():
            if manager is not None:
                _set_manager(manager)
        Kernels.of_this_process = self._kernels
        Kernels.may_start = False

    def close(self) -> None:
        """Uninstall the hook. A compilation in flight continues without it."""
        if self._manager is not None and _manager() is self._manager:
            _set_manager(None)
        self._patches.undo()
        Kernels.of_this_process = None
        self._kernels.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """Continue in a forked child, with the child's cache. Always returns True."""
        self._kernels.switch_cache(cache)
        return True


def _has_knob() -> bool:
    """Return whether Triton has a knob for the manager (3.4 and later)."""
    # Inspect the class of the knobs: reading the knob would import the manager that the user named.
    return "manager_class" in vars(type(getattr(getattr(triton, "knobs", None), "cache", None)))


def _manager() -> type | None:
    """Return the cache manager that a program has set, or None for Triton's default."""
    if _has_knob():
        knob: type | None = vars(triton.knobs.cache).get("manager_class")
        return knob
    # Before 3.4, a global contains the manager, even if an environment variable has named it.
    value: type = vars(triton_cache)[_GLOBAL]
    return None if value is triton_cache.FileCacheManager else value


def _set_manager(manager: type | None) -> None:
    """Set the cache manager of this process. None restores Triton's default.

    Unlike other knobs, this knob does not set the environment variable, which children inherit.
    """
    if not _has_knob():
        vars(triton_cache)[_GLOBAL] = manager or triton_cache.FileCacheManager
    elif manager is None:
        vars(triton.knobs.cache).pop("manager_class", None)
    else:
        triton.knobs.cache.manager_class = manager


def _chosen_manager() -> str:
    """Return the manager that the user has chosen as `module:class`, or "" for Triton's default.

    If it is Triton's `RemoteCacheManager`, return the backend. Does not import the class, which may
    not be importable yet.
    """
    manager = _name(_manager()) or os.environ.get(_MANAGER_VARIABLE, "")
    if manager != _REMOTE:
        return manager
    cache = getattr(getattr(triton, "knobs", None), "cache", None)
    backend = _name(getattr(cache, "__dict__", {}).get("remote_manager_class"))
    return backend or os.environ.get(_BACKEND_VARIABLE, "") or manager


def _is_ours(manager: str) -> bool:
    return manager.partition(":")[0].startswith(_OURS)


def _watch_compile(kernels: Kernels) -> Patches:
    """Wrap Triton's `compile` under every name that Triton has for it."""
    original: Callable[..., Any] = triton.compiler.compiler.compile

    @functools.wraps(original)
    def compile_and_end(*args: Any, **kwargs: Any) -> Any:
        with kernels.compiling():
            return original(*args, **kwargs)

    patches = Patches()
    for module in _modules_with(original):
        patches.replace(module, "compile", compile_and_end)
    return patches


def _modules_with(function: Callable[..., Any]) -> list[ModuleType]:
    return [
        module
        for name, module in tuple(sys.modules.items())
        if name.partition(".")[0] == "triton"
        and getattr(module, "__dict__", {}).get("compile") is function
    ]


def _name(manager: type | None) -> str:
    return "" if manager is None else f"{manager.__module__}:{manager.__qualname__}"
