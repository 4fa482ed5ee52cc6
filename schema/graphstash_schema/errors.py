"""How a failure crosses the wire: an error code and a problem document (RFC 9457).

    InvalidValueError (ValueError)   a name, number or header that cannot be what it claims to be

The server turns every failure into a `Problem`; the client turns the `code` of a problem back into
an exception. `code` is what programs read, `detail` is what people read: it names the value, the
limit that was passed and the way out.
"""

from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["RETRYABLE", "STATUS", "ErrorCode", "InvalidValueError", "Problem"]


class ErrorCode(StrEnum):
    """Every reason for which a request is refused."""

    INVALID_NAMESPACE = "invalid_namespace"
    INVALID_KIND = "invalid_kind"
    INVALID_DEVICE_TYPE = "invalid_device_type"
    INVALID_FINGERPRINT = "invalid_fingerprint"
    INVALID_DIGEST = "invalid_digest"
    INVALID_METADATA = "invalid_metadata"
    INVALID_NAME = "invalid_name"
    INVALID_PATTERN = "invalid_pattern"
    INVALID_REQUEST = "invalid_request"
    UNSUPPORTED_PROTOCOL = "unsupported_protocol"
    DIGEST_REQUIRED = "digest_required"
    DIGEST_MISMATCH = "digest_mismatch"
    LENGTH_MISMATCH = "length_mismatch"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    READ_ONLY = "read_only"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    UPLOAD_TIMEOUT = "upload_timeout"
    CONFLICT = "conflict"
    WITHHELD = "withheld"
    LEASE_LOST = "lease_lost"
    LENGTH_REQUIRED = "length_required"
    PRECONDITION_FAILED = "precondition_failed"
    TOO_LARGE = "too_large"
    TOO_MANY_KEYS = "too_many_keys"
    RANGE_NOT_SATISFIABLE = "range_not_satisfiable"
    RATE_LIMITED = "rate_limited"
    HEADERS_TOO_LARGE = "headers_too_large"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    INSUFFICIENT_STORAGE = "insufficient_storage"


STATUS: Final[dict[ErrorCode, int]] = {
    ErrorCode.INVALID_NAMESPACE: 400,
    ErrorCode.INVALID_KIND: 400,
    ErrorCode.INVALID_DEVICE_TYPE: 400,
    ErrorCode.INVALID_FINGERPRINT: 400,
    ErrorCode.INVALID_DIGEST: 400,
    ErrorCode.INVALID_METADATA: 400,
    ErrorCode.INVALID_NAME: 400,
    ErrorCode.INVALID_PATTERN: 400,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.UNSUPPORTED_PROTOCOL: 400,
    ErrorCode.DIGEST_REQUIRED: 400,
    ErrorCode.DIGEST_MISMATCH: 400,
    ErrorCode.LENGTH_MISMATCH: 400,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.FORBIDDEN: 403,
    ErrorCode.READ_ONLY: 403,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.METHOD_NOT_ALLOWED: 405,
    ErrorCode.UPLOAD_TIMEOUT: 408,
    ErrorCode.CONFLICT: 409,
    ErrorCode.WITHHELD: 409,
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


class Problem(BaseModel):
    """An error body, `application/problem+json` (RFC 9457)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: str = Field(description="`urn:graphstash:error:<code>`")
    title: str = Field(description="the code in words")
    status: int = Field(ge=400, le=599, description="the HTTP status")
    detail: str = Field(description="what was wrong, the limit and the way out")
    code: ErrorCode = Field(description="what programs read")
    retryable: bool = Field(description="whether the same request may succeed later")
    instance: str = Field(description="`urn:graphstash:request:<request id>`")
    limit: int | float | None = Field(default=None, description="the limit that was passed")
    digest: str | None = Field(default=None, description="409: the digest that stays")
    given_digest: str | None = Field(default=None, description="409: the digest that was refused")

    @classmethod
    def of(
        cls,
        code: ErrorCode,
        detail: str,
        *,
        request_id: str,
        limit: float | None = None,
        digest: str | None = None,
        given_digest: str | None = None,
    ) -> "Problem":
        """Builds the document of one failure; status and retryability follow from the code."""
        return cls(
            type=f"urn:graphstash:error:{code}",
            title=code.replace("_", " "),
            status=STATUS[code],
            detail=detail,
            code=code,
            retryable=code in RETRYABLE,
            instance=f"urn:graphstash:request:{request_id}",
            limit=limit,
            digest=digest,
            given_digest=given_digest,
        )
