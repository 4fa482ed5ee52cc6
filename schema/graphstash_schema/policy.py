"""Namespace policies: who may read and write, how much, and whether a write may replace."""

from datetime import datetime
from enum import StrEnum
from typing import Final

from pydantic import Field

from graphstash_schema.model import RequestModel, WireModel
from graphstash_schema.names import Namespace

__all__ = ["NamespaceInfo", "NamespaceList", "NamespacePolicy", "WriteMode"]

_MAX_BYTES: Final = 2**63 - 1
"""Largest integer of a database column."""


class WriteMode(StrEnum):
    """What a PUT may do."""

    READ_ONLY = "read_only"
    """Nothing. Existing artifacts are served."""
    WRITE_ONCE = "write_once"
    """Add artifacts. The first artifact of a key stays."""
    OVERWRITE = "overwrite"
    """Add and replace artifacts."""


class NamespacePolicy(RequestModel):
    """Rules of one namespace. The defaults apply to a namespace without a policy."""

    mode: WriteMode = WriteMode.WRITE_ONCE
    trusted: bool = Field(
        default=False,
        description="only a grant that names the namespace itself, without `*`, lets a caller "
        "write here: a token for many namespaces does not reach it",
    )
    anonymous_read: bool = Field(default=False, description="allows reading without a token")
    limit_bytes: int | None = Field(
        default=None,
        gt=0,
        le=_MAX_BYTES,
        description="maximum bytes of its artifacts with their metadata, and of its manifests; "
        "none: the server's",
    )
    max_artifact_bytes: int | None = Field(
        default=None, gt=0, le=_MAX_BYTES, description="largest artifact; none: the server's"
    )
    requests_per_second: float | None = Field(
        default=None,
        ge=0.001,
        le=1_000_000,
        description="of all callers together, on each server; others are refused with 429",
    )


class NamespaceInfo(WireModel):
    """A namespace and its policy."""

    namespace: Namespace
    policy: NamespacePolicy
    updated_at: datetime


class NamespaceList(WireModel):
    """All namespaces that have a policy, in alphabetical order."""

    namespaces: tuple[NamespaceInfo, ...]
