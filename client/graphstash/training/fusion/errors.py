"""FusionError, and how it names parameters."""

from collections.abc import Iterable
from typing import Final

from torch import Tensor

__all__ = ["FusionError", "named"]

_SHOWN: Final = 3


class FusionError(RuntimeError):
    """Fused updates would not be, or are no longer, those of the optimizer alone."""


def named(parameters: Iterable[Tensor], names: dict[Tensor, str]) -> str:
    """Some parameters for people: the first names, and how many there are more."""
    found = [names.get(parameter, "a parameter outside of the model") for parameter in parameters]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
