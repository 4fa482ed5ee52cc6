"""Errors on the wire: a problem document (RFC 9457) with an error code.

Programs read `code`, from which the client makes an exception. People read `detail`, which names
the value, the limit and the remedy.
"""

from pydantic import Field

from graphstash_schema.errors import RETRYABLE, STATUS, ErrorCode
from graphstash_schema.model import WireModel

__all__ = ["Problem"]


class Problem(WireModel):
    """An error body, `application/problem+json`."""

    type: str = Field(description="`urn:graphstash:error:<code>`")
    title: str = Field(description="the code in words")
    status: int = Field(ge=400, le=599, description="the HTTP status")
    detail: str = Field(description="what was wrong, the limit and the remedy")
    code: ErrorCode = Field(description="what programs read")
    retryable: bool = Field(description="whether the same request may succeed later")
    instance: str = Field(description="`urn:graphstash:request:<request id>`")
    limit: int | float | None = Field(default=None, description="the exceeded limit")
    digest: str | None = Field(default=None, description="409: digest of the stored artifact")
    given_digest: str | None = Field(default=None, description="409: digest of the refused upload")

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
        """Build a document. The code determines `status` and `retryable`."""
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
