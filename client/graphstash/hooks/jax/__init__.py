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
import re
from importlib import metadata
from typing import Final

import jax

from graphstash._compile import CompileCache
from graphstash._exchange import Exchange
from graphstash.hooks.jax.entries import Entries
from graphstash.hooks.jax.seam import Seam, SeamUnavailableError

__all__ = ["JaxHook", "install"]

_log = logging.getLogger("graphstash")

_TRIED: Final = ((0, 4, 31), (0, 10, 2))
"""First and last version with tests; what the hook needs was read in 0.4.25 to 0.12.0."""


def install(cache: CompileCache) -> "JaxHook | None":
    """Puts the cache into JAX; best before the first compile, because it does not look back.

    Returns:
        The hook, or None when it stepped aside; a warning has said why.
    """
    version = str(jax.__version__)
    first, last = (".".join(map(str, bound)) for bound in _TRIED)
    if not _TRIED[0] <= _numbers(version) <= _TRIED[1]:
        _log.warning(
            "graphstash: the hook was tried with jax %s to %s, not with %s; it goes by the names "
            "that it finds",
            first,
            last,
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


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: `0.10.2.dev2026+g1` gives (0, 10, 2)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
