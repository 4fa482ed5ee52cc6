"""One intercepted compilation, by one of PJRT's two compile functions.

`serve`     runs before the original function; True if it has put an executable into the arguments
`publish`   runs after it: copies the compiled executable and uploads the copy in the background
`end`       runs last, whether the compilation succeeded or failed
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Final

from graphstash._compile.cache import CompileCache, InFlightCompile
from graphstash._compile.request import CompileRequest
from graphstash.errors import CacheError, Reason
from graphstash.hooks.pjrt.abi import UNIMPLEMENTED, Function
from graphstash.hooks.pjrt.api import PjrtError
from graphstash.hooks.pjrt.fingerprint import Fingerprints, Topology, label_of, toolchain
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash_schema import ArtifactKey, ArtifactKind

__all__ = ["AheadOfTimeCall", "Call", "ClientCall", "OriginalCall", "TrackRecord"]

_log = logging.getLogger("graphstash")

_MAX_REJECTIONS: Final = 2


@dataclass(slots=True)
class TrackRecord:
    """How well a plug-in has worked with the cache so far.

    Attributes:
        loaded: Number of artifacts that it has loaded; approximate, because threads race.
        rejected: Number of artifacts that it could not load.
        cannot_serialize: Whether it has refused to serialize an executable.
    """

    loaded: int = 0
    rejected: int = 0
    cannot_serialize: bool = False

    @property
    def should_give_up(self) -> bool:
        """Whether the plug-in cannot serialize, or rejected several artifacts and loaded none."""
        return self.cannot_serialize or (self.rejected >= _MAX_REJECTIONS and not self.loaded)


class OriginalCall:
    """The plug-in's own function, bound to the caller's arguments.

    Attributes:
        seconds: Wall time of the compilation.
    """

    def __init__(self, function: Callable[[int], int | None], address: int, args: Any) -> None:
        self.seconds = 0.0
        self._function = function
        self._address = address
        self._args = args
        self._started: float | None = None

    def __call__(self) -> int:
        """Compile, unless an earlier call has succeeded, and return the `PJRT_Error *` or 0.

        The executable in the arguments shows the success. A flag could miss it: a signal handler
        may raise between the function's return and the next Python step (see `Shield`).
        """
        if self._started is None:
            self._args.executable = None
            self._started = monotonic()
        error = None if self._args.executable else self._function(self._address)
        self.seconds = monotonic() - self._started
        return error or 0


class Call(ABC):
    """A framework's call of a compile function; `args` are its arguments, as laid out in `abi`."""

    def __init__(
        self, args: Any, *, plugin: Plugin, cache: CompileCache, track_record: TrackRecord
    ) -> None:
        self.args = args
        self.plugin = plugin
        self.cache = cache
        self.track_record = track_record
        self.compilation: InFlightCompile | None = None
        self._describe_again: Callable[[], CompileRequest | None] = lambda: None

    @abstractmethod
    def serve(self, fingerprints: Fingerprints) -> bool:
        """Put an executable into the arguments. Return False if the plug-in must compile."""

    @abstractmethod
    def publish(self, *, compile_seconds: float) -> None:
        """Publish the executable in the arguments."""

    def end(self) -> None:
        """Release the lease if `publish` published nothing, so that a waiting job may compile."""
        compilation, self.compilation = self.compilation, None
        if compilation is not None:
            compilation.abandon()

    def describe(self, fingerprints: Fingerprints, topology: Topology) -> CompileRequest | None:
        """Return the request for the program, or None if no other process can use the program."""
        self._describe_again = partial(self.describe, fingerprints, topology)
        parts = fingerprints.parts(self.args, topology)
        if parts is None:
            why = "a program is not shared: it calls a Python function of this process"
            self.cache.record_fallback(CacheError(Reason.UNSHAREABLE, why))
            return None
        return CompileRequest.of(
            ArtifactKind.PJRT,
            topology.device_type,
            parts,
            toolchain=toolchain(self.plugin),
            label=label_of(self.args),
        )

    def publish_executable(self, executable: int, *, compile_seconds: float) -> None:
        """Copy a `PJRT_Executable` and publish the copy as the result of `compilation`.

        The copy happens now, not in the background, because an exiting framework destroys the
        client that owns the executable.

        Raises:
            PjrtError: Serializing fails, although the plug-in implements it.
        """
        if (compilation := self.compilation) is None:
            return
        now = self._describe_again()
        if now is None or now.key != compilation.key:  # files or variables have changed
            why = "a program is not shared: its key changed while a plug-in compiled it"
            self.cache.note_unshared(compilation.request, why)
            return
        try:
            with self.plugin.api.serialized(Function.EXECUTABLE_SERIALIZE, executable) as payload:
                compilation.publish_bytes(payload, compile_seconds=compile_seconds)
        except PjrtError as error:
            if error.code != UNIMPLEMENTED:
                raise
            self.track_record.cannot_serialize = True
            _log.warning(
                "graphstash: %s does not serialize its executables (%s), so they are compiled as "
                "usual and not shared",
                self.plugin.path.name,
                error,
            )
            return
        self.compilation = None  # the upload ends it


class ClientCall(Call):
    """A call of `PJRT_Client_Compile` with `ClientCompileArgs`: compiles for a client's devices."""

    def serve(self, fingerprints: Fingerprints) -> bool:
        """Load the artifact with the caller's options, or begin a compilation if there is none."""
        topology = Topology.of_client(self.plugin.api, self.args.client)
        request = self.describe(fingerprints, topology) if _is_served(topology) else None
        if request is None:
            return False
        found = self.cache.fetch_bytes_or_start(request)
        if isinstance(found, InFlightCompile):
            self.compilation = found
            return False
        return self._load(request.key, found)

    def publish(self, *, compile_seconds: float) -> None:
        """Publish the executable as the result of the compilation that `serve` began."""
        if self.compilation is not None:
            with self.plugin.api.executable_of(self.args.executable) as executable:
                self.publish_executable(executable, compile_seconds=compile_seconds)

    def _load(self, key: ArtifactKey, serialized: bytes) -> bool:
        try:
            self.args.executable = self.plugin.api.load(
                self.args.client,
                serialized,
                options=self.args.options,
                options_size=self.args.options_size,
            )
        except PjrtError as error:
            self.track_record.rejected += 1
            name = self.plugin.path.name
            self.cache.reject(key, f"{name} could not load {key}; it compiles instead: {error}")
            return False
        self.track_record.loaded += 1
        return True


def _is_served(topology: Topology) -> bool:
    """Return whether one process may skip a compilation, or wait, while other processes compile.

    With several processes, only TPUs allow this. On GPUs, the processes of a job may share the
    search for the best kernels (`--xla_gpu_shard_autotuning`). Each then waits for the results of
    all others, so all must compile. At this level, the processes have no store through which they
    could agree.
    """
    return topology.process_count <= 1 or topology.platform.lower() == "tpu"


class AheadOfTimeCall(Call):
    """A call of `PJRT_Compile` with `AheadOfTimeArgs`: compiles for a description of devices.

    The devices need not exist. The resulting executable has no client, and PJRT cannot deserialize
    without a client (up to 0.105, by its CHANGELOG; libtpu 0.0.42.1 returns an error). Therefore
    this call always compiles. It publishes the result for jobs that compile the same program with a
    client. No test has shown that a TPU loads such a result. If it does not, the job counts a
    rejected artifact and compiles.
    """

    _request: CompileRequest | None = None

    def serve(self, fingerprints: Fingerprints) -> bool:
        """Return False, and describe the program."""
        topology = Topology.of(self.plugin.api, self.args.topology)
        self._request = self.describe(fingerprints, topology)
        return False

    def publish(self, *, compile_seconds: float) -> None:
        """Publish the executable, unless the server has it.

        No lease is necessary, because a waiting process could not load the result.

        Raises:
            CacheError: The server does not answer the look-up.
        """
        if self._request is None or self.cache.stash.server.is_read_only:
            return
        if not self.cache.stash.server.lookup([self._request.key]).found:
            self.cache.counters.count_miss(self._request.key)
            self.compilation = self.cache.begin(self._request)
            self.publish_executable(self.args.executable, compile_seconds=compile_seconds)
