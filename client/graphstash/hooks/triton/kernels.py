"""Kernels between Triton and the team: found whole, published whole, never an exception.

Triton makes a new cache manager for every kernel that it compiles, by the manager's class alone. So
what the managers of a process have in common hangs on the class `Kernels`.
"""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as once
from typing import ClassVar

import triton

from graphstash._compile import CompileCache
from graphstash._errors import CacheError, Reason
from graphstash._exchange import Exchange
from graphstash.hooks.triton.fingerprint import artifact_key, is_shareable, parts_of
from graphstash.hooks.triton.kernel import KernelError, pack_kernel, unpack_kernel
from graphstash.hooks.triton.source import source_being_compiled
from graphstash_schema import ArtifactKey

__all__ = ["Kernels", "SharedKernel"]

_log = logging.getLogger("graphstash")


class Kernels:
    """What the cache does for all kernels of this process.

    Attributes:
        of_this_process: the installed hook's; None while there is none.
    """

    of_this_process: ClassVar["Kernels | None"] = None

    def __init__(self, cache: CompileCache) -> None:
        self._thread = threading.local()
        self.go_on_with(cache)

    def go_on_with(self, cache: CompileCache) -> None:
        """Uses another cache from now on, as in a forked child."""
        self._cache = cache
        self._owner = os.getpid()
        self.exchange = Exchange(cache, toolchain=f"triton {triton.__version__}")

    @staticmethod
    def kernel(key: str) -> "SharedKernel | None":
        """One kernel by Triton's key; None where the cache is off.

        It is off in a forked child that has no session of its own: the cache is its parent's.
        Starts the cache when Triton was pointed at this package by its own variables and nothing
        else has started it.
        """
        if Kernels.of_this_process is None:
            _start()
        kernels = Kernels.of_this_process
        if kernels is None or kernels._owner != os.getpid():
            return None
        return SharedKernel(kernels, key)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around one call of Triton's `compile`: whatever becomes of it, its lease ends here."""
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        try:
            yield
        finally:
            self._thread.depth = depth
            if depth == 0:
                self._end()

    @property
    def is_compiling(self) -> bool:
        """Whether this thread is inside `compiling`.

        Only there a lease may be taken: it would be held until the job ends if an unseen call of
        `compile` failed. Unseen is the first one when nothing but Triton's variables starts us.
        """
        return getattr(self._thread, "depth", 0) > 0

    def trouble(self, error: Exception) -> None:
        """Counts what went wrong in here; the first case is logged."""
        _log.debug("the triton hook failed", exc_info=error)
        if not isinstance(error, CacheError):
            error = CacheError(Reason.INTERNAL, repr(error))
        self._cache.trouble(error)

    def close(self) -> None:
        """Gives up whatever was begun."""
        self.exchange.close()

    def _end(self) -> None:
        try:
            self.exchange.end()
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: Triton goes on
            self.trouble(error)


@once
def _start() -> None:
    """Installs this hook; once, so that it can be uninstalled for good."""
    import graphstash  # the session lies above the hooks; only its public name is known here

    try:
        graphstash.install(hooks=("triton",))
    except Exception:  # noqa: BLE001 - a hook's outermost frame: Triton goes on alone
        _log.warning("graphstash: the cache could not be started", exc_info=True)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A group that nobody had when it was asked for."""

    group: str
    artifact: ArtifactKey
    parts: Mapping[str, str]


class SharedKernel:
    """One kernel from its look-up to its publication; belongs to one compilation in one thread."""

    def __init__(self, kernels: Kernels, key: str) -> None:
        self._kernels = kernels
        self._key = key
        self._wanted: _Wanted | None = None
        self._written: dict[str, bytes] = {}

    def find(self, group: str) -> dict[str, bytes] | None:
        """The files of a whole kernel, by name; None when it has to be compiled."""
        try:
            return self._find(group)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: Triton compiles
            self._kernels.trouble(error)
            return None

    def add(self, name: str, content: bytes | str) -> None:
        """Remembers a file that the compiler has written.

        Its bytes are kept until the group is complete, and not read again from the disk, where
        another process may write the same kernel at the same time.
        """
        if self._wanted is not None:
            # What is no text after all is found out when the kernel is packed.
            if isinstance(content, str):
                content = content.encode("utf-8", "surrogatepass")
            self._written[name] = content

    def publish(self, group: str, names: Iterable[str]) -> None:
        """Publishes a group when all of its files were written; nothing happens otherwise.

        What was found, or found and refused, is not published again: the server has it.
        """
        wanted, self._wanted = self._wanted, None
        written, self._written = self._written, {}
        if wanted is None or wanted.group != group:
            return
        try:
            children = {name: written[name] for name in names}
            payload = pack_kernel(group, children, key=self._key)
            self._kernels.exchange.put(wanted.artifact, payload, parts=wanted.parts)
        except KeyError as error:
            _log.debug("%s is not published: %s was never written", group, error)
        except KernelError as error:
            _log.debug("%s is not published: %s", group, error)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: Triton goes on
            self._kernels.trouble(error)

    def trouble(self, error: Exception) -> None:
        """Counts that files could not be used here."""
        self._kernels.trouble(error)

    def _find(self, group: str) -> dict[str, bytes] | None:
        if not is_shareable(os.environ):
            return None
        parts = parts_of(self._key, group, os.environ, source_being_compiled())
        artifact = artifact_key(parts)
        exchange = self._kernels.exchange
        payload = exchange.get(artifact, lease=self._kernels.is_compiling)
        if payload is None:
            self._wanted = _Wanted(group, artifact, parts)
            return None
        try:
            return unpack_kernel(group, payload, key=self._key)
        except KernelError as error:
            exchange.reject(artifact, f"{artifact} holds no kernel for this host: {error}")
            return None
