"""A host clock that a test sets while processes of that host run.

libfaketime replaces the wall clock of a process and leaves its monotonic clocks alone, as `date -s`
does.
"""

from datetime import timedelta
from pathlib import Path

__all__ = ["HostClock"]


class HostClock:
    """The wall clock of the processes that get `environment`."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "clock"
        self.set(timedelta(0))

    @property
    def environment(self) -> dict[str, str]:
        (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",  # seconds; reading the file at every call is slow
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",  # a file system keeps the times that it has stored
        }

    def set(self, ahead: timedelta) -> None:
        """Set the clock ahead of the real time; a negative difference sets it back."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead.total_seconds():+f}\n")
        new.replace(self._file)
