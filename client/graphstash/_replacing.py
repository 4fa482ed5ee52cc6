"""replacing: write a file that takes the place of another one only when it is complete."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

__all__ = ["check_replaceable", "replacing"]

_PRIVATE: Final = 0o600


def check_replaceable(path: Path) -> None:
    """Check that `path` is a regular file or does not exist.

    A file that replaced `/dev/null` would break the machine.

    Raises:
        OSError: `path` is a directory, device, pipe or socket.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def replacing(
    path: Path, *, is_text: bool = True, mode: int = _PRIVATE, is_durable: bool = True
) -> Iterator[IO[Any]]:
    """Yield a file that replaces `path` atomically when the block ends without an exception.

    Args:
        path: path of the file.
        is_text: whether the block writes text in UTF-8.
        mode: permissions of the file. The umask applies to the default only.
        is_durable: whether the file is complete even if the host crashes.

    A block that closes the file keeps the old one.

    Raises:
        OSError: the file cannot be written, or `path` is a directory, device, pipe or socket.
    """
    check_replaceable(path)
    # Not by `tempfile`, which is slow to import.
    partial = path.with_name(f".graphstash-{os.urandom(8).hex()}")
    try:
        encoding = "utf-8" if is_text else None
        with open(partial, "x+" if is_text else "x+b", encoding=encoding, opener=_private) as file:
            yield file
            if file.closed:
                return
            file.flush()
            if mode != _PRIVATE:
                os.fchmod(file.fileno(), mode)
            if is_durable:
                os.fsync(file.fileno())
        partial.replace(path)  # after `close`, because NFS may report a full disk only then
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)
