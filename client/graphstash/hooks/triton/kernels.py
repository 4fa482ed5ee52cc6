"""Cache managers for Triton. One artifact contains all files of a kernel.

Triton creates a manager for each kernel; `Kernels` holds the state that all managers share.
`SharedCacheManager` writes a fetched kernel into Triton's directory, as if Triton had compiled it.
It leaves other files to Triton: launchers built by the host's C compiler, and autotuning results.
`SharedCacheBackend` is for users of Triton's `RemoteCacheManager`, which asks its backend for every
file, even for files on this host's disk.
"""

import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from triton.runtime.cache import FileCacheManager, RemoteCacheBackend

from graphstash._compile.cache import CompileCache
from graphstash._compile.request import CompileRequest
from graphstash._compile.two_call import TwoCallCache
from graphstash.errors import CacheError, LocalTierError, Reason
from graphstash.hooks.triton.fingerprint import request_of, unshared_request
from graphstash.hooks.triton.kernel import (
    GROUP_PREFIX,
    KernelError,
    group_file,
    pack_kernel,
    unpack_kernel,
)
from graphstash.hooks.triton.source import source_being_compiled

__all__ = ["Kernels", "SharedCacheBackend", "SharedCacheManager", "SharedKernel"]

_log = logging.getLogger("graphstash")


class Kernels:
    """The cache for all kernels of this process.

    Attributes:
        of_this_process: the instance of the installed hook, or None.
        may_start: whether `kernel` may install the hook. False from the first installation on, so
            that uninstalling is final.
    """

    of_this_process: ClassVar["Kernels | None"] = None
    may_start: ClassVar[bool] = True

    def __init__(self, cache: CompileCache) -> None:
        self._thread = threading.local()
        self.switch_cache(cache)

    def switch_cache(self, cache: CompileCache) -> None:
        """Switch to a forked child's own cache."""
        self._cache = cache
        self._owner = os.getpid()
        self.exchange = TwoCallCache(cache)

    @staticmethod
    def kernel(key: str) -> "SharedKernel | None":
        """Return the kernel with Triton's key. None if this process has no cache.

        If only Triton's environment variables name this package, the first call installs the hook.
        """
        if Kernels.may_start:
            Kernels.may_start = False
            _start()
        kernels = Kernels.of_this_process
        if kernels is None or kernels._owner != os.getpid():
            return None
        return SharedKernel(kernels, key)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Enclose a call of Triton's `compile`. When the outermost call ends, release the leases of
        kernels that Triton did not put.
        """
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
        """Whether this thread is inside `compiling`. Only there, look-ups take leases: elsewhere, a
        failed compilation would keep its lease until the job ends. The call of Triton that installs
        the hook is not inside.
        """
        return getattr(self._thread, "depth", 0) > 0

    def record_fallback(self, error: Exception) -> None:
        """Count an error of the hook, and log the first of its kind."""
        self._cache.record_fallback(error)

    def refuse(self, request: CompileRequest, error: CacheError) -> None:
        """Count a kernel that cannot be shared, or any other error of the cache."""
        if error.reason is Reason.UNSHAREABLE:
            self._cache.refuse(request, error.detail)
        else:
            self._cache.record_fallback(error)

    def close(self) -> None:
        """Release the leases of unfinished compilations."""
        self.exchange.close()

    def _end(self) -> None:
        try:
            self.exchange.end()
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: Triton compiles
            self.record_fallback(error)


def _start() -> None:
    import graphstash  # the session is a layer above: use only its public name

    try:
        graphstash.install(hooks=("triton",))
    except Exception:  # noqa: BLE001 - a hook's outermost frame: Triton compiles
        _log.warning("graphstash: the cache could not be started", exc_info=True)


@dataclass(frozen=True, slots=True)
class _Miss:
    group: str
    request: CompileRequest


class SharedKernel:
    """One kernel from its look-up to its publication, in one thread."""

    def __init__(self, kernels: Kernels, key: str) -> None:
        self._kernels = kernels
        self._key = key
        self._miss: _Miss | None = None
        self._written: dict[str, bytes] = {}

    def find(self, group: str) -> dict[str, bytes] | None:
        """Return the files of a kernel by name, or None if Triton must compile."""
        try:
            return self._find(group)
        except CacheError as error:
            self._kernels.refuse(unshared_request(self._key, group), error)
            return None
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: Triton compiles
            self._kernels.record_fallback(error)
            return None

    def add(self, name: str, content: bytes | str) -> None:
        """Remember the content of a written file, which another process may overwrite."""
        if self._miss is not None:
            # Never fails. `pack_kernel` refuses text that is not UTF-8.
            if isinstance(content, str):
                content = content.encode("utf-8", "surrogatepass")
            self._written[name] = content

    def publish(self, group: str, names: Iterable[str]) -> None:
        """Publish a kernel after a miss, if all its files were written since. It was no miss if the
        server had the kernel, but in an unusable artifact.
        """
        miss, self._miss = self._miss, None
        written, self._written = self._written, {}
        if miss is None or miss.group != group:
            return
        try:
            children = {name: written[name] for name in names}
            payload = pack_kernel(group, children, key=self._key)
            # Triton reads variables, settings and ptxas after the look-up.
            now = request_of(self._key, group, os.environ, source_being_compiled())
            if now.key != miss.request.key:
                why = f"{group} is not shared: its key changed while Triton compiled it"
                self._kernels.refuse(miss.request, CacheError(Reason.UNSHAREABLE, why))
                return
            self._kernels.exchange.put(miss.request, payload)
        except KeyError as error:
            _log.debug("%s is not published: %s was never written", group, error)
        except KernelError as error:
            _log.debug("%s is not published: %s", group, error)
        except Exception as error:  # noqa: BLE001 - the hook's outermost frame: Triton compiles
            self._kernels.record_fallback(error)

    def record_fallback(self, error: Exception) -> None:
        """Count an error of the hook."""
        self._kernels.record_fallback(error)

    def _find(self, group: str) -> dict[str, bytes] | None:
        request = request_of(self._key, group, os.environ, source_being_compiled())
        exchange = self._kernels.exchange
        payload = exchange.get(request, lease=self._kernels.is_compiling)
        if payload is None:
            self._miss = _Miss(group, request)
            return None
        try:
            return unpack_kernel(group, payload, key=self._key)
        except KernelError as error:
            key = request.key
            exchange.reject(key, f"{key} holds no kernel for this host: {error}")
            return None


class SharedCacheManager(FileCacheManager):  # type: ignore[misc] # Triton ships no types
    """A kernel's directory, backed by the shared cache. Triton defines the signatures."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._kernel = None if override or dump else Kernels.kernel(key)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by name, or None if Triton must compile."""
        if self._kernel is None:
            found: dict[str, str] | None = super().get_group(filename)
            return found
        paths = self._local_group(filename)
        if paths is None and (children := self._kernel.find(filename)) is not None:
            paths = self._store(filename, children)
        return paths

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file atomically and return its path."""
        content = data if isinstance(data, bytes) else str(data)
        path: str = super().put(content, filename, binary)
        if self._kernel is not None:
            self._kernel.add(filename, content)
        return path

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        """Write the list of a kernel's files, and publish the kernel."""
        path: str = super().put_group(filename, group)
        if self._kernel is not None:
            self._kernel.publish(filename, group)
        return path

    def _local_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths in Triton's directory if the kernel there is complete.

        Triton's own look-up uses the absolute paths in the list, which break when the directory
        moves. Some versions return half a group, or fail on a damaged description.
        """
        listed = self.get_file(GROUP_PREFIX + filename)
        if listed is None:
            return None
        try:
            names = json.loads(Path(listed).read_bytes())["child_paths"]
            found = {name: self.get_file(name) for name in names}
            json.loads(Path(found[filename]).read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if None in found.values() else found

    def _store(self, filename: str, children: Mapping[str, bytes]) -> dict[str, str] | None:
        """Write a fetched kernel into Triton's directory, the list of its files last."""
        paths = {}
        try:
            for name, content in children.items():
                paths[name] = str(super().put(content, name))
            super().put_group(filename, paths)
        except OSError as error:  # a full disk: Triton gets the same error after compiling
            if self._kernel is not None:
                self._kernel.record_fallback(LocalTierError(str(error)))
            return None
        return paths


class SharedCacheBackend(RemoteCacheBackend):  # type: ignore[misc] # Triton ships no types
    """Backend of Triton's `RemoteCacheManager` for one kernel. Triton defines the signatures.

    Triton gets the list of files first, and puts it last. Other files stay on this host.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._kernel = Kernels.kernel(key)
        self._here = FileCacheManager(key)
        self._found: dict[str, bytes] = {}

    def get(self, filenames: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of the existing files by name."""
        contents = {name: self._get(name) for name in filenames}
        return {name: content for name, content in contents.items() if content is not None}

    def put(self, filename: str, data: bytes) -> None:
        """Remember a file. Putting the list publishes the kernel."""
        if self._kernel is None:
            return
        if filename.startswith(GROUP_PREFIX):
            names = json.loads(data)["child_paths"]
            self._kernel.publish(filename.removeprefix(GROUP_PREFIX), names)
        else:
            self._kernel.add(filename, data)

    def _get(self, name: str) -> bytes | None:
        if self._kernel is not None and name.startswith(GROUP_PREFIX):
            self._found = self._kernel.find(name.removeprefix(GROUP_PREFIX)) or {}
            return group_file(self._found) if self._found else None
        if name in self._found:
            return self._found[name]
        try:
            return Path(self._here._make_path(name)).read_bytes()
        except OSError:
            return None
