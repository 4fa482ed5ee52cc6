"""FusionError, and the names of parameters in its messages."""

from collections.abc import Iterable
from typing import Final

from torch import Tensor

__all__ = ["FusionError", "named"]

_SHOWN: Final = 3


class FusionError(RuntimeError):
    """Fused updates would differ, or already differ, from those of the optimizer without fusion."""


def named(parameters: Iterable[Tensor], names: dict[Tensor, str]) -> str:
    """Return the names of the first three parameters, and how many more there are."""
    found = [names.get(parameter, "a parameter outside of the model") for parameter in parameters]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
