"""Exceptions of the client and of the training loop.

    GraphstashError
    ├── ConfigError            a setting is invalid; the message states valid values
    │   └── UnprovedError      `graphstash farm` has no proof of a key; hooks/jax/prewarm.py
    ├── ExecutorError          background work of training; training/threads.py
    │   ├── ExecutorClosed     the executor was closed before the work could run
    │   └── ExecutorStopped    an earlier submission failed; see `__cause__`
    ├── CheckpointError        a checkpoint cannot be read or written; training/checkpoints.py
    ├── SpaceError             a search space cannot be used; tuning/space.py
    │   └── EmptySpaceError    the search space has no configuration
    ├── AggregationError       the aggregation has ended; training/reduce/aggregators/worker.py
    ├── CostError              a searcher got an invalid cost; tuning/search/base.py
    ├── DivergedError          the loss stays infinite or NaN; training/loop/events.py
    ├── MeasuringError         a search can measure nothing here; tuning/measuring/pool.py
    └── CacheError             the cache cannot help now; fallbacks are counted by its `reason`
        ├── TransportError     no usable response: absent, slow, reset, malformed, circuit open
        ├── BusyError          the server is busy: retry after `retry_after_seconds`
        ├── RefusedError       the server refused: a problem document
        │   ├── ConflictError  409: different bytes are stored under the key
        │   └── LeaseLostError 410: the lease expired or was released
        ├── VerificationError  the bytes do not match what they claim to be; never used
        │   └── BundleError    a bundle or an artifact in it is damaged
        └── LocalTierError     the local disk cannot be read or written

A miss is not an error: it is `None`.
"""

from enum import StrEnum
from math import inf
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
    "UnprovedError",
    "VerificationError",
]


class Reason(StrEnum):
    """Why the cache could not help: the label under which a fallback is counted.

    The first paragraph of a member's docstring says what happened. The second paragraph says what
    to do. docs/reference/errors.md is generated from them.
    """

    NO_SERVER = "no_server"
    """No server is configured, and this user runs none on this host.

    Set `GRAPHSTASH_URL` to your team's server, or start one with `graphstash serve`.
    """
    CONNECT = "connect"
    """Nothing accepts connections at the server's address, or its name does not resolve.

    Check `GRAPHSTASH_URL`, the server and any firewall. `graphstash doctor` finds out which of them
    is the cause.
    """
    TLS = "tls"
    """The TLS handshake failed: the client or the server did not accept the other's certificate.

    Set `GRAPHSTASH_CA_FILE` to the server's CA. If the server requires a client certificate, set
    `GRAPHSTASH_CLIENT_CERT`. `graphstash doctor` names the reason.
    """
    UNAUTHENTICATED = "unauthenticated"
    """The server requires a token, or does not accept the token that it received.

    Set `GRAPHSTASH_TOKEN` or `GRAPHSTASH_TOKEN_FILE`. After a refusal, the client sends no request
    for a minute unless the token changes.
    """
    FORBIDDEN = "forbidden"
    """The token does not grant this operation in this namespace. After a refused write, the job
    publishes nothing more.

    Use a namespace that the token covers, set `GRAPHSTASH_READ_ONLY=true`, or request another
    token.
    """
    TIMEOUT = "timeout"
    """The next byte or the whole response did not arrive in time.

    On a slow network, raise `GRAPHSTASH_FIRST_BYTE_SECONDS` or `GRAPHSTASH_FETCH_SECONDS`. Check
    the server's load.
    """
    RESET = "reset"
    """The connection broke before the response was complete.

    Check the server's log and any proxy in between. A server that requires a client certificate can
    also close connections like this.
    """
    TRUNCATED = "truncated"
    """The response's body ended before its announced length.

    Look for a proxy that truncates long responses. If there is no proxy, check the server's log.
    """
    PROTOCOL = "protocol"
    """The response does not come from a graphstash server, or comes from an incompatible version.

    Check that `GRAPHSTASH_URL` names a graphstash server and not a proxy's login page. Compare the
    versions with `graphstash doctor`.
    """
    CIRCUIT_OPEN = "circuit_open"
    """Several calls in a row failed, so the client pauses. It sent no request for this call.

    Find the reason for the earlier failures in the log. The client tries again after at most a
    minute.
    """
    BUSY = "busy"
    """The server asked the client to retry later (HTTP 429 or 503). The job could not wait any
    longer, or compiling took less time than waiting.

    If this is temporary, do nothing. Otherwise add workers or servers, or raise the namespace's
    rate.
    """
    REFUSED = "refused"
    """The server refused the request. The log contains the server's explanation.

    Change the setting or the permission that the explanation names.
    """
    SERVER_ERROR = "server_error"
    """The server failed (HTTP 5xx).

    Find the request in the server's log.
    """
    STORE_FULL = "store_full"
    """The disk, the store or the namespace is full (HTTP 507). The result stays on this host, and
    other hosts compile again.

    Raise `GRAPHSTASH_STORE_LIMIT_BYTES` or the namespace's limit on the server, unpin artifacts, or
    add disk space.
    """
    DIGEST_MISMATCH = "digest_mismatch"
    """The downloaded bytes do not match the announced digest. They were not used.

    If this happens once, do nothing: the server checks the artifact and deletes it if it is
    damaged. If it happens again, check disks and proxies.
    """
    WRONG_KEY = "wrong_key"
    """The server delivered an intact artifact of another key. The job reported the artifact and did
    not use it.

    Check who can write to the namespace, and the output of `graphstash quarantine list`.
    """
    CORRUPT = "corrupt"
    """The bytes match the announced digest but cannot be unpacked. They were not used.

    Check who can write to the namespace. An administrator can delete the artifact with `graphstash
    quarantine delete`.
    """
    BAD_SIGNATURE = "bad_signature"
    """The signature does not match the artifact, its key or its namespace. The artifact was not
    used.

    Treat this as an attack until you find another cause. Check who can write to the namespace, the
    database and the blob store.
    """
    UNKNOWN_KEY = "unknown_key"
    """The artifact is signed by a key that this host does not trust, or does not trust for this
    namespace.

    If you trust the key, add it with `graphstash keys trust`.
    """
    REVOKED_KEY = "revoked_key"
    """The artifact is signed by a revoked key. It was not used.

    Delete the artifacts that the key signed, and let a job publish them again under a new key.
    """
    UNSIGNED = "unsigned"
    """A signature is required, but the artifact is unsigned, or comes from a file that other users
    can change.

    Publish it with `GRAPHSTASH_SIGNING_KEY`, or accept unsigned artifacts with
    `GRAPHSTASH_SIGNATURES=prefer`.
    """
    TOO_LARGE = "too_large"
    """The artifact is larger than this client accepts.

    Raise `GRAPHSTASH_MAX_ARTIFACT`, and `GRAPHSTASH_MAX_ARTIFACT_BYTES` on the server.
    """
    LOCAL_IO = "local_io"
    """The local tier could not be read or written.

    Check free space and permissions of `GRAPHSTASH_CACHE_DIR`.
    """
    WAIT_BUDGET = "wait_budget"
    """Another job held the lease, and this job compiled instead of waiting. Usually this job's
    waiting time is used up, or its last waits ended without an artifact.

    Find out who holds leases without publishing; the log names the first holder. If the graphs
    really take that long to compile, raise `GRAPHSTASH_WAIT_SECONDS`.
    """
    REJECTED = "rejected"
    """The compiler could not load a verified artifact, so the job compiled.

    If every host rejects the artifact, delete it. If only some hosts do, report a bug: the
    fingerprint lacks a property that differs between them.
    """
    UNSHAREABLE = "unshareable"
    """The program reads a value that no key can describe, so the job compiled it and did not share
    it.

    The log names the value. Replace it with a plain value, or accept that each host compiles this
    program.
    """
    GATE_TIMEOUT = "gate_timeout"
    """The job could not hold back torch_xla during the fetch because Python was busy, so torch_xla
    compiled.

    If this is rare, do nothing. Otherwise move heavy Python work away from the first steps.
    """
    QUEUE_FULL = "queue_full"
    """The queue of uploads was full, so the job dropped this artifact.

    Check why uploads are slow, or raise `GRAPHSTASH_PUBLISH_QUEUE`.
    """
    RANKS = "ranks"
    """The ranks of a distributed job could not agree on one artifact, so this rank compiled.

    Check that all ranks use the same settings and versions, and that they reach the job's store.
    """
    TRACING = "tracing"
    """Traces could not be recorded or exported. The job is not affected otherwise.

    Install `graphstash[tracing]`. Check `OTEL_EXPORTER_OTLP_ENDPOINT` and that the collector
    answers, or unset `GRAPHSTASH_TRACING`.
    """
    INTERNAL = "internal"
    """A bug in graphstash's client. The job compiled.

    Please report it with the log line.
    """


class GraphstashError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(GraphstashError, ValueError):
    """A setting is invalid."""


_MAX_DETAIL_CHARACTERS: Final = 2000


class UnprovedError(ConfigError):
    """No job on the device proves that it makes the same key as this host."""


class CacheError(GraphstashError):
    """The cache cannot help now, so the caller compiles.

    Attributes:
        reason: label under which the fallback is counted.
        detail: what happened. One line of bounded length, because a server may have written it.
        is_in_doubt: whether the refused request was a repetition. The server may have carried out
            the first request, whose response was lost.
    """

    is_in_doubt = False

    def __init__(self, reason: Reason, detail: str) -> None:
        self.reason = reason
        self.detail = printable(detail, most=_MAX_DETAIL_CHARACTERS)
        super().__init__(f"{reason}: {self.detail}")


class TransportError(CacheError):
    """The server sent no usable response."""


class BusyError(CacheError):
    """The server cannot take the call now, but probably will soon.

    Attributes:
        retry_after_seconds: seconds to wait before the next call.
        patience_seconds: maximum seconds to wait in total. Infinite if the server works, but has
            too many requests or connections.
        is_full: whether the server has too many connections.
    """

    def __init__(
        self,
        detail: str,
        *,
        retry_after_seconds: float,
        patience_seconds: float = inf,
        is_full: bool = False,
        reason: Reason = Reason.BUSY,
    ) -> None:
        self.retry_after_seconds = retry_after_seconds
        self.patience_seconds = patience_seconds
        self.is_full = is_full
        super().__init__(reason, detail)


_REASON_OF_STATUS: Final = {
    401: Reason.UNAUTHENTICATED,
    403: Reason.FORBIDDEN,
    507: Reason.STORE_FULL,
}


class RefusedError(CacheError):
    """The server refused the request with an error status.

    Attributes:
        code: error code, or None if the body is not a problem document.
        status: HTTP status.
    """

    def __init__(self, detail: str, *, code: ErrorCode | None, status: int) -> None:
        self.code = code
        self.status = status
        other = Reason.SERVER_ERROR if status >= 500 else Reason.REFUSED
        super().__init__(_REASON_OF_STATUS.get(status, other), detail)


class ConflictError(RefusedError):
    """The server keeps different bytes under the key, or withholds the key."""


class LeaseLostError(RefusedError):
    """The lease has expired or was released. Another job may hold it now."""


class VerificationError(CacheError):
    """The bytes do not match what they claim to be.

    Attributes:
        namespace: the artifact's namespace on the server; None if the artifact is not from one.
        earlier: verification errors from namespaces that the job tried before.
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
    """A bundle, or an artifact in it, is damaged and is not used."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.CORRUPT, detail)

    def __str__(self) -> str:
        return self.detail


class LocalTierError(CacheError):
    """The local disk cannot be read or written."""

    def __init__(self, detail: str) -> None:
        super().__init__(Reason.LOCAL_IO, detail)
