"""Error codes of the wire protocol, and the exception for a malformed value."""

from enum import StrEnum
from typing import Final

__all__ = ["RETRYABLE", "STATUS", "ErrorCode", "InvalidValueError"]


class ErrorCode(StrEnum):
    """Why a request failed. The first paragraph of each member's docstring states what happened,
    and the second what to do. docs/reference/errors.md shows both.
    """

    INVALID_NAMESPACE = "invalid_namespace"
    """The namespace in the path or the body is malformed.

    Use 1 to 64 lower-case letters, digits, dots, underscores or hyphens, starting with a letter or
    a digit. Jobs take the namespace from `GRAPHSTASH_NAMESPACE`.
    """
    INVALID_KIND = "invalid_kind"
    """The kind in an artifact's key is malformed.

    Use a kind that the message lists, such as `torch_xla` or `jax`. graphstash's own client always
    sends a valid kind, so check which other program calls the server.
    """
    INVALID_DEVICE_TYPE = "invalid_device_type"
    """The device type in an artifact's key is malformed.

    Use the form that the message states, such as `cuda-sm_90`. graphstash's own client always sends
    a valid device type, so check which other program calls the server.
    """
    INVALID_FINGERPRINT = "invalid_fingerprint"
    """The fingerprint in an artifact's key is not a SHA-256 in hexadecimal.

    Send 64 lower-case hexadecimal digits.
    """
    INVALID_DIGEST = "invalid_digest"
    """The `Repr-Digest` header is malformed.

    Send `sha-256=:<base64>:` with the SHA-256 of the body (RFC 9530).
    """
    INVALID_METADATA = "invalid_metadata"
    """The metadata of an upload are malformed JSON, have an invalid field, or are too large.

    Correct the field that the message names. The OpenAPI document has the schema.
    """
    INVALID_NAME = "invalid_name"
    """The name of a manifest is malformed.

    Use 1 to 128 letters, digits, dots, underscores or hyphens, starting with a letter or a digit.
    Jobs take the name from `GRAPHSTASH_JOB`.
    """
    INVALID_PATTERN = "invalid_pattern"
    """The namespace pattern of a grant is malformed.

    Use a namespace in which `*` may stand for any characters, such as `write:team-*`.
    """
    INVALID_REQUEST = "invalid_request"
    """The request is not valid HTTP, or the call does not accept its query, headers or body.

    Correct the part that the message names. If graphstash's own client sent the request, look for a
    proxy that rewrites requests, and compare the versions of client and server.
    """
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    """The server does not support the client's version of the protocol.

    Upgrade the older of the two. `graphstash doctor` prints both versions.
    """
    DIGEST_REQUIRED = "digest_required"
    """An upload has no `Repr-Digest` header, so the server cannot check that it arrived intact.

    Send `Repr-Digest: sha-256=:<base64>:` with the SHA-256 of the body.
    """
    DIGEST_MISMATCH = "digest_mismatch"
    """The uploaded bytes do not match the announced digest. Nothing was stored.

    Upload again with the digest of the bytes. If it happens again, look for a proxy that changes
    bodies, or for faulty memory.
    """
    LENGTH_MISMATCH = "length_mismatch"
    """The upload was shorter or longer than its announced length. Nothing was stored.

    Upload again. If it happens again, look for a proxy that truncates long requests.
    """
    UNAUTHENTICATED = "unauthenticated"
    """The server requires a token. The request has no token, or its token is malformed, expired or
    revoked.

    Set `GRAPHSTASH_TOKEN` or `GRAPHSTASH_TOKEN_FILE`. An administrator creates tokens with
    `graphstash token create`.
    """
    FORBIDDEN = "forbidden"
    """The token is valid but does not grant this operation in this namespace.

    Use a namespace that the token covers, or ask an administrator for a token with the scope that
    the message names.
    """
    READ_ONLY = "read_only"
    """The namespace's policy does not allow writes.

    Publish to another namespace, or let an administrator change the policy with `graphstash
    namespace set`.
    """
    PUBLISHER_REFUSED = "publisher_refused"
    """A region sends an artifact whose publisher may not write to this namespace, or whose token
    was revoked meanwhile.

    Do nothing: the region withdraws the artifact. If the publisher should write, give it a token
    with a grant on the namespace.
    """
    NOT_FOUND = "not_found"
    """Nothing is stored under this name, or the caller may not read it. The response is
    the same in both cases.

    For an artifact, this is a miss, and the job compiles. Otherwise check the name, and what the
    token grants.
    """
    UNKNOWN_PATH = "unknown_path"
    """The server has no such call.

    Check that `GRAPHSTASH_URL` ends where the server's paths begin, usually after the port. If the
    call is new, check the server's release.
    """
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """The path exists, but does not accept this HTTP method.

    Use one of the methods in the `Allow` header.
    """
    UPLOAD_TIMEOUT = "upload_timeout"
    """The body of a request arrived too slowly, or stopped arriving.

    Upload again. On slow networks, operators can raise `GRAPHSTASH_UPLOAD_IDLE_SECONDS`.
    """
    CONFLICT = "conflict"
    """Different bytes are already stored under this key, and the namespace is write-once.

    Do nothing: every job can use the first artifact. To replace it, let an administrator delete it,
    or use a namespace with `--mode overwrite`.
    """
    WITHHELD = "withheld"
    """The artifact of this key was reported as wrong. The server keeps it as evidence, and accepts
    no other artifact for the key.

    Let an administrator decide: `graphstash quarantine list`, then `release` or `delete`.
    """
    LEASE_LOST = "lease_lost"
    """The lease to compile this graph has expired or belongs to another job.

    Do nothing: the server still stores the upload. If it happens often, raise
    `GRAPHSTASH_LEASE_SECONDS`, or look for hosts that stall.
    """
    TOO_MANY_LEASES = "too_many_leases"
    """The caller or the namespace holds the maximum number of leases.

    Do nothing: the job compiles without a lease, and the server still stores its upload. If it
    happens often, give each team its own token.
    """
    LENGTH_REQUIRED = "length_required"
    """An upload has no `Content-Length` header, or uses chunked encoding.

    Send the length. Look for a proxy that re-encodes requests as chunked.
    """
    PRECONDITION_FAILED = "precondition_failed"
    """An upload with `If-None-Match: *` found that an artifact is already stored under its key. Or
    an upload named a position in the list of withdrawals (`Graphstash-Withdrawals`), and the server
    withdrew the same bytes after it.

    Use the stored artifact. Without `If-None-Match`, the server accepts an upload of the same
    bytes. After a withdrawal, jobs and regions ask again by themselves.
    """
    TOO_LARGE = "too_large"
    """The body is larger than the limit of the call, the server or the namespace.

    For an artifact, raise `GRAPHSTASH_MAX_ARTIFACT_BYTES` on the server, or the limit of the
    namespace with `graphstash namespace set --max-artifact`. The message names the limit.
    """
    TOO_MANY_KEYS = "too_many_keys"
    """A look-up or a manifest names more keys, or contains more values, than one request may.

    Split the request. The message names the limit.
    """
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    """The requested range starts after the end of the artifact.

    Request the artifact again without a range, and check its size.
    """
    RATE_LIMITED = "rate_limited"
    """The namespace makes more requests per second than its policy allows.

    Wait for the seconds in `Retry-After`, as graphstash's client does. An administrator can raise
    the rate with `graphstash namespace set --requests-per-second`.
    """
    HEADERS_TOO_LARGE = "headers_too_large"
    """The headers, the path or the query of the request are larger than the server accepts.

    Shorten the part that the message names. Look for cookies or tracing headers that a proxy adds.
    """
    INTERNAL = "internal"
    """The server failed unexpectedly.

    Find the response's request id in the server's log, and report a bug.
    """
    DATABASE_CORRUPT = "database_corrupt"
    """The server's database is damaged, so the server does not use it. Retries do not help.

    Do nothing in a job: it compiles. An administrator stops the servers and restores a backup with
    `graphstash restore`. `graphstash fsck` names the damage.
    """
    TOO_MANY_CONNECTIONS = "too_many_connections"
    """A server process holds its maximum number of connections, and none became idle within a
    second. A proxy may also limit the connections of one address.

    Wait for the seconds in `Retry-After`, as graphstash's client does within the time that a job
    may wait. If it lasts, raise `GRAPHSTASH_MAX_CONNECTIONS` or `GRAPHSTASH_WORKERS`.
    """
    UNAVAILABLE = "unavailable"
    """The server cannot answer now: it is shutting down, or its database or blob store does not
    respond.

    Wait for the seconds in `Retry-After`. Jobs wait for up to 30 seconds, then compile. If it
    lasts, check `/readyz` and the server's log.
    """
    INSUFFICIENT_STORAGE = "insufficient_storage"
    """The disk, the store or the namespace is full, and eviction could not free enough space. An
    upload that would not fit even after every possible eviction evicts nothing.

    Raise `GRAPHSTASH_STORE_LIMIT_BYTES` or the namespace's limit, unpin artifacts, or add disk
    space. `graphstash gc --dry-run` shows what the server could evict.
    """


STATUS: Final[dict[ErrorCode, int]] = dict.fromkeys(ErrorCode, 400) | {
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.READ_ONLY: 403,
    ErrorCode.PUBLISHER_REFUSED: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.UNKNOWN_PATH: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.UPLOAD_TIMEOUT: 408,
    ErrorCode.CONFLICT: 409,
    ErrorCode.WITHHELD: 409,
    ErrorCode.TOO_MANY_LEASES: 409,
    ErrorCode.LEASE_LOST: 410,
    ErrorCode.LENGTH_REQUIRED: 411,
    ErrorCode.PRECONDITION_FAILED: 412,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.TOO_MANY_KEYS: 413,
    ErrorCode.RANGE_NOT_SATISFIABLE: 416,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.HEADERS_TOO_LARGE: 431,
    ErrorCode.INTERNAL: 500,
    ErrorCode.DATABASE_CORRUPT: 500,
    ErrorCode.TOO_MANY_CONNECTIONS: 503,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.INSUFFICIENT_STORAGE: 507,
}
"""HTTP status of each code."""

RETRYABLE: Final[frozenset[ErrorCode]] = frozenset(
    {
        ErrorCode.TOO_MANY_CONNECTIONS,
        ErrorCode.UNAVAILABLE,
        ErrorCode.UPLOAD_TIMEOUT,
        ErrorCode.LENGTH_MISMATCH,
        ErrorCode.RATE_LIMITED,
    }
)
"""Codes after which the same request may succeed later."""


class InvalidValueError(ValueError):
    """A value from outside is malformed.

    Attributes:
        code: error code for the malformed part.
        value: the given value, truncated to 120 characters to keep log lines short.
        expected: valid form or range.
    """

    def __init__(self, *, code: ErrorCode, what: str, value: object, expected: str) -> None:
        text = repr(value)
        self.code = code
        self.value = text if len(text) <= 120 else f"{text[:117]}..."
        self.expected = expected
        super().__init__(f"{what} {self.value} is not valid: expected {expected}")
