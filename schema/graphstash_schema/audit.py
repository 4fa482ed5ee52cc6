"""The audit log: who wrote, deleted, or changed who may."""

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["AuditAction", "AuditEntry", "AuditLog"]


class AuditAction(StrEnum):
    """What is written down."""

    PUT = "put"
    OVERWRITE = "overwrite"
    DELETE = "delete"
    TOKEN_CREATE = "token_create"  # noqa: S105 - a word
    TOKEN_REVOKE = "token_revoke"  # noqa: S105 - a word
    POLICY_SET = "policy_set"
    POLICY_REMOVE = "policy_remove"
    WITHHOLD = "withhold"
    RELEASE = "release"


class AuditEntry(BaseModel):
    """One change."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: int = Field(description="grows")
    at: datetime
    actor: str = Field(description="who: see `Access.name`; `local:<user>` for a command")
    action: AuditAction
    namespace: str | None = None
    subject: str = Field(description="what: an artifact's key, a token's id")
    detail: str = Field(default="", description="more about it, e.g. a digest or the new grants")
    request_id: str | None = Field(default=None, description="as in the server's log")


class AuditLog(BaseModel):
    """A page of the log, newest first."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    entries: tuple[AuditEntry, ...]
    next_before: int | None = Field(
        default=None, description="`before` of the next page; none: this is the last"
    )
