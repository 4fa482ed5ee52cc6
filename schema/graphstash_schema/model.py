"""Base classes of immutable records that are sent as JSON in a body or a header."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

__all__ = ["Items", "RequestModel", "WireModel", "first_error"]

_Item = TypeVar("_Item")

Items = Annotated[tuple[_Item, ...], FailFast()]
"""A sequence whose validation stops at the first error: a million errors would take gigabytes."""


class WireModel(BaseModel):
    """Ignores unknown fields, which later releases may add. Rejects NaN and infinity, which would
    make waits and sums never finish.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class RequestModel(BaseModel):
    """Rejects unknown fields, so that a caller notices an unsupported one."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def first_error(error: ValidationError, *, whole: str) -> str:
    """Return the first error in one line: its field, or `whole` if it has none, and its cause."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"
