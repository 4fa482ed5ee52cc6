"""The team behind Triton's own `RemoteCacheManager`, for those who configure Triton that way."""

import json
from collections.abc import Iterable
from pathlib import Path

from triton.runtime.cache import FileCacheManager, RemoteCacheBackend

from graphstash.hooks.triton.kernel import GROUP_PREFIX, group_file
from graphstash.hooks.triton.kernels import Kernels

__all__ = ["SharedCacheBackend"]


class SharedCacheBackend(RemoteCacheBackend):  # type: ignore[misc] # Triton ships no types
    """One kernel's files; signatures are Triton's.

    Triton asks for the list of the files first and for the files then, and puts the list last. All
    else it puts and asks for stays on this host, in Triton's directory, where Triton puts it too.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self._kernel = Kernels.kernel(key)
        self._here = FileCacheManager(key)
        self._found: dict[str, bytes] = {}

    def get(self, filenames: Iterable[str]) -> dict[str, bytes]:
        """The contents of those files that there are, by name."""
        contents = {name: self._get(name) for name in filenames}
        return {name: content for name, content in contents.items() if content is not None}

    def put(self, filename: str, data: bytes) -> None:
        """Remembers a file; the list of a kernel's files publishes them."""
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
