"""What can go wrong between a job and its cache.

    GraphstashError
    ├── ConfigError            a setting that cannot be used; names setting, value and range
    ├── ExecutorError          the training's threads; see training/placeholder.py
    ├── DivergedError          the loss stays infinite or NaN; see training/events.py
    └── CacheError             the cache cannot help now; `reason` says why and is what is counted
        ├── TransportError     no usable answer: absent, slow, reset, garbage, circuit open
        ├── BusyError          429 or 503: come back after `retry_after_seconds`
        ├── RefusedError       an answer that says no: a problem document
        │   ├── ConflictError  409: other bytes are stored under the key and stay
        │   └── LeaseLostError 410: the lease belongs to somebody else now
        ├── VerificationError  bytes that are not what they claim to be; never used
        └── LocalTierError     the local disk refused

A miss is not an error: it is `None`.
"""

from enum import StrEnum
from typing import Final

from graphstash_schema import ErrorCode, Namespace

__all__ = [
    "BusyError",
    "CacheError",
    "ConfigError",
    "ConflictError",
    "GraphstashError",
    "LeaseLostError",
    "LocalTierError",
    "Reason",
    "RefusedError",
    "TransportError",
    "VerificationError",
]


class Reason(StrEnum):
    """Why the cache could not help: the label under which a fallback is counted."""

    CONNECT = "connect"
    """Nobody listens, or the name does not resolve."""
    TLS = "tls"
    """The server's certificate, or ours, was not accepted."""
    UNAUTHENTICATED = "unauthenticated"
    """The server wants a token, or does not accept the one that it got."""
    FORBIDDEN = "forbidden"
    """The token does not allow it."""
    TIMEOUT = "timeout"
    """No byte within the time that one waits for a byte, or not all within the call's time."""
    RESET = "reset"
    """The connection broke."""
    TRUNCATED = "truncated"
    """The body ended before its length."""
    PROTOCOL = "protocol"
    """What came is not an answer of a graphstash server."""
    CIRCUIT_OPEN = "circuit_open"
    """Earlier calls failed; nothing was sent."""
    BUSY = "busy"
    """The server asked to come back later."""
    REFUSED = "refused"
    """The server said no."""
    SERVER_ERROR = "server_error"
    """The server failed."""
    DIGEST_MISMATCH = "digest_mismatch"
    """The body does not have the digest that was announced."""
    WRONG_KEY = "wrong_key"
    """A sound artifact of another key."""
    CORRUPT = "corrupt"
    """The digest is right, the envelope is not."""
    BAD_SIGNATURE = "bad_signature"
    """The signature does not fit the artifact, its key or its namespace."""
    UNKNOWN_KEY = "unknown_key"
    """Signed by a key that is not trusted, not any more, or not for this namespace."""
    REVOKED_KEY = "revoked_key"
    """Signed by a key that was revoked."""
    UNSIGNED = "unsigned"
    """Not signed where a signature is required."""
    TOO_LARGE = "too_large"
    """Larger than this client accepts."""
    LOCAL_IO = "local_io"
    """The local disk refused."""
    WAIT_BUDGET = "wait_budget"
    """Somebody else compiled for longer than one may wait."""
    REJECTED = "rejected"
    """The compiler could not load a verified artifact."""
    GATE_TIMEOUT = "gate_timeout"
    """The compiler could not be held while the artifact was fetched."""
    QUEUE_FULL = "queue_full"
    """Too many artifacts waited for their upload; this one was dropped."""
    RANKS = "ranks"
    """The ranks of a distributed job could not agree on one artifact; this one compiled."""
    INTERNAL = "internal"
    """A fault of the client itself, caught at the outermost frame."""


class GraphstashError(Exception):
    """Root of everything this package raises."""


class ConfigError(GraphstashError, ValueError):
    """A setting that cannot be used."""


class CacheError(GraphstashError):
    """The cache cannot help now; the caller compiles.

    Attributes:
        reason: under which it is counted.
        detail: what happened, without the reason.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class TransportError(CacheError):
    """No usable answer came."""


class BusyError(CacheError):
    """The server is there and asks for a pause."""

    def __init__(self, detail: str, *, retry_after_seconds: float) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(Reason.BUSY, detail)


_REASON_OF_STATUS: Final = {401: Reason.UNAUTHENTICATED, 403: Reason.FORBIDDEN}


class RefusedError(CacheError):
    """The server answered with a problem document.

    Attributes:
        code: the error code, or None when the body was no problem document.
        status: the HTTP status.
    """

    def __init__(self, detail: str, *, code: ErrorCode | None, status: int) -> None:
        self.code = code
        self.status = status
        reason = _REASON_OF_STATUS.get(status, Reason.REFUSED)
        super().__init__(Reason.SERVER_ERROR if status >= 500 else reason, detail)


class ConflictError(RefusedError):
    """Other bytes are stored under the key; the first publisher's stay."""


class LeaseLostError(RefusedError):
    """The lease expired and belongs to somebody else, or to nobody."""


class VerificationError(CacheError):
    """Bytes that are not what they claim to be.

    Attributes:
        namespace: where they came from; None when nobody has said yet.
        earlier: what did not verify in the namespaces that were read before.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.namespace: Namespace | None = None
        self.earlier: tuple[VerificationError, ...] = ()


class LocalTierError(CacheError):
    """The local disk refused."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.LOCAL_IO, detail)
