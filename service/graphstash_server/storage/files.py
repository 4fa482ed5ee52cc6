"""FileReader: a blob in a local file, read and sent without ever waiting for the disk.

The event loop reads and sends by itself what is in memory, and saves the way to a thread and back,
which costs more than reading a small file. What would wait for the disk is refused, and a thread
does it. Linux tells both apart: openat2(2) with RESOLVE_CACHED, and preadv2(2) with RWF_NOWAIT.
Where a kernel or a file system cannot (NFS, a kernel before 5.12, a sandbox that forbids the
calls), threads do everything.
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
"""How many bytes are read or written at a time: a thread hop costs about as much as copying
64 KiB, and at 1 MiB it no longer shows."""

SMALL_BYTES: Final = 64 * 1024
"""Up to here copying the bytes costs less than a thread, or than sending from the file."""

_OPENAT2: Final = 437
"""The same on every architecture (include/uapi/asm-generic/unistd.h)."""

_AT_FDCWD: Final = -100
_RESOLVE_CACHED: Final = 0x20
_HOW: Final = struct.pack("QQQ", os.O_RDONLY | os.O_CLOEXEC, 0, _RESOLVE_CACHED)

_PROBED_BYTES: Final = 256 * 1024
"""Pages come by read-ahead and go by reclaim, both in long runs. A page that is missing all the
same is read by the event loop: one wait for the disk, of a page."""

_syscall = ctypes.PyDLL(None).syscall  # keeps the GIL: it does not wait
_syscall.restype = ctypes.c_long
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
)


def open_cached(path: bytes) -> int | None:
    """Opens a file for reading; None when it cannot be opened, or when that is not known in
    memory.
    """
    fd: int = _syscall(_OPENAT2, _AT_FDCWD, path, _HOW, len(_HOW))
    return fd if fd >= 0 else None


def read_cached(path: bytes, size_bytes: int) -> bytearray | None:
    """A whole file; None unless it is in memory and has this size."""
    fd = open_cached(path)
    if fd is None:
        return None
    found = bytearray(size_bytes + 1)  # which a file that is too long would fill
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
    """A `BlobReader` of an open file. What may wait for the disk is done by the store's threads."""

    def __init__(self, fd: int, name: bytes, threads: ThreadPoolExecutor) -> None:
        """Takes over an open file; `name` is its path."""
        self._fd = fd
        self._name = name
        self._threads = threads
        self.size_bytes = os.fstat(fd).st_size

    @property
    def path(self) -> Path:
        """Where the file is, or was: made when it is asked for, which few hits do."""
        return Path(os.fsdecode(self._name))

    def read_now(self, start: int, stop: int) -> bytearray | None:
        """A part of the file; None when not all of it is in memory, or the file is shorter."""
        found = bytearray(stop - start)
        try:
            count = os.preadv(self._fd, [found], start, os.RWF_NOWAIT)
        except OSError:
            return None
        return found if count == len(found) else None

    async def chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        """A part of the file, see `BlobReader.chunks`."""
        loop = asyncio.get_running_loop()
        position = start
        while position < stop:
            wanted = min(CHUNK_BYTES, stop - position)
            chunk = self._read_small(position, wanted) or await loop.run_in_executor(
                self._threads, os.pread, self._fd, wanted, position
            )
            if not chunk:
                raise ShortBlobError(f"{self.path.name} ends at {position}, not {stop}")
            position += len(chunk)
            yield chunk

    def _read_small(self, position: int, wanted: int) -> bytes | None:
        if wanted > SMALL_BYTES:
            return None
        found = self.read_now(position, position + wanted)
        return None if found is None else bytes(found)

    async def send(self, socket_fd: int, start: int, stop: int) -> int:
        """Sends a part of the file to a socket that does not block; returns how many bytes it took.

        Raises:
            BlockingIOError: when the socket takes none now.
            OSError: when the other side has hung up, or the disk fails.
            ShortBlobError: when the file ends before `start`.
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
        """The same in a thread. It has file descriptors of its own: those of the caller, when they
        are closed meanwhile, might already be those of somebody else.
        """
        mine = [os.dup(socket_fd)]
        try:
            mine.append(os.dup(self._fd))
        except OSError:
            _close(mine)
            raise
        sending = self._threads.submit(os.sendfile, mine[0], mine[1], start, stop - start)
        sending.add_done_callback(lambda _: _close(mine))
        return await asyncio.wrap_future(sending)

    async def close(self) -> None:
        """Closes the file."""
        self.close_now()

    def close_now(self) -> None:
        """The same, without an event loop."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def open_file(path: Path, threads: ThreadPoolExecutor) -> FileReader | None:
    """Opens a file; None when it is absent. Blocks."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    return FileReader(fd, os.fsencode(path), threads)


def _is_cached(fd: int, start: int, stop: int) -> bool:
    """Whether these bytes are in memory, by a sample of one byte in 256 KiB."""
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
