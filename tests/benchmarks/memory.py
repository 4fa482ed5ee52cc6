"""Memory of a process, as Linux knows it.

Not `ru_maxrss`: that begins with the peak of the process that started this one.
"""

import re
from pathlib import Path

__all__ = ["peak_bytes", "resident_bytes"]


def resident_bytes(process="self"):
    """What is in RAM now."""
    return read(process, "VmRSS")


def peak_bytes(process="self"):
    """The most that has been in RAM."""
    return read(process, "VmHWM")


def read(process, name):
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1])
