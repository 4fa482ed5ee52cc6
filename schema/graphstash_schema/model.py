"""Base classes of records that are sent as JSON in a body or a header. Records are immutable."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

__all__ = ["Items", "RequestModel", "WireModel"]

_Item = TypeVar("_Item")

Items = Annotated[tuple[_Item, ...], FailFast()]
"""A sequence of items. Validation stops at the first error, because collecting a million errors
would take gigabytes."""


class WireModel(BaseModel):
    """Base class that ignores unknown fields, so that a newer release can add fields.

    Rejects NaN and infinity, which would make waits and sums never finish.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RequestModel(BaseModel):
    """Base class that rejects unknown fields, so that a caller notices an unsupported field."""

    model_config = ConfigDict(frozen=True, extra="forbid")
