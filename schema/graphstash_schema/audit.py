"""Audit log: who wrote, evicted or withheld artifacts, and who changed permissions."""

from datetime import datetime
from enum import StrEnum

from pydantic import Field

from graphstash_schema.model import WireModel

__all__ = ["AuditAction", "AuditEntry", "AuditLog"]


class AuditAction(StrEnum):
    """Actions in the audit log."""

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
    """One change in the audit log."""

    id: int = Field(description="later entries have higher ids")
    at: datetime
    actor: str = Field(
        description="who: `Access.name` of a caller, `local:<user>` for a command, `server` for "
        "the server itself"
    )
    action: AuditAction
    namespace: str | None = None
    subject: str = Field(description="what: an artifact's key, a token's id")
    detail: str = Field(default="", description="details, e.g. a digest or the new grants")
    request_id: str | None = Field(
        default=None, description="ID of the request; the caller may have chosen it"
    )
    server_request_id: str | None = Field(
        default=None, description="ID that the server gave the request; also in its log"
    )
    address: str | None = Field(
        default=None,
        description="of the sender; `<client> via <peer>` if the request has X-Forwarded-For, "
        "which any caller can forge",
    )


class AuditLog(WireModel):
    """A page of the audit log, newest first."""

    entries: tuple[AuditEntry, ...]
    next_before: int | None = Field(
        default=None, description="`before` of the next page; null on the last page"
    )
