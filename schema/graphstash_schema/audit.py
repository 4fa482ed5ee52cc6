"""Audit log: who wrote or deleted artifacts, and who changed permissions."""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from graphstash_schema.model import WireModel

__all__ = ["AuditAction", "AuditEntry", "AuditLog"]


class AuditAction(StrEnum):
    """Actions that the audit log records."""

    PUT = "put"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    EVICT = "evict"
    TOKEN_CREATE = "token_create"  # noqa: S105 - a word
    TOKEN_REVOKE = "token_revoke"  # noqa: S105 - a word
    POLICY_SET = "policy_set"
    POLICY_REMOVE = "policy_remove"
    WITHHOLD = "withhold"
    RELEASE = "release"


class AuditEntry(WireModel):
    """One change."""

    id: int = Field(description="grows")
    at: datetime
    actor: str = Field(
        description="who: see `Access.name`; `local:<user>` for a command, `server` for a server "
        "by itself"
    )
    action: AuditAction
    namespace: str | None = None
    subject: str = Field(description="what: an artifact's key, a token's id")
    detail: str = Field(default="", description="more about it, e.g. a digest or the new grants")
    request_id: str | None = Field(
        default=None, description="of the answer; the caller may have chosen it"
    )
    server_request_id: str | None = Field(
        default=None, description="of the same request, by the server alone; also in its log"
    )
    address: str | None = Field(
        default=None,
        description="where the request came from; `<client> via <proxy>` where X-Forwarded-For "
        "says so, which is as true as the proxy is",
    )


class AuditLog(WireModel):
    """A page of the log, newest first."""

    entries: tuple[AuditEntry, ...]
    next_before: int | None = Field(
        default=None, description="`before` of the next page; none: this is the last"
    )
