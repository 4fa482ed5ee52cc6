"""Entries: JAX's look-ups and results, in our words."""

import logging
from collections.abc import Callable
from typing import Final, Protocol

import jax

from graphstash._compile import CompileCache
from graphstash._errors import CacheError, Reason
from graphstash._exchange import Exchange
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.fingerprint import Fingerprints
from graphstash.hooks.jax.payload import compiled_in_seconds, unpack
from graphstash.hooks.jax.ranks import ranks

__all__ = ["Entries", "Keeper"]

_log = logging.getLogger("graphstash")

_TWO_KEYS: Final = ("jax_enable_pgle", "jax_compilation_cache_expect_pgle")


class Keeper(Protocol):
    """What the seam asks. `program` is what JAX compiles, `pack` makes an entry for this JAX."""

    def get(self, jax_key: str, program: Program, pack: Callable[[bytes], bytes]) -> bytes | None:
        """The entry, or None: then JAX compiles, and may or may not call `put`."""

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        """Takes what JAX has compiled."""

    def wants(self, jax_key: str, program: Program) -> bool:
        """Whether `put` is of use: not where another process publishes what all compile."""

    def ended(self) -> None:
        """The compiler is done in this thread, one way or the other."""

    def trouble(self, error: Exception) -> None:
        """Hears what went wrong in the calls above; JAX does not."""


class Entries:
    """Serves JAX from the team's cache; for many threads.

    Args:
        cache: counts what goes wrong.
        exchange: finds and publishes.
    """

    def __init__(self, cache: CompileCache, exchange: Exchange) -> None:
        self._fingerprints = Fingerprints()
        self._is_closed = False
        self.go_on(cache, exchange)

    def go_on(self, cache: CompileCache, exchange: Exchange) -> None:
        """Serves from another cache from now on."""
        self._cache = cache
        self._exchange = exchange

    def close(self) -> None:
        """Gives up what was begun; from now on nothing is found and nothing is kept."""
        self._is_closed = True
        self._exchange.close()

    def get(self, jax_key: str, program: Program, pack: Callable[[bytes], bytes]) -> bytes | None:
        """The verified entry, or None."""
        # A compile-only client cannot load an executable, and a program that JAX has asked for a
        # moment ago is still not there: it compiles under the lease that was granted then.
        if (
            self._is_closed
            or program.is_unshareable
            or program.is_compile_only
            or jax_key in program.missed
        ):
            return None
        key, _ = self._fingerprints.of(jax_key, program)
        shared_by = ranks() if program.is_collective else None
        lease = _may_lease(program) or shared_by is not None
        payload = self._exchange.get(key, lease=lease, ranks=shared_by)
        if payload is None:
            program.missed.add(jax_key)
            return None
        program.given[jax_key] = key
        return pack(payload)

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        """Publishes in the background what JAX compiled."""
        if self._is_closed:
            return
        key, parts = self._fingerprints.of(jax_key, program)
        if program.given.pop(jax_key, None) is not None:
            self._exchange.reject(key, f"jax could not load {jax_key}")
        raw = unpack(entry)
        # Since the look-up where there was one: JAX itself counts in whole seconds.
        seconds = None if jax_key in program.missed else compiled_in_seconds(raw)
        self._exchange.put(key, raw, parts=parts, compile_seconds=seconds)

    def wants(self, jax_key: str, program: Program) -> bool:
        """Not where the leader of the job's processes publishes."""
        return self._exchange.wants(self._fingerprints.of(jax_key, program)[0])

    def ended(self) -> None:
        """Releases the lease of what was not put: errors, callbacks, other processes' shares."""
        self._exchange.end()

    def trouble(self, error: Exception) -> None:
        """Counts it; the first of its kind is logged."""
        _log.debug("an entry of jax cannot be shared", exc_info=True)
        self._cache.trouble(CacheError(Reason.INTERNAL, repr(error)))


def _may_lease(program: Program) -> bool:
    """Whether somebody may wait for this compile, and this process for somebody else's.

    Not where nobody would say that it has ended; nor in a process other than the first one, which
    JAX does not let write; nor while JAX looks for a profile-guided variant, because it asks for
    that one first and then compiles the other.
    """
    looks_for_another = any(getattr(jax.config, name, False) for name in _TWO_KEYS)
    return program.is_watched and program.is_alone and not looks_for_another
