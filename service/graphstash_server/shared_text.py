"""SharedText: a text in memory that all workers of a host share."""

import mmap

__all__ = ["SharedText"]

_SIZE_BYTES = 4096


class SharedText:
    """One text or None. Create it before the workers are forked. There is no lock: while a worker
    calls `set`, another may read None or a mix of both texts.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        self._length = memoryview(self._memory)[:8].cast("q")

    def get(self) -> str | None:
        """Return the text."""
        length = self._length[0]
        return self._memory[8 : 8 + length].decode(errors="replace") if length else None

    def set(self, text: str | None) -> None:
        """Replace the text. It is cut after about 4,000 bytes."""
        self._length[0] = 0
        if text:
            encoded = text.encode()[: _SIZE_BYTES - 8]
            self._memory[8 : 8 + len(encoded)] = encoded
            self._length[0] = len(encoded)
