"""replacing: write a file that takes the place of another one only when it is complete."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["check_replaceable", "replacing"]


def check_replaceable(path: Path) -> None:
    """Check that `path` is a regular file or does not exist.

    A file that replaced `/dev/null` would break the machine.

    Raises:
        OSError: `path` is a directory, device, pipe or socket.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def replacing(path: Path, *, is_text: bool = True, mode: int = 0o600) -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` atomically when the block ends without an exception.

    Raises:
        OSError: the file cannot be written, or `path` is a directory, device, pipe or socket.
    """
    import tempfile  # slow to import

    check_replaceable(path)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        encoding = "utf-8" if is_text else None
        with os.fdopen(descriptor, "w" if is_text else "wb", encoding=encoding) as file:
            yield file
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(partial).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(partial).unlink()
        raise
