"""Withdrawals: a namespace's list of artifacts whose copies clients must not use.

An artifact is withdrawn when it is withheld, deleted or replaced. Eviction, retention and lost
blobs do not make copies wrong, so they are not listed.

A client stores the position up to which it has applied the list. Every look-up returns the newest
position, so the client requests the list only if it has grown.
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


class WithdrawalCause(StrEnum):
    """Why an artifact was withdrawn. An administrator may release a withheld one."""

    WITHHELD = "withheld"
    DELETED = "deleted"
    REPLACED = "replaced"


class Withdrawal(WireModel):
    """One entry: no copy of this artifact with this digest may be used."""

    number: int = Field(ge=1, description="counts the entries of the namespace")
    key: str = Field(description="kind/device type/fingerprint; later releases add kinds")
    digest: str = Field(description="`sha256:<hex>` of the blob")
    cause: str = Field(description="`withheld`, `deleted` or `replaced`; more in later releases")
    withdrawn_at: AwareDatetime


class WithdrawalQuery(RequestModel):
    """Selects a page of the list."""

    after: ListPosition = Field(
        default=LIST_START, description="`position` of the previous page; `0` for the first"
    )
    limit: int = Field(
        default=MAX_WITHDRAWALS_OF_PAGE,
        ge=1,
        le=MAX_WITHDRAWALS_OF_PAGE,
        description="maximum number of entries",
    )


class WithdrawalList(WireModel):
    """A page of withdrawals, oldest first."""

    is_complete: bool = Field(
        description="whether the list has all entries after `after`. False: some were dropped for "
        "age or number, or the database was restored. Then the page is empty, and the caller must "
        "look up each of its copies again"
    )
    withdrawals: Items[Withdrawal]
    position: ListPosition = Field(description="`after` of the next page")
    newest: ListPosition = Field(description="end of the list; equals `position` on the last page")
