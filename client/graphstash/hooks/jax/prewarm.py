"""Compile a program for a TPU on a host without a TPU, and publish the executable.

libtpu compiles without a chip: JAX can lower and compile a program for the devices of a topology,
but not run it. JAX makes its usual key, so a job on a real slice finds the artifact if all
components of the key are the same. `Prewarmed.components` has JAX's hashes, for comparison.

Two assumptions are not tested on a real TPU: that a slice describes its topology as
`get_topology_desc` does (else the job misses), and that it can load the executable (else JAX warns
and compiles).
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
from jax._src import cloud_tpu_init
from jax.experimental import topologies

from graphstash._artifacts.stash import Stash
from graphstash._compile.in_flight import HeldLease
from graphstash._user_code import load
from graphstash.config import ClientConfig
from graphstash.errors import ConfigError, UnprovedError
from graphstash.hooks.jax.compiling import Program
from graphstash.hooks.jax.entries import decompress
from graphstash.hooks.jax.fingerprint import request_of
from graphstash.hooks.jax.proof import why_unproved
from graphstash.hooks.jax.seam import Seam, SeamUnavailableError
from graphstash_schema import ArtifactKey
from graphstash_schema.lease import LeaseOutcome, LeaseState

__all__ = ["Prewarmed", "prewarm"]

_COMPONENT: Final = re.compile(r"get_cache_key hash of serialized (.+): ([0-9a-f]{64})")

_MAX_POLL_SECONDS: Final = 20.0
"""Maximum seconds of one request for a lease."""

_RELEASE_SECONDS: Final = 5.0

_FORCE: Final = "JAX_FORCE_TPU_INIT"
"""Variable that makes JAX act as on a host with TPUs."""


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """Result of prewarming one program. All numbers are 0 if the server had the artifact.

    Attributes:
        key: Key under which jobs look the artifact up.
        components: JAX's hash of each component of its key, by name.
        is_new: Whether `prewarm` compiled the program. False if the server had the artifact.
        raw_size_bytes: Size of the uncompressed entry.
        size_bytes: Bytes sent to the server.
    """

    key: ArtifactKey
    jax_key: str
    components: dict[str, str]
    is_new: bool
    compile_seconds: float = 0.0
    raw_size_bytes: int = 0
    size_bytes: int = 0


def prewarm(
    target: str,
    *,
    topology: str,
    platform: str,
    config: ClientConfig,
    only_if_proved: bool = False,
) -> Prewarmed:
    """Compile and publish the program of `target`, unless the server has the artifact.

    The compilation holds the lease of the artifact. While another job holds it, wait for that job,
    at most `config.wait_seconds`.

    `target` is `module:function` or `script.py:function`. The function receives the devices of
    `topology`, a name in `jax.experimental.topologies` such as `v5e:2x2`. It returns `(jitted
    function, arguments)` or `(jitted function, arguments, keyword arguments)` with abstract
    arguments (`jax.ShapeDtypeStruct` with shardings). With `only_if_proved`, compile only if a job
    on the device has proved the key, see `why_unproved`.

    Raises:
        UnprovedError: `only_if_proved` is True, and there is no proof.
        ConfigError: The target or the topology is invalid, the settings are read-only, or this
            version of JAX is not supported.
        CacheError: The server does not answer, or refuses the artifact. If the upload failed, the
            local tier keeps the artifact, unless the server has other bytes or withholds the key.
    """
    if config.read_only:
        raise ConfigError("GRAPHSTASH_READ_ONLY is set: nothing could be published")
    function = _load_function(target)
    devices = _topology_devices(platform, topology)
    with Stash(config) as stash:
        publisher = _Publisher(stash, platform, only_if_proved)
        try:
            seam = Seam(publisher, on_key=publisher.begin)
        except SeamUnavailableError as error:
            raise ConfigError(f"jax {jax.__version__}: {error}") from None
        try:
            with _collect_components(publisher.components):
                jitted, arguments, keywords = _parse_returned(target, function(devices))
                lowered = jitted.lower(*arguments, **keywords)
                publisher.started = monotonic()
                lowered.compile()
        except _AlreadyStoredError as error:
            return error.stored
        finally:
            seam.close()
            publisher.end_lease()
        return publisher.result(target)


class _AlreadyStoredError(Exception):
    """Raised in JAX's look-up, before JAX compiles, because the server has the artifact."""

    def __init__(self, stored: Prewarmed) -> None:
        self.stored = stored
        super().__init__(stored.jax_key)


@dataclass
class _Publisher:
    """Publishes programs for the topology, and ignores JAX's other programs. `components` has JAX's
    hashes of the components of its last key. The compilation began at the monotonic time `started`.
    """

    stash: Stash
    platform: str
    only_if_proved: bool
    components: dict[str, str] = field(default_factory=dict)
    started: float = 0.0
    _done: Prewarmed | None = None
    _error: Exception | None = None
    _lease: HeldLease | None = None

    def begin(self, jax_key: str, program: Program) -> None:
        """Acquire the lease, or raise `_AlreadyStoredError` if the server has the artifact of the
        program.
        """
        if not self._is_for_topology(program):
            return
        request = request_of(jax_key, program)
        key, server = request.key, self.stash.server
        is_stored = bool(server.lookup([key]).found)
        must_prove = self.only_if_proved and not is_stored
        if must_prove and (why := why_unproved(server, request, program)):
            raise UnprovedError(why)
        if is_stored or self._wait_or_lease(key):
            raise _AlreadyStoredError(Prewarmed(key, jax_key, dict(self.components), is_new=False))

    def _wait_or_lease(self, key: ArtifactKey) -> bool:
        """Return whether another job has published the artifact. If not, this process compiles."""
        server, config = self.stash.server, self.stash.config
        until = monotonic() + config.wait_seconds
        while True:
            left = max(0.0, until - monotonic())
            reply = server.acquire(key, wait_seconds=min(left, _MAX_POLL_SECONDS))
            if reply.state is LeaseState.GRANTED:
                self._lease = HeldLease(
                    server,
                    key,
                    token=reply.token or "",
                    ttl_seconds=reply.ttl_seconds or config.lease_seconds,
                    budget_seconds=max(config.wait_seconds, config.lease_seconds),
                )
            if reply.state is not LeaseState.HELD or not left:
                return reply.state is LeaseState.READY

    def end_lease(self) -> None:
        """Release the lease, unless the upload has ended it."""
        if self._lease is not None:
            published = self._done is not None and self._error is None
            self._lease.release(LeaseOutcome.PUBLISHED if published else LeaseOutcome.FAILED)
            self._lease.join(_RELEASE_SECONDS)

    def get(self, *_: object) -> None:
        """Return None, because a compile-only client cannot load an entry."""

    def put(self, jax_key: str, program: Program, entry: bytes) -> None:
        if not self._is_for_topology(program):
            return
        seconds = monotonic() - self.started
        request = request_of(jax_key, program)
        raw = decompress(entry)
        metadata = request.metadata(compile_seconds=seconds, raw_size_bytes=len(raw))
        size = self.stash.put(request.key, raw, metadata)
        self._done = Prewarmed(
            request.key, jax_key, dict(self.components), True, seconds, len(raw), size
        )

    def wants(self, *_: object) -> bool:
        """Return True, because no other process publishes the program."""
        return True

    def end_compilation(self) -> None:
        """Do nothing, because `get` takes no lease."""

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

    def _is_for_topology(self, program: Program) -> bool:
        return program.is_compile_only and program.platform == self.platform


class _ComponentCollector(logging.Handler):
    """Collects the hashes of components that JAX logs when it makes a key."""

    def __init__(self, components: dict[str, str]) -> None:
        super().__init__(logging.DEBUG)
        self._components = components

    def emit(self, record: logging.LogRecord) -> None:
        if found := _COMPONENT.fullmatch(record.getMessage()):
            self._components[found[1]] = found[2]


@contextmanager
def _collect_components(components: dict[str, str]) -> Iterator[None]:
    logger = logging.getLogger("jax._src.cache_key")
    handler = _ComponentCollector(components)
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


def _load_function(target: str) -> Callable[..., Any]:
    function: Callable[..., Any] | None = load(target, what="function")
    if not callable(function):
        raise ConfigError(f"{target!r} is no function")
    return function


def _act_as_on_a_tpu_host() -> None:
    """Set the variables that JAX sets when it is imported on a host with TPUs.

    JAX adds a flag to LIBTPU_INIT_ARGS there, and its key contains the flags. Call this before
    libtpu is loaded, because libtpu reads the flags at that time.
    """
    settings = ("jax_platforms", "jax_pjrt_client_create_options")
    before = {name: getattr(jax.config, name) for name in settings if hasattr(jax.config, name)}
    was_there, was_forced = cloud_tpu_init.running_in_cloud_tpu_vm, os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        cloud_tpu_init.cloud_tpu_init()
    finally:
        if was_forced is None:
            del os.environ[_FORCE]
        # Programs for this host run on its CPU.
        cloud_tpu_init.running_in_cloud_tpu_vm = was_there
        for name, value in before.items():
            jax.config.update(name, value)


def _topology_devices(platform: str, topology: str) -> list[Any]:
    if platform == "tpu":
        _act_as_on_a_tpu_host()
    # Otherwise libtpu asks the cloud's metadata server for the hardware, which takes minutes on a
    # host outside a cloud.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Otherwise libtpu fails if another process has loaded it, such as a job on the chip of this
    # host. Compiling for a topology uses no chip.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(topology, platform).devices)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        message = str(error)
        if "not installed" in message or "libtpu" in message:
            message += " (pip install libtpu)"
        raise ConfigError(f"--topology {topology}: {message}") from None


def _parse_returned(target: str, returned: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    match returned:
        case (jitted, tuple() | list() as values) if hasattr(jitted, "lower"):
            return jitted, tuple(values), {}
        case (jitted, tuple() | list() as values, dict() as keywords) if hasattr(jitted, "lower"):
            return jitted, tuple(values), keywords
        case _:
            raise ConfigError(
                f"{target!r} gave {type(returned).__name__}; expected (jitted function, "
                "arguments) or (jitted function, arguments, keyword arguments)"
            )
