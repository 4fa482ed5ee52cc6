"""The errors that the server raises on purpose.

    ServerError              sent to the caller as a problem document: error code and sentence
      CorruptDatabaseError   500: the database is damaged, which no retry repairs
      NoSpaceError           507: a disk or bucket is full, or a limit is reached
      LengthMismatchError    400: fewer or more bytes arrived than announced
      DigestMismatchError    400: the bytes that arrived have another digest than announced
    BackupError              a backup or a restore cannot continue; one line for the operator
    StartError               the server cannot start; one line for the operator
    ShortBlobError           the bytes of a blob end before the requested range

A refusal for another reason is a plain `ServerError`. The error code determines the
HTTP status (`graphstash_schema.STATUS`).
"""

from graphstash_schema import STATUS, Digest, ErrorCode

__all__ = [
    "BackupError",
    "CorruptDatabaseError",
    "DigestMismatchError",
    "LengthMismatchError",
    "NoSpaceError",
    "ServerError",
    "ShortBlobError",
    "StartError",
]


class ServerError(Exception):
    """A refusal that the server reports to the caller.

    Attributes:
        code: error code for programs.
        detail: sentence that names the value, the exceeded limit and the remedy.
        limit: the exceeded limit as a number.
        digest: digest of the stored artifact in a conflict, or of the bytes that arrived in a
            mismatch.
        given_digest: digest of the refused upload in a conflict, or the announced digest in a
            mismatch.
        retry_after_seconds: seconds after which to retry, if known.
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
        """HTTP status of the code."""
        return STATUS[self.code]


class CorruptDatabaseError(ServerError):
    """The database is damaged, and all workers of this host have stopped using it."""

    def __init__(self, detail: str) -> None:
        super().__init__(ErrorCode.DATABASE_CORRUPT, detail)


class NoSpaceError(ServerError):
    """The bytes do not fit. The server stores nothing and continues to serve reads.

    Attributes:
        missing_bytes: number of bytes that would have to be freed, or None if unknown.
    """

    def __init__(
        self, detail: str, *, limit: float | None = None, missing_bytes: int | None = None
    ) -> None:
        self.missing_bytes = missing_bytes
        super().__init__(ErrorCode.INSUFFICIENT_STORAGE, detail, limit=limit)


class LengthMismatchError(ServerError):
    """The body is shorter or longer than announced."""

    def __init__(self, *, announced: Digest, received_bytes: int) -> None:
        super().__init__(
            ErrorCode.LENGTH_MISMATCH,
            f"{received_bytes} bytes arrived, Content-Length announced {announced.size_bytes}: "
            "nothing was stored, retry",
        )


class DigestMismatchError(ServerError):
    """The bytes do not match the announced digest."""

    def __init__(self, *, announced: Digest, received: Digest) -> None:
        super().__init__(
            ErrorCode.DIGEST_MISMATCH,
            f"the received bytes have the digest {received}, Repr-Digest announced {announced}: "
            "nothing was stored, send the artifact again with the digest of its bytes",
            digest=received,
            given_digest=announced,
        )


class StartError(Exception):
    """The server cannot start. The message is one line with cause and remedy."""


class BackupError(Exception):
    """A backup or restore cannot continue. The message is one line with cause and remedy."""


class ShortBlobError(Exception):
    """The bytes of a blob end before the requested range: the stored blob is too short, or the
    store stopped sending. During a download, the server then closes the connection.
    """
