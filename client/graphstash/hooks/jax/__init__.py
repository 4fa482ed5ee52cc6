"""The jax hook: JAX's persistent compilation cache, backed by the shared cache.

    compiling    what a thread compiles at the moment, and when it is done with it
    fingerprint  our key, made from JAX's and from what JAX's leaves out
    smallness    which programs travel in packs
    entries      a look-up or a result of JAX: to our key, payload and lease, and back
    seam         puts all of it into JAX, and takes it out again

JAX runs whatever bytes its cache returns: the entry of another program with equal shapes gives a
wrong number without a word. So the key stands inside our envelope and is checked before JAX sees a
byte. What JAX still cannot load it reports in a warning, and compiles.

A program in memory costs nothing. A program that calls back into Python, or that Python code
partitions, is not shared: its key would name the code of this process by an address.
"""

import logging

import jax

from graphstash._compile.cache import CompileCache
from graphstash.hooks.jax.entries import Entries
from graphstash.hooks.jax.seam import Seam, SeamUnavailableError
from graphstash.hooks.versions import is_supported

__all__ = ["JaxHook", "install"]

_log = logging.getLogger("graphstash")


def install(cache: CompileCache) -> "JaxHook | None":
    """Puts the cache into JAX; best before the first compile, because it does not look back.

    Returns:
        The hook, or None when it was not installed; a warning says why.
    """
    version = str(jax.__version__)
    if not is_supported("jax", version):
        return None
    try:
        return JaxHook(cache)
    except SeamUnavailableError as error:
        _log.warning("graphstash: the jax hook cannot be installed into %s: %s", version, error)
        return None


class JaxHook:
    """Owns what was put into JAX."""

    def __init__(self, cache: CompileCache) -> None:
        self._entries = Entries(cache)
        self._seam = Seam(self._entries)

    def close(self) -> None:
        """Restores JAX's cache and settings; what is being compiled is not shared."""
        self._seam.close()
        self._entries.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """Continues in the child with its own cache: the hook has no threads."""
        self._entries.go_on(cache)
        return True
