"""The public way into JAX's persistent cache: a directory whose files are not on any disk.

`jax_compilation_cache_dir` may be whatever `etils.epath` can open, and a path class for a scheme of
our own is registered there. JAX looks for `<directory>/<key>-cache`: `exists`, then `read_bytes`,
and `write_bytes` for what it compiled.
"""

import threading
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Final

__all__ = ["SCHEME", "register"]

SCHEME: Final = "graphstash-jax://"
_DIRECTORY: Final = SCHEME + "entries"
_SUFFIX: Final = "-cache"


def register(get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> str:
    """Makes the scheme known.

    Args:
        get: answers for a key of JAX.
        put: takes an entry of JAX under its key.

    Returns:
        The directory for `jax_compilation_cache_dir`.

    Raises:
        ImportError: `etils[epath]` is not installed.
    """
    from etils import epath  # type: ignore[import-not-found] # it comes with JAX's extras

    found = threading.local()  # between `exists` and `read_bytes`

    class EntryPath(PurePosixPath):
        """One entry, or the directory of all."""

        def mkdir(self, *_: Any, **__: Any) -> None:
            """It is there."""

        def exists(self) -> bool:
            found.entry = get(self._jax_key)
            return found.entry is not None

        def read_bytes(self) -> bytes:
            entry: bytes | None = found.__dict__.pop("entry", None)
            if entry is None:
                raise FileNotFoundError(str(self))
            return entry

        def write_bytes(self, entry: bytes) -> int:
            put(self._jax_key, entry)
            return len(entry)

        @property
        def _jax_key(self) -> str:
            return self.name.removesuffix(_SUFFIX)

    epath.register_path_cls(SCHEME)(EntryPath)
    return _DIRECTORY
