"""The triton hook: a kernel that anyone has compiled is put where Triton keeps its own.

Triton asks its cache manager for a kernel before it compiles it, and hands the result over file by
file. The manager is replaced, in this process only:

    manager    Triton's directory first, then the team; whole kernels only
    backend    the same behind Triton's own `RemoteCacheManager`
    kernels    look-up, publication, and the lease between them
    kernel     which files are one whole kernel that may travel
    archive    the bytes of them
    fingerprint, source    the key; the values of globals that Triton's own key leaves out

Without `graphstash run` or `graphstash.install()`, Triton's variables are enough:

    TRITON_CACHE_MANAGER=graphstash.hooks.triton:SharedCacheManager

or, with one more look-up for every kernel that lies on the disk already,

    TRITON_CACHE_MANAGER=triton.runtime.cache:RemoteCacheManager
    TRITON_REMOTE_CACHE_BACKEND=graphstash.hooks.triton:SharedCacheBackend

Stays on its host: what Triton has the host's C compiler build, and autotuning results
(`TRITON_CACHE_AUTOTUNING`), which are measurements of one machine under the load of that moment.
"""

import logging
from typing import Final

import triton

from graphstash._compile import CompileCache
from graphstash.hooks.triton.backend import SharedCacheBackend
from graphstash.hooks.triton.kernels import Kernels
from graphstash.hooks.triton.manager import SharedCacheManager
from graphstash.hooks.triton.seam import (
    MANAGER_VARIABLE,
    ManagerSeam,
    chosen_manager,
    is_ours,
    manager_seam,
    watch_compile,
)
from graphstash.hooks.versions import TRIED

__all__ = ["SharedCacheBackend", "SharedCacheManager", "TritonHook", "install"]

_log = logging.getLogger("graphstash")

_TRIED: Final = TRIED["triton"]


def install(cache: CompileCache) -> "TritonHook | None":
    """Puts the cache into Triton.

    Returns:
        The hook, or None when it stepped aside; a warning has said why.
    """
    seam = manager_seam()
    if seam is None or not _TRIED.covers(triton.__version__):
        _log.warning(
            "graphstash: the triton hook knows triton %s, not %s; it steps aside",
            _TRIED,
            triton.__version__,
        )
        return None
    chosen = chosen_manager(seam)
    if chosen and not is_ours(chosen):
        _log.warning(
            "graphstash: triton was given the cache manager %s, which stays; set %s to "
            "%s:SharedCacheManager, or to nothing, to share kernels",
            chosen,
            MANAGER_VARIABLE,
            __name__,
        )
        return None
    return TritonHook(cache, seam, manager=None if chosen else SharedCacheManager)


class TritonHook:
    """Triton's cache manager, and the way around `triton.compile` that ends a lease.

    Args:
        cache: finds and publishes.
        seam: where Triton's manager is.
        manager: what to put there; None when the user has named one of ours himself.
    """

    def __init__(
        self, cache: CompileCache, seam: ManagerSeam, *, manager: type[SharedCacheManager] | None
    ) -> None:
        self._seam = seam
        self._kernels = Kernels.of_this_process = Kernels(cache)
        self._unwatch = watch_compile(self._kernels)
        self._manager = manager
        if manager is not None:
            seam.set(manager)

    def close(self) -> None:
        """Takes the hook out; a compilation under way goes on alone."""
        if self._manager is not None and self._seam.get() is self._manager:
            self._seam.set(None)
        self._unwatch()
        Kernels.of_this_process = None
        self._kernels.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """A child shares as its parent does."""
        self._kernels.go_on_with(cache)
        return True
