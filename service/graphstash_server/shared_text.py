"""SharedText: a text in memory that all workers of a host share."""

import mmap
from binascii import crc32

__all__ = ["SharedText"]

_SIZE_BYTES = 4096

_HEAD_BYTES = 16

_TRIES = 1000
"""Maximum reads of a text that is being replaced. A write takes microseconds."""


class SharedText:
    """One text or None. Create it before the workers are forked. There is no lock: while a worker
    calls `set`, another may read None. If two workers call `set` at once, the result may be a mix.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        self._head = memoryview(self._memory)[:_HEAD_BYTES].cast("q")
        """Length and checksum of the text."""

    def get(self) -> str | None:
        """Return the text."""
        encoded = b""
        for _ in range(_TRIES):
            length, checksum = self._head
            if not length:
                return None
            encoded = self._memory[_HEAD_BYTES : _HEAD_BYTES + length]
            if crc32(encoded) == checksum:
                break
        return encoded.decode(errors="replace")

    def set(self, text: str | None) -> None:
        """Replace the text. It is cut after about 4,000 bytes."""
        self._head[0] = 0
        if text:
            encoded = text.encode()[: _SIZE_BYTES - _HEAD_BYTES]
            self._memory[_HEAD_BYTES : _HEAD_BYTES + len(encoded)] = encoded
            self._head[1] = crc32(encoded)
            self._head[0] = len(encoded)
