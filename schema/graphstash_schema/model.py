"""The two bases of what is sent as JSON: immutable records, in a body or a header."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast

__all__ = ["Items", "RequestModel", "WireModel"]

_Item = TypeVar("_Item")

Items = Annotated[tuple[_Item, ...], FailFast()]
"""Many items. The first wrong one ends the validation: a million errors would take
gigabytes.
"""


class WireModel(BaseModel):
    """Ignores fields that it does not know, so that a newer release can add some. A number that is
    none is refused: no wait and no sum comes to an end with it.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RequestModel(BaseModel):
    """Refuses fields that it does not know: a caller who means something by them is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")
