"""One intercepted compilation, by one of the two functions that compile.

`serve`     before the original call: True when an executable is in the arguments already
`publish`   after it: what was compiled is copied, and uploaded in the background
`end`       in any case, last
"""

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

from graphstash._compile.cache import CompileCache, InFlightCompile
from graphstash._compile.request import CompileRequest
from graphstash.errors import CacheError, LocalTierError, Reason
from graphstash.hooks.pjrt.abi import UNIMPLEMENTED, Function
from graphstash.hooks.pjrt.api import PjrtError
from graphstash.hooks.pjrt.fingerprint import Fingerprints, Topology, label_of, toolchain
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash_schema import ArtifactKey, ArtifactKind

__all__ = ["AheadOfTimeCall", "Call", "ClientCall", "Experience", "Original"]

_log = logging.getLogger("graphstash")

_MAX_REJECTIONS: Final = 2


@dataclass(slots=True)
class Experience:
    """What is known of a plug-in by now.

    Attributes:
        loaded: artifacts that it has loaded; roughly, when threads count at once.
        rejected: artifacts that it could not load.
        cannot_serialize: it does not serialize its executables.
    """

    loaded: int = 0
    rejected: int = 0
    cannot_serialize: bool = False

    @property
    def should_give_up(self) -> bool:
        """Whether nothing can be shared: artifacts cannot be made, or several and none loaded."""
        return self.cannot_serialize or (self.rejected >= _MAX_REJECTIONS and not self.loaded)


class Original:
    """The plug-in's own function with the caller's arguments.

    Attributes:
        seconds: wall time it took.
    """

    def __init__(self, function: Callable[[int], int | None], address: int, args: Any) -> None:
        self.seconds = 0.0
        self._function = function
        self._address = address
        self._args = args
        self._started: float | None = None

    def __call__(self) -> int:
        """Compiles; the `PJRT_Error *`, or 0. Once it has succeeded, a second call does nothing.

        That it has is read from the arguments, because a signal's exception can come between the
        return of the function and the next step of ours (see `Shield`).
        """
        if self._started is None:
            self._args.executable = None
            self._started = monotonic()
        error = None if self._args.executable else self._function(self._address)
        self.seconds = monotonic() - self._started
        return error or 0


class Call(ABC):
    """One call of a framework; `args` are its arguments, of the layout that `abi` gives them."""

    def __init__(
        self, args: Any, *, plugin: Plugin, cache: CompileCache, experience: Experience
    ) -> None:
        self.args = args
        self.plugin = plugin
        self.cache = cache
        self.experience = experience
        self.compilation: InFlightCompile | None = None

    @abstractmethod
    def serve(self, fingerprints: Fingerprints) -> bool:
        """Puts an executable into the arguments; False when it has to be compiled."""

    @abstractmethod
    def publish(self, *, compile_seconds: float) -> None:
        """Publishes the executable that is in the arguments."""

    def end(self) -> None:
        """Gives the lease back if nothing was published, so that a waiting job may compile."""
        compilation, self.compilation = self.compilation, None
        if compilation is not None:
            compilation.abandon()

    def describe(self, fingerprints: Fingerprints, topology: Topology) -> CompileRequest | None:
        """What is looked up; None for what no other process can use."""
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
        """Copies a `PJRT_Executable` and hands it to `compilation`.

        It is copied here and not in the background, because a framework that ends destroys what
        the executable lives on.

        Raises:
            PjrtError: the plug-in cannot serialize this one.
        """
        if (compilation := self.compilation) is None:
            return
        path: Path | None = None
        try:
            with (
                self.plugin.api.serialized(Function.EXECUTABLE_SERIALIZE, executable) as payload,
                tempfile.NamedTemporaryFile(prefix="graphstash-", delete=False) as file,
            ):
                path = Path(file.name)
                file.write(payload)
        except PjrtError as error:
            if error.code != UNIMPLEMENTED:
                raise
            self.experience.cannot_serialize = True
            _log.warning(
                "graphstash: %s does not serialize its executables (%s), so they are compiled as "
                "usual and not shared",
                self.plugin.path.name,
                error,
            )
            return
        except OSError as error:
            self.cache.record_fallback(LocalTierError(str(error)))
            if path is not None:
                path.unlink(missing_ok=True)
            return
        compilation.publish(
            path,
            compile_seconds=compile_seconds,
            done=lambda: path.unlink(missing_ok=True),
        )
        self.compilation = None  # it ends with the upload


class ClientCall(Call):
    """`PJRT_Client_Compile`: compiles for the devices of a client, or loads an artifact.

    The arguments are `ClientCompileArgs`.
    """

    def serve(self, fingerprints: Fingerprints) -> bool:
        """Loads the artifact with the caller's options; without one a compilation begins."""
        topology = Topology.of_client(self.plugin.api, self.args.client)
        request = self.describe(fingerprints, topology) if _is_served(topology) else None
        if request is None:
            return False
        try:
            with tempfile.TemporaryDirectory(
                prefix="graphstash-", ignore_cleanup_errors=True
            ) as directory:
                payload = Path(directory) / "payload"
                self.compilation = self.cache.fetch_or_start(request, payload)
                if self.compilation is not None:
                    return False
                serialized = payload.read_bytes()
        except OSError as error:
            self.cache.record_fallback(LocalTierError(str(error)))
            return False
        return self._load(request.key, serialized)

    def publish(self, *, compile_seconds: float) -> None:
        """Publishes it under the compilation that `serve` began."""
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
            self.experience.rejected += 1
            name = self.plugin.path.name
            self.cache.reject(key, f"{name} could not load {key}; it compiles instead: {error}")
            return False
        self.experience.loaded += 1
        return True


def _is_served(topology: Topology) -> bool:
    """Whether a process may load what the others compile, or wait while another one compiles.

    On GPUs the processes of one job may share the search for the best kernels, each waiting for the
    results of all others (`--xla_gpu_shard_autotuning`): there none may be missing, and at this
    level they have nothing by which they could agree.
    """
    return topology.process_count <= 1 or topology.platform.lower() == "tpu"


class AheadOfTimeCall(Call):
    """`PJRT_Compile`: compiles for a description of devices, which need not be there.

    The arguments are `AheadOfTimeArgs`.

    What it returns has no client, and the interface has no way to read a serialized executable
    without one (none up to 0.105, by its CHANGELOG; libtpu 0.0.42.1 says so when it is asked). So
    nothing is saved here: the result is published, for the jobs that compile the same program with
    a client, and is compiled again the next time. Whether a TPU takes what was compiled without one
    is not tried; if it does not, the job counts a rejected artifact and compiles.
    """

    _request: CompileRequest | None = None

    def serve(self, fingerprints: Fingerprints) -> bool:
        """Only reads the arguments, which are the caller's again after the call."""
        topology = Topology.of(self.plugin.api, self.args.topology)
        self._request = self.describe(fingerprints, topology)
        return False

    def publish(self, *, compile_seconds: float) -> None:
        """Publishes it unless the server has it; no lease, because there is nothing to wait for.

        Raises:
            CacheError: the server cannot say.
        """
        if self._request is None or self.cache.stash.server.is_read_only:
            return
        if not self.cache.stash.server.lookup([self._request.key]).found:
            self.cache.counters.miss(self._request.key)
            self.compilation = self.cache.begin(self._request)
            self.publish_executable(self.args.executable, compile_seconds=compile_seconds)
