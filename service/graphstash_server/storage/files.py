"""FileReader: read and send a blob from a local file without blocking the event loop on the disk.

If the bytes are in the page cache, the event loop reads and sends them itself. That saves a thread
hop, which costs more than reading a small file. Linux has two calls that fail instead of waiting
for the disk: openat2(2) with RESOLVE_CACHED, and preadv2(2) with RWF_NOWAIT. If a call fails, a
thread does the work. The calls always fail on NFS, on kernels before 5.12, and in sandboxes that
forbid them.
"""

import asyncio
import ctypes
import os
import struct
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from graphstash_server.errors import ShortBlobError

__all__ = ["CHUNK_BYTES", "SMALL_BYTES", "FileReader", "open_cached", "open_file", "read_cached"]

CHUNK_BYTES = 1024**2
"""Maximum bytes per read, write or send. A thread hop costs about as much as copying 64 KiB, which
is little compared to 1 MiB."""

SMALL_BYTES: Final = 64 * 1024
"""Up to this size, copying bytes costs less than a thread hop or sendfile."""

_OPENAT2: Final = 437
"""System call number of openat2, the same on every architecture
(include/uapi/asm-generic/unistd.h)."""

_AT_FDCWD: Final = -100
_RESOLVE_CACHED: Final = 0x20
_HOW: Final = struct.pack("QQQ", os.O_RDONLY | os.O_CLOEXEC, 0, _RESOLVE_CACHED)

_PROBED_BYTES: Final = 256 * 1024
"""Distance between two probed bytes. The kernel reads and reclaims pages in long runs, so samples
are enough. If a page between two samples is missing, sendfile blocks the event loop once."""

_syscall = ctypes.PyDLL(None).syscall  # keeps the GIL, because the call does not block
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
)


def open_cached(path: bytes) -> int | None:
    """Open a file for reading. Return None if opening fails or would wait for the disk."""
    fd: int = _syscall(_OPENAT2, _AT_FDCWD, path, _HOW, len(_HOW))
    return fd if fd >= 0 else None


def read_cached(path: bytes, size_bytes: int) -> bytearray | None:
    """Return the whole file if it is in memory and has this size, else None."""
    fd = open_cached(path)
    if fd is None:
        return None
    found = bytearray(size_bytes + 1)  # the extra byte detects a file that is too long
    try:
        if os.preadv(fd, [found], 0, os.RWF_NOWAIT) != size_bytes:
            return None
    except OSError:
        return None
    finally:
        os.close(fd)
    del found[size_bytes:]
    return found


class FileReader:
    """A `BlobReader` of an open file. Threads read what is not in memory."""

    def __init__(self, fd: int, name: bytes, threads: ThreadPoolExecutor) -> None:
        """Take ownership of the file descriptor. `name` is the path of the file."""
        self._fd = fd
        self._name = name
        self._threads = threads
        self.size_bytes = os.fstat(fd).st_size

    @property
    def path(self) -> Path:
        """Path of the file, which may have been deleted. Few hits need it, so it is built here."""
        return Path(os.fsdecode(self._name))

    def read_now(self, start: int, stop: int) -> bytearray | None:
        """Return a part of the file if all of it exists and is in memory, else None."""
        found = bytearray(stop - start)
        try:
            count = os.preadv(self._fd, [found], start, os.RWF_NOWAIT)
        except OSError:
            return None
        return found if count == len(found) else None

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """Yield a part of the file; see `BlobReader.chunks`."""
        loop = asyncio.get_running_loop()
        position = start
        while position < stop:
            size_bytes = min(CHUNK_BYTES, stop - position)
            chunk = self._read_small(position, size_bytes) or await loop.run_in_executor(
                self._threads, os.pread, self._fd, size_bytes, position
            )
            if not chunk:
                raise ShortBlobError(f"{self.path.name} ends at {position}, not {stop}")
            position += len(chunk)
            yield chunk

    def _read_small(self, position: int, size_bytes: int) -> bytes | None:
        if size_bytes > SMALL_BYTES:
            return None
        found = self.read_now(position, position + size_bytes)
        return None if found is None else bytes(found)

    async def send(self, socket_fd: int, start: int, stop: int) -> int:
        """Send at most `CHUNK_BYTES` to a non-blocking socket. Return the number of bytes sent.

        Raises:
            BlockingIOError: the socket accepts no bytes now.
            OSError: the peer closed the connection, or the disk failed.
            ShortBlobError: the file ends at or before `start`.
        """
        stop = min(stop, start + CHUNK_BYTES)
        if _is_cached(self._fd, start, stop):
            sent = os.sendfile(socket_fd, self._fd, start, stop - start)
        else:
            sent = await self._send_from_disk(socket_fd, start, stop)
        if not sent:
            raise ShortBlobError(f"{self.path.name} ends at {start}")
        return sent

    async def _send_from_disk(self, socket_fd: int, start: int, stop: int) -> int:
        """Run sendfile in a thread, with duplicated file descriptors. If the caller closed its own
        meanwhile, the kernel could give their numbers to other files.
        """
        fds = [os.dup(socket_fd)]
        try:
            fds.append(os.dup(self._fd))
        except OSError:
            _close(fds)
            raise
        sending = self._threads.submit(os.sendfile, fds[0], fds[1], start, stop - start)
        sending.add_done_callback(lambda _: _close(fds))
        return await asyncio.wrap_future(sending)

    async def close(self) -> None:
        """Close the file."""
        self.close_now()

    def close_now(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def open_file(path: Path, threads: ThreadPoolExecutor) -> FileReader | None:
    """Open a file, or return None if it is absent. Blocks."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    return FileReader(fd, os.fsencode(path), threads)


def _is_cached(fd: int, start: int, stop: int) -> bool:
    """Return whether all probed bytes of the range are in memory; see `_PROBED_BYTES`."""
    byte = [bytearray(1)]
    try:
        for position in (*range(start, stop, _PROBED_BYTES), stop - 1):
            if not os.preadv(fd, byte, position, os.RWF_NOWAIT):
                return False
    except OSError:
        return False
    return True


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
