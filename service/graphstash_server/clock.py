"""Clock: the source of time, an argument so that tests can control it."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeAlias

__all__ = ["Clock", "system_clock"]

Clock: TypeAlias = Callable[[], datetime]
"""Returns the present as an aware UTC time."""


def system_clock() -> datetime:
    """The time of this host."""
    return datetime.now(UTC)
