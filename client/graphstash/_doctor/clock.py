"""The clock: how far this host's is from the server's."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from graphstash._doctor.findings import Finding, fail, ok, warn
from graphstash._doctor.wire import Heard

__all__ = ["check_clock"]

_WARN_SECONDS: Final = 5.0
_FAIL_SECONDS: Final = 60.0
"""Certificates, tokens and identity providers bear a difference of seconds, not of minutes."""


def check_clock(heard: Heard) -> Iterator[Finding]:
    """Compares this host's clock with the date of an answer."""
    try:
        told = parsedate_to_datetime(heard.headers.get("Date", ""))
        told = told if told.tzinfo else told.replace(tzinfo=UTC)
    except (TypeError, ValueError):
        yield ok("clock", "not compared: the server's answer has no date")
        return
    seconds = _ahead_seconds(heard.at, told, heard.seconds)
    side = "ahead of" if seconds > 0 else "behind"
    found = f"this host is {abs(seconds):.0f} s {side} the server"
    advice = (
        "set both clocks by NTP (`timedatectl`): certificates and tokens begin and end by the clock"
    )
    if abs(seconds) > _FAIL_SECONDS:
        yield fail("clock", found, advice)
    elif abs(seconds) > _WARN_SECONDS:
        yield warn("clock", found, advice)
    else:
        yield ok("clock", "this host and the server agree")


def _ahead_seconds(here: datetime, told: datetime, trip_seconds: float) -> float:
    """How far this host is ahead; 0 where the date's resolution and the trip explain all of it."""
    latest = told + timedelta(seconds=1 + trip_seconds)
    if here > latest:
        return (here - latest).total_seconds()
    return min(0.0, (here - told).total_seconds())
