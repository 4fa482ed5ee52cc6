"""Withdrawals: the numbered list of what a namespace has withdrawn.

An artifact is withdrawn when it is withheld, deleted or replaced. Eviction, retention and the loss
of a blob say nothing about an artifact's content, so they are not in the list.

A caller keeps the position up to which it has applied the list, and asks for what follows. Every
look-up answers with the newest position, so a caller asks only if something is new.
"""

from enum import StrEnum
from typing import Final

from pydantic import AwareDatetime, Field

from graphstash_schema.model import Items, RequestModel, WireModel
from graphstash_schema.names import LIST_START, ListPosition

__all__ = [
    "MAX_WITHDRAWALS_OF_PAGE",
    "Withdrawal",
    "WithdrawalCause",
    "WithdrawalList",
    "WithdrawalQuery",
]

MAX_WITHDRAWALS_OF_PAGE: Final = 1000
"""Maximum withdrawals of a page."""


class WithdrawalCause(StrEnum):
    """Why an artifact was withdrawn."""

    WITHHELD = "withheld"
    """It was reported as wrong. An administrator may release it."""
    DELETED = "deleted"
    """An administrator deleted it."""
    REPLACED = "replaced"
    """An upload replaced it, as the namespace's policy allows."""


class Withdrawal(WireModel):
    """One entry of the list: no copy of this artifact with this digest may be used."""

    number: int = Field(ge=1, description="grows by 1 in the namespace")
    key: str = Field(description="kind/device type/fingerprint; later releases add kinds")
    digest: str = Field(description="`sha256:<hex>` of the blob")
    cause: str = Field(description="`withheld`, `deleted` or `replaced`; more in later releases")
    withdrawn_at: AwareDatetime


class WithdrawalQuery(RequestModel):
    """Selects a page of the list."""

    after: ListPosition = Field(
        default=LIST_START, description="`position` of the page before; `0` for the first"
    )
    limit: int = Field(
        default=MAX_WITHDRAWALS_OF_PAGE,
        ge=1,
        le=MAX_WITHDRAWALS_OF_PAGE,
        description="most entries",
    )


class WithdrawalList(WireModel):
    """A page of withdrawals, oldest first."""

    is_complete: bool = Field(
        description="whether the list has everything after `after`. False: entries were dropped "
        "for their age, or the database was restored. The page is empty, and the caller must ask "
        "again about every copy that it has"
    )
    withdrawals: Items[Withdrawal]
    position: ListPosition = Field(description="`after` of the next page")
    newest: ListPosition = Field(description="end of the list; equals `position` on the last page")
