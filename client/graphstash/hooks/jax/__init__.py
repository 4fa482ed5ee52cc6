"""The jax hook: JAX's persistent compilation cache, with the team's cache behind it.

    key_of     JAX names a program; the name is made independent of JAX's compressor
    compiling  what a thread compiles at the moment, and when it is done with it
    entries    a look-up or a result of JAX: to our key, payload and lease, and back
    seam       puts all of it into JAX, and takes it out again

JAX runs whatever bytes its cache returns: the entry of another program with equal shapes gives a
wrong number without a word. So the key stands inside our envelope and is checked before JAX sees a
byte. What JAX still cannot load it reports in a warning, and compiles.

A program in memory costs nothing; neither does one with host callbacks, which JAX never writes.
"""

import logging
from importlib import metadata
from typing import Final

import jax

from graphstash._compile import CompileCache
from graphstash._exchange import Exchange
from graphstash.hooks.jax.entries import Entries
from graphstash.hooks.jax.seam import Seam, SeamUnavailableError
from graphstash.hooks.versions import TRIED

__all__ = ["JaxHook", "install"]

_log = logging.getLogger("graphstash")

_TRIED: Final = TRIED["jax"]


def install(cache: CompileCache) -> "JaxHook | None":
    """Puts the cache into JAX; best before the first compile, because it does not look back.

    Returns:
        The hook, or None when it stepped aside; a warning has said why.
    """
    version = str(jax.__version__)
    if not _TRIED.covers(version):
        _log.warning(
            "graphstash: the hook was tried with jax %s, not with %s; it goes by the names that "
            "it finds",
            _TRIED,
            version,
        )
    try:
        return JaxHook(cache)
    except SeamUnavailableError as error:
        _log.warning("graphstash: jax %s is not shared: %s", version, error)
        return None


class JaxHook:
    """Owns what was put into JAX."""

    def __init__(self, cache: CompileCache) -> None:
        self._entries = Entries(cache, _exchange(cache))
        self._seam = Seam(self._entries)

    def close(self) -> None:
        """Gives JAX its cache and its settings back; what is being compiled is not shared."""
        self._seam.close()
        self._entries.close()

    def after_fork(self, cache: CompileCache) -> bool:
        """The child goes on with its own cache: nothing of the hook lives in a thread."""
        self._entries.go_on(cache, _exchange(cache))
        return True


def _exchange(cache: CompileCache) -> Exchange:
    toolchain = f"jax {jax.__version__} jaxlib {metadata.version('jaxlib')}"
    return Exchange(cache, toolchain=toolchain)
