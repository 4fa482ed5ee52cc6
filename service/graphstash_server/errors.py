"""What the server raises on purpose.

    ServerError              answered with a problem document: an error code and a sentence
      NoSpaceError           507: the disk, its head-room or the store's limit is reached
      LengthMismatchError    400: fewer or more bytes arrived than announced
      DigestMismatchError    400: other bytes arrived than announced
    StartError               the server cannot start; one line for the operator
    ShortBlobError           a blob ended early while it was sent; the connection is cut

There is a separate class where something catches it; every other refusal is a `ServerError` with
its code. The HTTP status follows from the code (`graphstash_schema.STATUS`).
"""

from graphstash_schema import STATUS, Digest, ErrorCode

__all__ = [
    "DigestMismatchError",
    "LengthMismatchError",
    "NoSpaceError",
    "ServerError",
    "ShortBlobError",
    "StartError",
]


class ServerError(Exception):
    """A refusal that the caller is told about.

    Attributes:
        code: what programs read.
        detail: names the value, the limit that was passed and the way out.
        limit: the limit that was passed, as a number.
        digest: of a conflict: the digest that stays.
        given_digest: of a conflict: the digest that was refused.
        retry_after_seconds: when it is worth asking again, where that is known.
    """

    def __init__(
        self,
        code: ErrorCode,
        detail: str,
        *,
        limit: float | None = None,
        digest: Digest | None = None,
        given_digest: Digest | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.code = code
        self.detail = detail
        self.limit = limit
        self.digest = digest
        self.given_digest = given_digest
        self.retry_after_seconds = retry_after_seconds
        super().__init__(f"{code}: {detail}")

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return STATUS[self.code]


class NoSpaceError(ServerError):
    """There is no room for the bytes; nothing was stored, and reading goes on.

    Attributes:
        missing_bytes: how many would have to go; None when that is not known.
    """

    def __init__(
        self, detail: str, *, limit: float | None = None, missing_bytes: int | None = None
    ) -> None:
        self.missing_bytes = missing_bytes
        super().__init__(ErrorCode.INSUFFICIENT_STORAGE, detail, limit=limit)


class LengthMismatchError(ServerError):
    """The bytes ended early, or went on after the announced length."""

    def __init__(self, *, announced: Digest, received_bytes: int) -> None:
        super().__init__(
            ErrorCode.LENGTH_MISMATCH,
            f"{received_bytes} bytes arrived, Content-Length announced {announced.size_bytes}: "
            "nothing was stored, retry",
        )


class DigestMismatchError(ServerError):
    """The bytes are not those of the announced digest."""

    def __init__(self, *, announced: Digest, received: Digest) -> None:
        super().__init__(
            ErrorCode.DIGEST_MISMATCH,
            f"the received bytes have the digest {received}, Repr-Digest announced {announced}: "
            "nothing was stored, send the artifact again with the digest of its bytes",
            digest=received,
            given_digest=announced,
        )


class StartError(Exception):
    """The server cannot start; the message is one line that says why and what to do."""


class ShortBlobError(Exception):
    """A stored blob ended before its size: what was sent must not look complete."""
