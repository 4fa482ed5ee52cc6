"""Spool: one upload between the network, whose stream comes only once, and a store that may have to
be asked twice.

A small blob waits in memory, a larger one in a file without a name, which the kernel takes away
when the process ends, however it ends: there is nothing to tidy.
"""

import io
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from graphstash_schema import Digest
from graphstash_server.storage.base import CHUNK_BYTES
from graphstash_server.storage.incoming import Incoming
from graphstash_server.storage.space import SpaceGuard, no_space_refused

__all__ = ["Spool"]


class Spool:
    """Takes one blob and checks it. Every method blocks and runs in a thread."""

    def __init__(self, digest: Digest, *, directory: Path, space: SpaceGuard) -> None:
        """Prepares it; `open` takes the room, and whoever calls that calls `close`."""
        self._digest = digest
        self._directory = directory
        self._space = space
        self._incoming = Incoming(digest)
        # Guards the file: an upload that is cancelled is closed while a thread may still write.
        self._lock = threading.Lock()
        self._promised_bytes = 0
        self._is_closed = False
        self._file: BinaryIO = io.BytesIO()

    @property
    def is_in_memory(self) -> bool:
        """Whether the blob is small."""
        return self._digest.size_bytes <= CHUNK_BYTES

    def open(self) -> None:
        """Makes sure of the room.

        Raises:
            NoSpaceError: when there is none.
        """
        with self._lock, no_space_refused():
            if not self.is_in_memory and not self._is_closed:
                self._space.reserve(self._digest.size_bytes)
                self._promised_bytes = self._digest.size_bytes
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed by `close`
                    dir=self._directory, buffering=0
                )

    def write(self, chunks: Iterable[bytes]) -> None:
        """Takes the next bytes.

        Raises:
            LengthMismatchError: when there are more than the digest says.
            NoSpaceError: when the disk is full.
        """
        with self._lock, no_space_refused():
            self._incoming.take(chunks, write=self._file.write)

    def finish(self, chunks: Iterable[bytes]) -> BinaryIO:
        """Takes the last bytes and compares the digest.

        Returns:
            The blob, to be read from its beginning until `close`.

        Raises:
            LengthMismatchError: when there are too few or too many bytes.
            DigestMismatchError: when they are other bytes.
            NoSpaceError: when the disk is full.
        """
        self.write(chunks)
        self._incoming.finish()
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        """Lets go of the bytes and the room; more than once does no harm."""
        with self._lock:
            self._is_closed = True
            self._file.close()
            self._space.release(self._promised_bytes)
            self._promised_bytes = 0
