"""Bucket: the interface of one bucket of an object store, as `ObjectBlobStore` uses it.

The server trusts only two responses: the object, and "no such object" from a bucket that exists.
Every other response becomes a `ServerError`. A store that cannot be reached must never look like a
store that lost its blobs.
"""

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import BinaryIO, Final, NamedTuple, Protocol

from graphstash_schema import Digest
from graphstash_server.errors import StartError
from graphstash_server.storage.upload import Spool

__all__ = [
    "THREADS",
    "WRITE_THREADS",
    "Body",
    "Bucket",
    "Cancellable",
    "Failure",
    "Found",
    "Listed",
    "Sending",
    "one_line",
]

THREADS: Final = 32
"""Maximum number of concurrent calls, besides uploads. The threads wait for the network and cost
little."""

WRITE_THREADS: Final = 16
"""Maximum number of uploads that write a spool, or send a blob, at the same time."""


class Body(Protocol):
    """The bytes of a response, in order. `read` may raise one of the bucket's `failures`."""

    def read(self, amount: int, /) -> bytes:
        """Return at least one byte and at most `amount`, or nothing at the end."""
        ...

    def close(self) -> None:
        """End the response."""
        ...


class Found(NamedTuple):
    """The response to a GET or HEAD. `size_bytes` is the size of the whole object."""

    size_bytes: int
    body: Body


class Listed(NamedTuple):
    """One object of a listing."""

    key: str
    size_bytes: int
    modified_at: datetime


class Failure(NamedTuple):
    """What went wrong, for an operator.

    Attributes:
        cause: the error in one line.
        remedy: what to check or to fix.
        is_full: whether the bucket has no room.
    """

    cause: str
    remedy: str
    is_full: bool = False


class Cancellable(Protocol):
    """An upload in parts that is in progress."""

    def cancel(self) -> object:
        """Stop the upload. Does not wait."""
        ...


class Sending:
    """A spooled blob during its upload. Another thread may cancel it."""

    def __init__(self, spool: Spool, blob: BinaryIO) -> None:
        self.spool = spool
        self.blob = blob
        self.is_cancelled = False
        self._lock = threading.Lock()  # guards `is_cancelled` and the upload
        self._upload: Cancellable | None = None

    def follow(self, upload: Cancellable) -> None:
        """Let `cancel` stop an upload in parts."""
        with self._lock:
            self._upload = upload
            if self.is_cancelled:
                upload.cancel()

    def read(self, amount: int = -1) -> bytes:
        """Read the blob as a file. Raise OSError after `cancel`."""
        if self.is_cancelled:
            raise OSError(errno.ECANCELED, "the upload was cancelled")
        return self.blob.read(amount)

    def tell(self) -> int:
        """Return the position, like a file."""
        return self.blob.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, like a file."""
        return self.blob.seek(offset, whence)

    def cancel(self) -> None:
        """Stop an upload in parts, or a single PUT that has not started."""
        with self._lock:
            self.is_cancelled = True
            if self._upload is not None:
                self._upload.cancel()


class Bucket(ABC):
    """One bucket. Safe for concurrent threads. Calls block, and raise only `failures`.

    Attributes:
        name: name of the bucket.
        place: URL or name of the service, for messages.
        failures: every exception that the client library raises if a bucket fails.
    """

    name: str
    place: str
    failures: tuple[type[Exception], ...]

    def unusable(self, setting: str, error: Exception) -> StartError:
        """Return the error of a start with a bucket that cannot be used."""
        cause, remedy, _ = self.failure(error)
        return StartError(
            f"{setting}={self.name} cannot be used at {self.place} ({cause}): {remedy}"
        )

    @abstractmethod
    def get(self, key: str, *, start: int = 0, stop: int | None = None) -> Found | None:
        """Return the bytes of an object in `[start, stop)`, or None if the object is absent and the
        bucket exists.

        Raises:
            ShortBlobError: the response has other bytes than asked for.
        """
        ...

    @abstractmethod
    def head(self, key: str) -> Found | None:
        """Return an object with an empty body. None may also mean that the bucket is absent."""
        ...

    @abstractmethod
    def put(self, key: str, sending: Sending, digest: Digest) -> None:
        """Store a blob durably and atomically, with a checksum. If `sending` is cancelled, stop and
        leave nothing behind.
        """
        ...

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete an object. An absent object in an existing bucket is no error. Return whether one
        attempt sufficed: an earlier attempt without a response may still be under way.
        """
        ...

    @abstractmethod
    def pages(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """Yield the objects whose keys begin with a prefix, ordered by key."""
        ...

    def tidy(self, prefix: str) -> None:  # noqa: B027 - most services need none
        """Remove what killed servers left behind. The outermost frame of its thread."""

    @abstractmethod
    def failure(self, error: BaseException) -> Failure:
        """Describe one of `failures`."""
        ...

    def stop(self) -> None:  # noqa: B027 - as above
        """Finish the uploads, and end `tidy` soon. `close` follows when all calls have returned."""

    @abstractmethod
    def close(self) -> None:
        """Release the connections. Make no further call."""
        ...


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
