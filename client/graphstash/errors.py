"""The errors of the client and of the training loop.

    GraphstashError
    ├── ConfigError            a setting that cannot be used; names it and what is accepted
    ├── ExecutorError          background work of training; training/threads/device_future.py
    │   ├── ExecutorClosed     it was closed before the work could run
    │   └── ExecutorStopped    an earlier submission failed; see `__cause__`
    ├── CheckpointError        a checkpoint cannot be read or written; training/checkpoints/
    ├── SpaceError             a search space cannot be used; tuning/space.py
    │   └── EmptySpaceError    it has no configuration
    ├── AggregationError       sums have ended; training/reduce/aggregators/errors.py
    ├── CostError              what a searcher was told is no cost; tuning/search/base.py
    ├── DivergedError          the loss stays infinite or NaN; training/loop/events.py
    ├── MeasuringError         a search can measure nothing here; tuning/measuring/pool.py
    └── CacheError             the cache cannot help now; fallbacks are counted by its `reason`
        ├── TransportError     no usable answer: absent, slow, reset, malformed, circuit open
        ├── BusyError          429 or 503: retry after `retry_after_seconds`
        ├── RefusedError       the server refused: a problem document
        │   ├── ConflictError  409: other bytes are stored under the key
        │   └── LeaseLostError 410: the lease expired or was released
        ├── VerificationError  bytes that do not match what they claim to be; never used
        │   └── BundleError    a bundle that is not as it was exported; names the entry
        └── LocalTierError     the local disk cannot be read or written

A miss is not an error: it is `None`.
"""

from enum import StrEnum
from typing import Final

from graphstash_schema import ErrorCode, Namespace
from graphstash_schema.names import printable

__all__ = [
    "BundleError",
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
    """Why the cache could not help: the label under which a fallback is counted.

    The docstring of a reason says what happened and, after an empty line, what to do about it. The
    reference of errors is generated from them.
    """

    NO_SERVER = "no_server"
    """No server is set, and this user runs none on this host.

    Set `GRAPHSTASH_URL` to your team's server, or start one with `graphstash serve`.
    """
    CONNECT = "connect"
    """Nothing accepts connections at the server's address, or its name does not resolve.

    Check `GRAPHSTASH_URL`, that the server runs, and that no firewall is in the way. `graphstash
    doctor` tells which of these it is.
    """
    TLS = "tls"
    """The TLS handshake failed: one side did not accept the other's certificate.

    Set `GRAPHSTASH_CA_FILE` to the CA of the server, and `GRAPHSTASH_CLIENT_CERT` where the server
    requires a certificate. `graphstash doctor` names the reason.
    """
    UNAUTHENTICATED = "unauthenticated"
    """The server requires a token, or does not accept the one that it got.

    Set `GRAPHSTASH_TOKEN` or `GRAPHSTASH_TOKEN_FILE`. After a refusal the client sends no request
    for a minute, unless the token changes.
    """
    FORBIDDEN = "forbidden"
    """The token does not grant this operation in this namespace. After a refused write the job only
    reads.

    Use a namespace that the token covers, set `GRAPHSTASH_READ_ONLY=true`, or ask for another
    token.
    """
    TIMEOUT = "timeout"
    """The next byte, or the whole answer, did not arrive in time.

    Raise `GRAPHSTASH_FIRST_BYTE_SECONDS` or `GRAPHSTASH_FETCH_SECONDS` on slow networks, and check
    the load of the server.
    """
    RESET = "reset"
    """The connection broke before the answer was complete.

    Check the server's log and any proxy in between. A server that requires a client certificate can
    also end connections like this.
    """
    TRUNCATED = "truncated"
    """The body of the answer ended before its announced length.

    Look for a proxy that cuts long answers. If it happens without a proxy, check the server's log.
    """
    PROTOCOL = "protocol"
    """The answer does not come from a graphstash server, or not from one that this client
    understands.

    Check that `GRAPHSTASH_URL` names a graphstash server and not a proxy's login page, and compare
    the versions with `graphstash doctor`.
    """
    CIRCUIT_OPEN = "circuit_open"
    """Several calls in a row failed, so the client pauses. Nothing was sent.

    Find the reason of the earlier failures in the log. The client tries again by itself, after a
    minute at the latest.
    """
    BUSY = "busy"
    """The server asked the client to come back later (HTTP 429 or 503).

    Nothing needs to be done if it passes. Otherwise add workers or servers, or raise the rate of
    the namespace.
    """
    REFUSED = "refused"
    """The server refused the request; the log has its error code.

    Look the code up in the server's errors.
    """
    SERVER_ERROR = "server_error"
    """The server failed (HTTP 5xx).

    Look in the server's log for the request.
    """
    DIGEST_MISMATCH = "digest_mismatch"
    """The downloaded bytes do not have the announced digest. They were not used.

    Nothing needs to be done once: the server checks its copy and drops it if it is damaged. If it
    happens again, check disks and proxies.
    """
    WRONG_KEY = "wrong_key"
    """The server delivered an intact artifact of another key. It was not used, and was reported.

    Check who can write to the namespace, and the list of `graphstash quarantine list`.
    """
    CORRUPT = "corrupt"
    """The bytes have the announced digest, but cannot be unpacked. They were not used.

    Check who can write to the namespace. An administrator deletes the artifact with `graphstash
    quarantine delete`.
    """
    BAD_SIGNATURE = "bad_signature"
    """The signature does not match the artifact, its key or its namespace. The artifact was not
    used.

    Treat it as an attack until you know better: check who can write to the namespace, the database
    and the blob store.
    """
    UNKNOWN_KEY = "unknown_key"
    """The artifact is signed by a key that this host does not trust, or not in this namespace.

    If the key should be trusted, add it with `graphstash keys trust`.
    """
    REVOKED_KEY = "revoked_key"
    """The artifact is signed by a revoked key. It was not used.

    Delete what the key signed, and let a job publish it again under a new key.
    """
    UNSIGNED = "unsigned"
    """The artifact is not signed, or comes from a file that others can change, and a signature is
    required.

    Publish it with `GRAPHSTASH_SIGNING_KEY`, or set `GRAPHSTASH_SIGNATURES=prefer` to accept
    unsigned artifacts.
    """
    TOO_LARGE = "too_large"
    """The artifact is larger than this client accepts.

    Raise `GRAPHSTASH_MAX_ARTIFACT`, on the server `GRAPHSTASH_MAX_ARTIFACT_BYTES`.
    """
    LOCAL_IO = "local_io"
    """The local tier could not be read or written.

    Check free space and permissions of `GRAPHSTASH_CACHE_DIR`.
    """
    WAIT_BUDGET = "wait_budget"
    """Another job held the lease and this one did not wait, or no longer, so it compiled, too: its
    waiting time is used up, or its last waits brought nothing.

    Look at who holds leases without publishing; the log names the first. Raise
    `GRAPHSTASH_WAIT_SECONDS` if compiling the graphs really takes that long.
    """
    REJECTED = "rejected"
    """The compiler could not load a verified artifact, and compiled.

    Delete the artifact if every host rejects it. If only some do, report a bug: the fingerprint
    lacks something that differs between them.
    """
    UNSHAREABLE = "unshareable"
    """The program reads a value that no key can describe, so the job compiled it and did not share
    it.

    The log names the value. Replace it with a plain value, or accept that each host compiles this
    program.
    """
    GATE_TIMEOUT = "gate_timeout"
    """torch_xla could not be held back while the artifact was fetched, because Python was busy. It
    compiled.

    Nothing needs to be done if it is rare. Otherwise move heavy Python work away from the first
    steps.
    """
    QUEUE_FULL = "queue_full"
    """Too many artifacts waited for their upload, so this one was dropped.

    Check why uploads are slow, or raise `GRAPHSTASH_PUBLISH_QUEUE`.
    """
    RANKS = "ranks"
    """The ranks of a distributed job could not agree on one artifact, so this rank compiled.

    Check that all ranks use the same settings and versions, and that they reach the job's store.
    """
    TRACING = "tracing"
    """Traces were not made or not taken. Nothing else is different for the job.

    Install `graphstash[tracing]`, check `OTEL_EXPORTER_OTLP_ENDPOINT` and that the collector
    answers, or unset `GRAPHSTASH_TRACING`.
    """
    INTERNAL = "internal"
    """A bug in graphstash's client; the job compiled.

    Please report it with the log line.
    """


class GraphstashError(Exception):
    """Root of everything this package raises."""


class ConfigError(GraphstashError, ValueError):
    """A setting that cannot be used."""


_MAX_DETAIL_CHARACTERS: Final = 2000


class CacheError(GraphstashError):
    """The cache cannot help now; the caller compiles.

    Attributes:
        reason: under which it is counted.
        detail: what happened, without the reason. One line of bounded length, because a server
            may have written it.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = printable(detail, most=_MAX_DETAIL_CHARACTERS)
        super().__init__(f"{reason}: {self.detail}")


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
        namespace: where a server keeps them; None for bytes that no namespace was asked for.
        earlier: what other namespaces had that did not verify either.
    """

    def __init__(
        self,
        reason: Reason,
        detail: str,
        *,
        namespace: Namespace | None = None,
        earlier: "tuple[VerificationError, ...]" = (),
    ) -> None:
        super().__init__(reason, detail)
        self.namespace = namespace
        self.earlier = earlier


class BundleError(VerificationError):
    """A bundle, or an artifact in one, that is not used."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.CORRUPT, detail)

    def __str__(self) -> str:
        return self.detail


class LocalTierError(CacheError):
    """The local disk refused."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.LOCAL_IO, detail)
