"""One intercepted compilation: what is common to the two functions that compile.

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

from graphstash._compile import Compilation, CompileCache
from graphstash._errors import LocalTierError
from graphstash.hooks.pjrt.abi import UNIMPLEMENTED, Function
from graphstash.hooks.pjrt.api import PjrtError
from graphstash.hooks.pjrt.fingerprint import Fingerprints, toolchain
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash.hooks.pjrt.topology import Topology
from graphstash_schema import ArtifactKey, ArtifactKind, fingerprint_of

__all__ = ["Call", "Experience", "Original"]

_log = logging.getLogger("graphstash")

_HOPELESS_REJECTIONS: Final = 2


@dataclass(slots=True)
class Experience:
    """What is known of a plug-in by now.

    Attributes:
        loaded: artifacts that it has loaded; roughly, when threads count at once.
        rejected: artifacts that it could not load.
        is_mute: it does not serialize.
    """

    loaded: int = 0
    rejected: int = 0
    is_mute: bool = False

    @property
    def is_hopeless(self) -> bool:
        """Whether nothing can be shared: artifacts cannot be made, or several and none loaded."""
        return self.is_mute or (self.rejected >= _HOPELESS_REJECTIONS and not self.loaded)


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
        self.compilation: Compilation | None = None
        self._parts: dict[str, str] = {}

    @abstractmethod
    def serve(self, fingerprints: Fingerprints) -> bool:
        """Puts an executable into the arguments; False when it has to be compiled."""

    @abstractmethod
    def publish(self, *, compile_seconds: float) -> None:
        """Publishes the executable that is in the arguments."""

    def end(self) -> None:
        """Nothing more is coming: whoever waits for this compilation may try."""
        compilation, self.compilation = self.compilation, None
        if compilation is not None:
            compilation.abandon()

    def describe(self, fingerprints: Fingerprints, topology: Topology) -> ArtifactKey | None:
        """The key of what is compiled; None for what no other process can use."""
        parts = fingerprints.parts(self.args, topology)
        if parts is None:
            return None
        self._parts = parts
        return ArtifactKey(
            kind=ArtifactKind.PJRT,
            device_type=topology.device_type,
            fingerprint=fingerprint_of(ArtifactKind.PJRT, parts),
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
            self.experience.is_mute = True
            _log.warning(
                "graphstash: %s does not serialize its executables (%s), so there is nothing to "
                "share; they are compiled as usual",
                self.plugin.path.name,
                error,
            )
            return
        except OSError as error:
            self.cache.trouble(LocalTierError(str(error)))
            if path is not None:
                path.unlink(missing_ok=True)
            return
        compilation.publish(
            path,
            compile_seconds=compile_seconds,
            parts=self._parts,
            toolchain=toolchain(self.plugin),
            done=lambda: path.unlink(missing_ok=True),
        )
        self.compilation = None  # it ends with the upload
