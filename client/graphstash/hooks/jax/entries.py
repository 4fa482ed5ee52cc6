"""Entries: JAX's look-ups and results, as artifacts.

An entry is `4 bytes: seconds it took to compile, big-endian` and the executable, compressed with
zstd where JAX finds a zstd, else with zlib. On Python 3.14 JAX writes zstd while its key says zlib
(measured), so the format is read from the bytes. Entries are stored without that compression: our
envelope compresses better, and for every reader. The 51 MB of a TPU executable take 10.6 MB as JAX
packs them, and 5.6 MB in the envelope.
"""

import sys
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import jax
import zstandard
from jax._src import compilation_cache

from graphstash._compile.cache import CompileCache
from graphstash._compile.packs import Packs
from graphstash._compile.request import CompileRequest
from graphstash._compile.two_call import TwoCallCache
from graphstash.errors import CacheError, Reason
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.fingerprint import request_of
from graphstash.hooks.jax.ranks import ranks

__all__ = ["Entries", "Keeper", "packer", "unpack"]


_TWO_KEYS: Final = ("jax_enable_pgle", "jax_compilation_cache_expect_pgle")

_TIME_BYTES: Final = 4

_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ZLIB: Final = b"\x78"  # a window of 32 KiB, which is zlib's default

_ZSTD_LEVEL: Final = -50
"""Hardly compresses: the entry goes no further than into JAX's hands."""


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

    def record_fallback(self, error: Exception) -> None:
        """Records an error in the calls above; JAX does not see it."""


class Entries:
    """Serves JAX from the shared cache; for many threads."""

    def __init__(self, cache: CompileCache) -> None:
        self._is_closed = False
        self._packs: Packs | None = None
        self.go_on(cache)

    def go_on(self, cache: CompileCache) -> None:
        """Serves from another cache from now on, in a forked child that has no other threads."""
        self._cache = cache
        self._exchange = TwoCallCache(cache)
        self._opening = threading.Lock()  # guards `_packs`
        if self._packs is not None:
            self._packs = Packs(cache, self._packs.name)

    def close(self) -> None:
        """Releases what was started; from now on nothing is found and nothing more is taken."""
        self._is_closed = True
        self._exchange.close()
        if self._packs is not None:
            self._packs.flush()

    def get(self, jax_key: str, program: Program, pack: Callable[[bytes], bytes]) -> bytes | None:
        """The verified entry, or None."""
        # A compile-only client cannot load an executable, and a program that JAX has asked for a
        # moment ago is still not there: it compiles under the lease that was granted then.
        if self._is_closed or program.is_compile_only or jax_key in program.missed:
            return None
        request = _requested(jax_key, program)
        if program.unshareable:
            error = CacheError(
                Reason.UNSHAREABLE, f"{request.label} is not shared: {program.unshareable}"
            )
            self._cache.record_fallback(error)
            self._cache.log.add(request, reason=error.reason)
            return None
        key = request.key
        if program.is_small:
            packs = self._packs_for(jax_key, program)
            payload = packs.get(key)
            if payload is not None:
                program.given[jax_key] = key
                return pack(payload)
            if not packs.is_alone(key):
                program.missed.add(jax_key)
                program.packed.add(jax_key)
                return None
        shared_by = ranks() if program.is_collective else None
        lease = _may_lease(program) or shared_by is not None
        payload = self._exchange.get(request, lease=lease, ranks=shared_by)
        if payload is None:
            program.missed.add(jax_key)
            return None
        program.given[jax_key] = key
        return pack(payload)

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        """Publishes in the background what JAX compiled."""
        if self._is_closed or program.unshareable:
            return
        request = _requested(jax_key, program)
        key = request.key
        raw = unpack(entry)
        if program.given.pop(jax_key, None) is not None:
            self._exchange.reject(key, f"jax could not load {jax_key}")
            if program.is_small and self._packs is not None and not self._packs.is_alone(key):
                self._packs.reject(key)
                return  # what was published first stays
        if jax_key in program.packed and self._packs is not None:
            seconds = self._packs.put(key, raw)
            if seconds is not None:
                self._exchange.put(request, raw, compile_seconds=seconds)
            return
        # Since the look-up where there was one: JAX itself counts in whole seconds.
        seconds = None if jax_key in program.missed else _compiled_in_seconds(raw)
        self._exchange.put(request, raw, compile_seconds=seconds)

    def wants(self, jax_key: str, program: Program) -> bool:
        """Not where the leader of the job's processes publishes."""
        return self._exchange.wants(_requested(jax_key, program).key)

    def ended(self) -> None:
        """Releases the lease of what was not put: errors, callbacks, other processes' shares."""
        self._exchange.end()

    def record_fallback(self, error: Exception) -> None:
        """Counts it; the first of its kind is logged."""
        self._cache.record_fallback(error)

    def _packs_for(self, jax_key: str, program: Program) -> Packs:
        """The packs of this job, which are named after its script and its first small program."""
        with self._opening:
            if self._packs is None:
                job = self._cache.config.job or Path(sys.argv[0] if sys.argv else "").name
                name = partial(_pack_name, f"{job} {jax_key}", program)
                self._packs = Packs(self._cache, name)
            return self._packs


def _requested(jax_key: str, program: Program) -> CompileRequest:
    """Made once for the look-up and the result."""
    if jax_key not in program.requests:
        program.requests[jax_key] = request_of(jax_key, program)
    return program.requests[jax_key]


def _pack_name(job: str, program: Program, number: int) -> CompileRequest:
    label = f"small programs of {job.partition(' ')[0]}"
    return request_of(f"pack {number} of {job}", program, label=label)


def _may_lease(program: Program) -> bool:
    """Whether other jobs may wait for this compile, and this process for theirs.

    Not where the hook does not see the end of a compile; nor in a process other than the first one,
    which JAX does not let write; nor while JAX looks for a profile-guided variant, because it looks
    that one up first and then compiles the other.
    """
    looks_for_another = any(getattr(jax.config, name, False) for name in _TWO_KEYS)
    return program.is_watched and program.is_alone and not looks_for_another


def unpack(entry: bytes) -> bytes:
    """Time and executable, as JAX put them together.

    Raises:
        ValueError: an entry in another format, or none.
    """
    try:
        if entry.startswith(_ZSTD):
            raw = zstandard.ZstdDecompressor().decompressobj().decompress(entry)
        elif entry.startswith(_ZLIB):
            raw = zlib.decompress(entry)
        else:
            raise ValueError(f"an entry of jax begins with {entry[:4].hex() or 'nothing'}")
    except (zstandard.ZstdError, zlib.error) as error:
        raise ValueError(f"an entry of jax cannot be unpacked: {error}") from error
    if len(raw) <= _TIME_BYTES:
        raise ValueError(f"an entry of jax has {len(raw)} bytes and no executable")
    return raw


def _compiled_in_seconds(raw: bytes) -> float:
    """What JAX measured, rounded down to whole seconds."""
    return float(int.from_bytes(raw[:_TIME_BYTES], "big"))


def packer() -> Callable[[bytes], bytes]:
    """What makes an entry of time and executable, in the format that this JAX reads.

    Raises:
        ValueError: this JAX reads something else.
    """
    probe = compilation_cache.compress_executable(b"graphstash")
    if probe.startswith(_ZSTD):
        return lambda raw: zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
    if probe.startswith(_ZLIB):
        return lambda raw: zlib.compress(raw, 0)
    raise ValueError(f"its entries begin with {probe[:4].hex()}")
