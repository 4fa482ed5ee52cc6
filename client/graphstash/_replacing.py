"""replacing: write a file that takes the place of another one only when it is complete."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path, *, is_text: bool = True, mode: int = 0o600) -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` atomically when the block ends without an exception.

    Raises:
        OSError: the file cannot be written, or something else than a file is at `path`: a file
            that replaced `/dev/null` would break the machine.
    """
    import tempfile  # slow to import

    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
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
