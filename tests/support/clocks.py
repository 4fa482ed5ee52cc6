"""A host clock that a test sets while processes of that host run."""

import os
import struct
import subprocess
from datetime import timedelta
from pathlib import Path


class HostClock:
    """The wall clock of the processes that get `environment`. Their monotonic clocks are real."""

    def __init__(self, directory: Path) -> None:
        self._ahead = directory / "clock-ahead"
        self._library = directory / "wrong_clock.so"
        source = Path(__file__).with_name("wrong_clock.c")
        options = ("-shared", "-fPIC", "-O1", "-Wall", "-Werror")
        subprocess.run(["gcc", *options, "-o", self._library, source], check=True)
        self.set(timedelta(0))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "CLOCK_AHEAD": str(self._ahead)}

    def set(self, ahead: timedelta) -> None:
        """Set the clock ahead of the real time. A negative difference sets it back."""
        descriptor = os.open(self._ahead, os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("q", int(ahead.total_seconds())), 0)
        os.close(descriptor)
