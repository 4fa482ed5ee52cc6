"""Entries of JAX's cache, stored as artifacts.

An entry consists of the compile time (seconds, 4 bytes, big-endian) and the serialized executable.
JAX compresses the entry with zstd if it finds a zstd module, else with zlib. On Python 3.14, JAX
uses zstd although its key names zlib (measured), so `decompress` detects the format from the bytes.

An artifact holds the uncompressed entry, which a JAX with either compressor can use. The envelope
compresses it better: a TPU executable of 51 MB takes 5.6 MB, and 10.6 MB in JAX's format.
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
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.fingerprint import request_of
from graphstash.hooks.jax.ranks import ranks

__all__ = ["Entries", "EntryStore", "decompress", "make_compressor"]


_PGLE_SETTINGS: Final = ("jax_enable_pgle", "jax_compilation_cache_expect_pgle")

_TIME_BYTES: Final = 4

_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_ZLIB: Final = b"\x78"  # a window of 32 KiB, which is zlib's default

_ZSTD_LEVEL: Final = -50
"""A fast level that hardly compresses: JAX decompresses the entry at once, in this process."""


class EntryStore(Protocol):
    """Answers the calls that `Seam` receives from JAX. `compress` returns an entry for this JAX."""

    def get(
        self, jax_key: str, program: Program, compress: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return the entry. None: JAX compiles, and then calls `put` if this process may write."""

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        """Store an entry that JAX has compiled."""

    def wants(self, jax_key: str, program: Program) -> bool:
        """Return whether `put` is useful; False if another process publishes the same result."""

    def end_compilation(self) -> None:
        """Handle the end of a compilation in this thread, successful or not."""

    def record_fallback(self, error: Exception) -> None:
        """Record an error of another method. `Seam` does not pass it on to JAX."""


class Entries:
    """Serves JAX from the shared cache. Thread-safe."""

    def __init__(self, cache: CompileCache) -> None:
        self._is_closed = False
        self._packs: Packs | None = None
        self.switch_cache(cache)

    def switch_cache(self, cache: CompileCache) -> None:
        """Use another cache. Call this in a forked child, before it starts threads."""
        self._cache = cache
        self._exchange = TwoCallCache(cache)
        self._opening = threading.Lock()  # guards `_packs`
        if self._packs is not None:
            self._packs = Packs(cache, self._packs.request_for)

    def close(self) -> None:
        """Release the leases and publish the pending pack. Later calls find and store nothing."""
        self._is_closed = True
        self._exchange.close()
        if self._packs is not None:
            self._packs.flush()

    def get(
        self, jax_key: str, program: Program, compress: Callable[[bytes], bytes]
    ) -> bytes | None:
        """Return the verified entry, or None."""
        # A compile-only client cannot load an executable. After a miss, JAX compiles under the
        # lease of the first look-up, so a second look-up must not wait for that lease.
        if self._is_closed or program.is_compile_only or jax_key in program.missed:
            return None
        request = _request_for(jax_key, program)
        if program.unshareable:
            self._cache.refuse(request, f"{request.label} is not shared: {program.unshareable}")
            return None
        key = request.key
        if program.is_small:
            packs = self._packs_for(jax_key, program)
            payload = packs.get(key)
            if payload is not None:
                program.given[jax_key] = key
                return compress(payload)
            if not packs.has_own_artifact(key):
                packs.log_miss(request)
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
        return compress(payload)

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        """Publish an entry that JAX has compiled, in the background."""
        if self._is_closed or program.unshareable:
            return
        request = _request_for(jax_key, program)
        key = request.key
        raw = decompress(entry)
        if program.given.pop(jax_key, None) is not None:
            self._exchange.reject(key, f"jax could not load {jax_key}")
            if (
                program.is_small
                and self._packs is not None
                and not self._packs.has_own_artifact(key)
            ):
                self._packs.reject(key)
                return  # the published pack still has the key, so a new pack would omit it
        if request_of(jax_key, program).key != key:  # XLA reads files and variables after a look-up
            why = f"{request.label} is not shared: its key changed while JAX compiled it"
            self._cache.note_unshared(request, why)
            return
        if jax_key in program.packed and self._packs is not None:
            seconds = self._packs.put(key, raw)
            if seconds is not None:
                self._exchange.put(request, raw, compile_seconds=seconds)
            return
        # None means the time since the look-up, because JAX rounds its own time to seconds.
        seconds = None if jax_key in program.missed else _compile_seconds_of(raw)
        self._exchange.put(request, raw, compile_seconds=seconds)

    def wants(self, jax_key: str, program: Program) -> bool:
        """Return False if the leader of the job's processes publishes the result."""
        return self._exchange.wants(_request_for(jax_key, program).key)

    def end_compilation(self) -> None:
        """Release the leases of this thread's programs that JAX did not `put`."""
        self._exchange.end()

    def record_fallback(self, error: Exception) -> None:
        """Count a fallback, and log the first one of each reason."""
        self._cache.record_fallback(error)

    def _packs_for(self, jax_key: str, program: Program) -> Packs:
        """Return the job's packs, named after the job or its script and the first small program."""
        with self._opening:
            if self._packs is None:
                job = self._cache.config.job or Path(sys.argv[0] if sys.argv else "").name
                name = partial(_pack_request, f"{job} {jax_key}", program)
                self._packs = Packs(self._cache, name)
            return self._packs


def _request_for(jax_key: str, program: Program) -> CompileRequest:
    """Return the request for a program, the same for its look-up and its result."""
    if jax_key not in program.requests:
        program.requests[jax_key] = request_of(jax_key, program)
    return program.requests[jax_key]


def _pack_request(job: str, program: Program, number: int) -> CompileRequest:
    label = f"small programs of {job.partition(' ')[0]}"
    return request_of(f"pack {number} of {job}", program, label=label)


def _may_lease(program: Program) -> bool:
    """Return whether this process may take a lease, for which other jobs then wait.

    False if the hook cannot detect the end of the compilation, if other processes of the job
    compile the program, or if only another process may write the result. False with profile-guided
    optimization: JAX looks up the optimized program first, but may then compile the other one.
    """
    uses_pgle = any(getattr(jax.config, name, False) for name in _PGLE_SETTINGS)
    return program.is_watched and program.is_alone and not uses_pgle


def decompress(entry: bytes) -> bytes:
    """Return the uncompressed entry: compile time and executable.

    Raises:
        ValueError: The bytes are not an entry in a known format.
    """
    try:
        if entry.startswith(_ZSTD):
            raw = zstandard.ZstdDecompressor().decompressobj().decompress(entry)
        elif entry.startswith(_ZLIB):
            raw = zlib.decompress(entry)
        else:
            raise ValueError(f"an entry of jax begins with {entry[:4].hex() or 'nothing'}")
    except (zstandard.ZstdError, zlib.error) as error:
        raise ValueError(f"an entry of jax cannot be decompressed: {error}") from error
    if len(raw) <= _TIME_BYTES:
        raise ValueError(f"an entry of jax has {len(raw)} bytes and no executable")
    return raw


def _compile_seconds_of(raw: bytes) -> float:
    """Return the compile time that JAX measured and rounded down to whole seconds."""
    return float(int.from_bytes(raw[:_TIME_BYTES], "big"))


def make_compressor() -> Callable[[bytes], bytes]:
    """Return a function that compresses an entry in the format of this JAX.

    Raises:
        ValueError: This JAX uses an unknown format.
    """
    probe = compilation_cache.compress_executable(b"graphstash")
    if probe.startswith(_ZSTD):
        return lambda raw: zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
    if probe.startswith(_ZLIB):
        return lambda raw: zlib.compress(raw, 0)
    raise ValueError(f"its entries begin with {probe[:4].hex()}")
