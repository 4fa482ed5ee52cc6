"""Why a request fails: the codes that cross the wire, and the error of a malformed value.

InvalidValueError (ValueError)   a name, number or header that cannot be what it claims to be
"""

from enum import StrEnum
from typing import Final

__all__ = ["RETRYABLE", "STATUS", "ErrorCode", "InvalidValueError"]


class ErrorCode(StrEnum):
    """Every reason for which a request is refused.

    The docstring of a code says what happened and, after an empty line, what to do about it. The
    reference of errors is generated from them.
    """

    INVALID_NAMESPACE = "invalid_namespace"
    """The namespace in the path or the body is malformed.

    Use 1 to 64 lower-case letters, digits, dots, underscores or hyphens, starting with a letter or
    a digit. Jobs take it from `GRAPHSTASH_NAMESPACE`.
    """
    INVALID_KIND = "invalid_kind"
    """The kind in an artifact's key is malformed.

    Use the form that the message names, such as `torch_xla` or `jax`. graphstash's own client
    always does: check what else calls the server.
    """
    INVALID_DEVICE_TYPE = "invalid_device_type"
    """The device type in an artifact's key is malformed.

    Use the form that the message names, such as `cuda-sm_90`. graphstash's own client always does:
    check what else calls the server.
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
    """The metadata of an upload are not valid JSON of the expected form, or too large.

    Correct the field that the message names. The OpenAPI document has the schema.
    """
    INVALID_NAME = "invalid_name"
    """The name of a manifest is malformed.

    Use 1 to 128 letters, digits, dots, underscores or hyphens, starting with a letter or a digit.
    Jobs take it from `GRAPHSTASH_JOB`.
    """
    INVALID_PATTERN = "invalid_pattern"
    """The namespace pattern of a grant is malformed.

    Use a namespace in which `*` may stand for any characters, such as `write:team-*`.
    """
    INVALID_REQUEST = "invalid_request"
    """The request is not valid HTTP, or its query, headers or body do not have the form that the
    call expects.

    Correct what the message names. If graphstash's own client sent it, look for a proxy that
    rewrites requests, and compare the versions of client and server.
    """
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    """The client speaks a version of the protocol that the server does not.

    Upgrade the older of the two. `graphstash doctor` prints both versions.
    """
    DIGEST_REQUIRED = "digest_required"
    """An upload has no `Repr-Digest` header, so the server cannot tell whether it arrived intact.

    Send `Repr-Digest: sha-256=:<base64>:` with the SHA-256 of the body.
    """
    DIGEST_MISMATCH = "digest_mismatch"
    """The uploaded bytes do not have the digest that was announced. Nothing was stored.

    Upload again with the digest of the bytes. If it happens again, look for a proxy that changes
    bodies, or for faulty memory.
    """
    LENGTH_MISMATCH = "length_mismatch"
    """The upload ended before its announced length, or went on after it. Nothing was stored.

    Upload again. If it happens again, look for a proxy that cuts long requests.
    """
    UNAUTHENTICATED = "unauthenticated"
    """The server requires a token, and the request has none, or one that is malformed, expired or
    revoked.

    Set `GRAPHSTASH_TOKEN` or `GRAPHSTASH_TOKEN_FILE`. An administrator creates tokens with
    `graphstash token create`.
    """
    FORBIDDEN = "forbidden"
    """The token is valid, but it does not grant this operation in this namespace.

    Use a namespace that the token covers, or ask an administrator for a token with the scope that
    the message names.
    """
    READ_ONLY = "read_only"
    """The policy of the namespace allows no writes.

    Publish to another namespace, or let an administrator change the policy with `graphstash
    namespace set`.
    """
    NOT_FOUND = "not_found"
    """Nothing is stored under this name, or the caller may not read it. Both get the same answer.

    For an artifact this is a miss, and the job compiles. Otherwise check the name, and what the
    token grants.
    """
    UNKNOWN_PATH = "unknown_path"
    """The server has no such call.

    Check that `GRAPHSTASH_URL` ends where the server's paths begin, usually after the port; and
    the release of the server, if the call is new.
    """
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """The path exists, but not with this HTTP method.

    Use one of the methods in the `Allow` header.
    """
    UPLOAD_TIMEOUT = "upload_timeout"
    """The body of a request arrived too slowly, or stopped arriving.

    Upload again. Operators can raise `GRAPHSTASH_UPLOAD_IDLE_SECONDS` where networks are slow.
    """
    CONFLICT = "conflict"
    """Other bytes are already stored under this key, and the namespace is write-once.

    Nothing needs to be done: the first artifact stays, and every job can use it. To replace it, let
    an administrator delete it, or use a namespace with `--mode overwrite`.
    """
    WITHHELD = "withheld"
    """The artifact of this key was reported as wrong. It is kept as evidence, and its key accepts
    no other.

    Let an administrator decide: `graphstash quarantine list`, then `release` or `delete`.
    """
    LEASE_LOST = "lease_lost"
    """The lease to compile this graph has expired or belongs to another job.

    Nothing needs to be done: the upload counts all the same. If it happens often, raise
    `GRAPHSTASH_LEASE_SECONDS`, or look for hosts that stall.
    """
    TOO_MANY_LEASES = "too_many_leases"
    """The caller holds as many leases as one may, or the namespace has as many.

    Nothing needs to be done: the job compiles without one, and its upload counts all the same. If
    it happens often, give each team a token of its own.
    """
    LENGTH_REQUIRED = "length_required"
    """An upload has no `Content-Length` header, or is sent in chunks.

    Send the length. Look for a proxy that turns requests into chunked ones.
    """
    PRECONDITION_FAILED = "precondition_failed"
    """An upload with `If-None-Match: *` found that an artifact is already stored under its key.

    Use the artifact that is there. Without the condition, an upload of the same bytes is accepted.
    """
    TOO_LARGE = "too_large"
    """The body is larger than the limit of the call, the server or the namespace.

    For an artifact, raise `GRAPHSTASH_MAX_ARTIFACT_BYTES` on the server, or the limit of the
    namespace with `graphstash namespace set --max-artifact`. The message names the limit.
    """
    TOO_MANY_KEYS = "too_many_keys"
    """A look-up or a manifest names more keys than one request may, or has as many values.

    Split the request. The message names the limit.
    """
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    """The requested range starts after the end of the artifact.

    Request the artifact again without a range, and check its size.
    """
    RATE_LIMITED = "rate_limited"
    """The namespace makes more requests per second than its policy allows.

    Wait for the seconds in `Retry-After`; graphstash's client does. An administrator can raise the
    rate with `graphstash namespace set --requests-per-second`.
    """
    HEADERS_TOO_LARGE = "headers_too_large"
    """The headers, the path or the query of the request are larger than the server accepts.

    Shorten what the message names. Look for cookies or tracing headers that a proxy adds.
    """
    INTERNAL = "internal"
    """The server failed in a way that it did not expect.

    Look in the server's log for the request id of the answer, and report it as a bug.
    """
    UNAVAILABLE = "unavailable"
    """The server cannot answer now: it is shutting down, has too many connections, or its database
    or blob store does not respond.

    Wait for the seconds in `Retry-After`; jobs compile meanwhile. If it lasts, check `/readyz` and
    the server's log.
    """
    INSUFFICIENT_STORAGE = "insufficient_storage"
    """The disk, the limit of the store or the limit of the namespace is reached, and eviction could
    not make enough room. What could not fit evicts nothing.

    Raise `GRAPHSTASH_STORE_LIMIT_BYTES` or the limit of the namespace, unpin what is no longer
    needed, or add disk space. `graphstash gc --dry-run` shows what could go.
    """


STATUS: Final[dict[ErrorCode, int]] = dict.fromkeys(ErrorCode, 400) | {
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.READ_ONLY: 403,
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
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.INSUFFICIENT_STORAGE: 507,
}
"""The one HTTP status of each code."""

RETRYABLE: Final[frozenset[ErrorCode]] = frozenset(
    {
        ErrorCode.UNAVAILABLE,
        ErrorCode.UPLOAD_TIMEOUT,
        ErrorCode.LENGTH_MISMATCH,
        ErrorCode.RATE_LIMITED,
    }
)
"""Codes after which the very same request may succeed later."""


class InvalidValueError(ValueError):
    """A value from outside that does not have the form it must have.

    Attributes:
        code: which part was wrong.
        value: what was given, cut to 120 characters, so that a log line stays a line.
        expected: the form or range that would be accepted.
    """

    def __init__(self, *, code: ErrorCode, what: str, value: object, expected: str) -> None:
        text = repr(value)
        self.code = code
        self.value = text if len(text) <= 120 else f"{text[:117]}..."
        self.expected = expected
        super().__init__(f"{what} {self.value} is not valid: expected {expected}")
