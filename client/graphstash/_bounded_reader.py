"""BoundedReader: the leading bytes of a file, such as the envelope before its provenance."""

from typing import IO, Final

from graphstash_schema import Digest, DigestHasher

__all__ = ["BoundedReader", "digest_of"]

_CHUNK_BYTES: Final = 1024**2


class BoundedReader:
    """Reads the leading bytes of a file, as if the file ended there."""

    def __init__(self, file: IO[bytes], size_bytes: int) -> None:
        self._file = file
        self._left = size_bytes

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes. Only the last read returns fewer bytes."""
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def digest_of(file: IO[bytes], size_bytes: int) -> Digest:
    """Return the digest of a file's leading bytes, and rewind the file."""
    hasher = DigestHasher()
    part = BoundedReader(file, size_bytes)
    while chunk := part.read(_CHUNK_BYTES):
        hasher.update(chunk)
    file.seek(0)
    return hasher.digest()
