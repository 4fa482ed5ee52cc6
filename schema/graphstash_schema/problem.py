"""Errors on the wire: a problem document (RFC 9457) with an error code.

The server turns every failure into a `Problem`. The client turns the problem's `code` back into an
exception. Programs read `code`. People read `detail`, which names the value, the exceeded limit and
the remedy.
"""

from pydantic import Field

from graphstash_schema.errors import RETRYABLE, STATUS, ErrorCode
from graphstash_schema.model import WireModel

__all__ = ["Problem"]


class Problem(WireModel):
    """An error body, `application/problem+json` (RFC 9457)."""

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
        """Build the document of one failure. The code determines status and retryability."""
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
