"""Incoming: bytes on their way in, held against the digest that was announced for them."""

from collections.abc import Callable, Iterable

from graphstash_schema import Digest, DigestHasher
from graphstash_server.errors import DigestMismatchError, LengthMismatchError

__all__ = ["Incoming"]


class Incoming:
    """One blob's bytes. Blocks where `write` does."""

    def __init__(self, announced: Digest) -> None:
        self._announced = announced
        self._hasher = DigestHasher()

    def take(self, chunks: Iterable[bytes], *, write: Callable[[memoryview], int]) -> None:
        """Hashes and writes the next bytes.

        Args:
            chunks: the bytes.
            write: writes some of what it is given, and says how many.

        Raises:
            LengthMismatchError: when there are more than the digest says.
        """
        for chunk in chunks:
            self._hasher.update(chunk)
            if self._hasher.size_bytes > self._announced.size_bytes:
                raise self._wrong_length()
            view = memoryview(chunk)
            while view:
                view = view[write(view) :]

    def finish(self) -> None:
        """Compares all of them.

        Raises:
            LengthMismatchError: when there are too few.
            DigestMismatchError: when they are other bytes.
        """
        if self._hasher.size_bytes != self._announced.size_bytes:
            raise self._wrong_length()
        received = self._hasher.digest()
        if received != self._announced:
            raise DigestMismatchError(announced=self._announced, received=received)

    def _wrong_length(self) -> LengthMismatchError:
        return LengthMismatchError(
            announced=self._announced, received_bytes=self._hasher.size_bytes
        )
