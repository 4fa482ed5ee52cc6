"""Ahead-of-time compiles for a TPU, on a host that has none, published under JAX's own key.

libtpu compiles without a chip: a topology's devices can be lowered for, though not run on. JAX keys
such a compile as any other, so a job on the real slice asks for the same key if its inputs are the
same. Whether they are can be seen from the hashes of the key's components, which JAX logs.

Not proven on a real TPU: that a slice describes its topology as `get_topology_desc` does, and that
it loads what was compiled here. A difference in the first costs a miss; in the second, JAX warns
and compiles.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import jax
from jax.experimental import topologies

from graphstash._artifacts.stash import Stash
from graphstash._user_code import load
from graphstash.config import ClientConfig
from graphstash.errors import ConfigError
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.entries import unpack
from graphstash.hooks.jax.fingerprint import request_of
from graphstash.hooks.jax.seam import Seam, SeamUnavailableError
from graphstash_schema import ArtifactKey

__all__ = ["Prewarmed", "prewarm"]

_COMPONENT: Final = re.compile(r"get_cache_key hash of serialized (.+): ([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """What became of one program.

    Attributes:
        key: under which jobs look for it.
        jax_key: what JAX calls it.
        components: JAX's hash of each component of its key, by name.
        is_new: whether it was compiled now; else the server had it.
        compile_seconds: wall time of XLA; 0 when it was there.
        raw_size_bytes: the executable; 0 when it was there.
        size_bytes: what was sent to the server.
    """

    key: ArtifactKey
    jax_key: str
    components: dict[str, str]
    is_new: bool
    compile_seconds: float = 0.0
    raw_size_bytes: int = 0
    size_bytes: int = 0


def prewarm(target: str, *, topology: str, platform: str, config: ClientConfig) -> Prewarmed:
    """Compiles what `target` describes, unless the server has it, and publishes it.

    Args:
        target: `module:function` or `script.py:function`. The function takes the topology's devices
            and gives `(jitted function, arguments)` or `(jitted function, arguments, keyword
            arguments)`, the arguments abstract (`jax.ShapeDtypeStruct` with shardings).
        topology: e.g. `v5e:2x2`, as `jax.experimental.topologies` names it.
        platform: e.g. `tpu`.
        config: the server and the namespace.

    Raises:
        ConfigError: the target or the topology cannot be used.
        CacheError: the server cannot be asked, or cannot take it; this host keeps it then.
        Exception: whatever the target or the compiler raises.
    """
    if config.read_only:
        raise ConfigError("GRAPHSTASH_READ_ONLY is set: nothing could be published")
    function = _function(target)
    devices = _devices(platform, topology)
    with Stash(config) as stash:
        publisher = _Publisher(stash, platform)
        try:
            seam = Seam(publisher, named=publisher.named)
        except SeamUnavailableError as error:
            raise ConfigError(f"jax {jax.__version__}: {error}") from None
        try:
            with _key_components(publisher.components):
                jitted, arguments, named = _described(target, function(devices))
                lowered = jitted.lower(*arguments, **named)
                publisher.started = monotonic()
                lowered.compile()
        except _KnownError as known:
            return known.known
        finally:
            seam.close()
        return publisher.result(target)


class _KnownError(Exception):
    """Ends JAX's compile: there is nothing to do."""

    def __init__(self, known: Prewarmed) -> None:
        self.known = known
        super().__init__(known.jax_key)


@dataclass
class _Publisher:
    """Publishes what is compiled for the topology; JAX's other programs it lets pass.

    Attributes:
        stash: asked and given to.
        platform: of the topology.
        components: of the last key that JAX made.
        started: when the compile began.
    """

    stash: Stash
    platform: str
    components: dict[str, str] = field(default_factory=dict)
    started: float = 0.0
    _done: Prewarmed | None = None
    _error: Exception | None = None

    def named(self, jax_key: str, program: Program) -> None:
        if not self._is_wanted(program):
            return
        key = request_of(jax_key, program).key
        if self.stash.server.lookup([key]).found:
            raise _KnownError(Prewarmed(key, jax_key, dict(self.components), is_new=False))

    def get(self, *_: object) -> None:
        """A compile-only client cannot load what it would be given."""

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        if not self._is_wanted(program):
            return
        seconds = monotonic() - self.started
        request = request_of(jax_key, program)
        raw = unpack(entry)
        metadata = request.metadata(compile_seconds=seconds, raw_size_bytes=len(raw))
        size = self.stash.put(request.key, raw, metadata)
        self._done = Prewarmed(
            request.key, jax_key, dict(self.components), True, seconds, len(raw), size
        )

    def wants(self, *_: object) -> bool:
        """This process compiles for all."""
        return True

    def ended(self) -> None:
        """Nothing was begun."""

    def record_fallback(self, error: Exception) -> None:
        self._error = error

    def result(self, target: str) -> Prewarmed:
        if self._error is not None:
            raise self._error
        if self._done is None:
            raise ConfigError(
                f"{target}: nothing was compiled for the topology; place the arguments on the "
                "devices that the function is given, and use no host callbacks"
            )
        return self._done

    def _is_wanted(self, program: Program) -> bool:
        return program.is_compile_only and program.platform == self.platform


class _Components(logging.Handler):
    """Collects the hashes that JAX logs while it makes a key."""

    def __init__(self, components: dict[str, str]) -> None:
        super().__init__(logging.DEBUG)
        self._components = components

    def emit(self, record: logging.LogRecord) -> None:
        if found := _COMPONENT.fullmatch(record.getMessage()):
            self._components[found[1]] = found[2]


@contextmanager
def _key_components(components: dict[str, str]) -> Iterator[None]:
    logger = logging.getLogger("jax._src.cache_key")
    handler = _Components(components)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def _function(target: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = load(target, what="function")
    if not callable(function):
        raise ConfigError(f"{target!r} is no function")
    return function


def _devices(platform: str, topology: str) -> list[Any]:
    # libtpu would ask a cloud's metadata server what it runs on, for minutes where there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        return list(topologies.get_topology_desc(topology, platform).devices)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        told = str(error)
        if "not installed" in told or "libtpu" in told:
            told += " (pip install libtpu)"
        raise ConfigError(f"--topology {topology}: {told}") from None


def _described(target: str, described: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    match described:
        case (jitted, tuple() | list() as arguments) if hasattr(jitted, "lower"):
            return jitted, tuple(arguments), {}
        case (jitted, tuple() | list() as arguments, dict() as named) if hasattr(jitted, "lower"):
            return jitted, tuple(arguments), named
        case _:
            raise ConfigError(
                f"{target!r} gave {type(described).__name__}; expected (jitted function, "
                "arguments) or (jitted function, arguments, keyword arguments)"
            )
