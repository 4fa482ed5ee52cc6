"""What Triton calls: its own file cache, which asks the team about a kernel that is not there.

Triton's `RemoteCacheManager` asks its backend for every file, even for those that lie on the disk,
and for files that must stay there. So this one is derived from `FileCacheManager`: a kernel that is
found comes into Triton's directory as if it had been compiled, and everything that is no kernel
(launchers built by the host's C compiler, autotuning results) is Triton's own business.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton.runtime.cache import FileCacheManager

from graphstash._errors import LocalTierError
from graphstash.hooks.triton.kernel import GROUP_PREFIX
from graphstash.hooks.triton.kernels import Kernels

__all__ = ["SharedCacheManager"]


class SharedCacheManager(FileCacheManager):  # type: ignore[misc] # Triton ships no types
    """One kernel's directory, and the team behind it; signatures are Triton's."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:  # noqa: FBT001, FBT002
        super().__init__(key, override=override, dump=dump)
        self._kernel = None if override or dump else Kernels.kernel(key)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files, by name; None when Triton has to compile."""
        if self._kernel is None:
            found: dict[str, str] | None = super().get_group(filename)
            return found
        paths = self._local_group(filename)
        if paths is None and (children := self._kernel.find(filename)) is not None:
            paths = self._keep(filename, children)
        return paths

    def put(self, data: Any, filename: str, binary: bool = True) -> str:  # noqa: FBT001, FBT002
        """Writes a file atomically; gives its path."""
        content = data if isinstance(data, bytes) else str(data)
        path: str = super().put(content, filename, binary)
        if self._kernel is not None:
            self._kernel.add(filename, content)
        return path

    def put_group(self, filename: str, group: Mapping[str, str]) -> str:
        """Writes the list of a kernel's files, which completes the kernel."""
        path: str = super().put_group(filename, group)
        if self._kernel is not None:
            self._kernel.publish(filename, group)
        return path

    def _local_group(self, filename: str) -> dict[str, str] | None:
        """What lies in Triton's directory, when it is whole.

        Triton's own look-up takes paths from the list, so that a directory that was moved is empty
        for it; some of its versions hand out half a group, and fail with a broken description.
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

    def _keep(self, filename: str, children: Mapping[str, bytes]) -> dict[str, str] | None:
        """Puts a kernel that was found where Triton keeps its own; the list of its files last."""
        paths = {}
        try:
            for name, content in children.items():
                paths[name] = str(super().put(content, name))
            super().put_group(filename, paths)
        except OSError as error:  # a full disk; Triton meets it again when it has compiled
            if self._kernel is not None:
                self._kernel.trouble(LocalTierError(str(error)))
            return None
        return paths
