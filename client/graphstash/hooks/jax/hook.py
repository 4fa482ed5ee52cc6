"""The jax hook: JAX's persistent compilation cache, backed by the shared cache.

    compiling    the program that each thread compiles, and the end of each compilation
    fingerprint  makes the artifact's key from JAX's key and the inputs that JAX's key omits
    smallness    selects the programs that travel in packs
    entries      translates JAX's look-ups and results to artifacts, and back
    seam         installs the hook in JAX, and removes it

JAX does not check the bytes that its cache returns: another program of equal shapes would silently
compute wrong numbers. The artifact therefore contains its key, which the client verifies first. If
JAX still cannot load an entry, it warns and compiles. The hook does not share a program that calls
back into Python, or that Python code partitions: its key would contain addresses in this process.
"""

import logging

import jax

from graphstash._compile.cache import CompileCache
from graphstash.hooks.jax import SPEC
from graphstash.hooks.jax.entries import Entries
from graphstash.hooks.jax.seam import Seam, SeamUnavailableError

__all__ = ["JaxHook", "install"]

_log = logging.getLogger("graphstash")


def install(cache: CompileCache) -> "JaxHook | None":
    """Install the cache in JAX, for programs that are compiled afterwards.

    Returns None if this version of JAX is not supported. A warning gives the reason.
    """
    version = str(jax.__version__)
    if not SPEC.is_supported(version):
        return None
    try:
        return JaxHook(cache)
    except SeamUnavailableError as error:
        _log.warning("graphstash: the jax hook cannot be installed into %s: %s", version, error)
        return None


class JaxHook:
    """The installed hook: owns the patches in JAX."""

    def __init__(self, cache: CompileCache) -> None:
        self._entries = Entries(cache)
        self._seam = Seam(self._entries)

    def close(self) -> None:
        """Restore JAX's cache and settings. The results of running compilations are not shared."""
        self._seam.close()
        self._entries.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """Continue in a forked child with the child's cache. The hook has no threads to restart."""
        self._entries.switch_cache(cache)
        return True
