"""What a request costs a server process: time of its event loop, memory, files, rows and disk."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.waiting import until

if TYPE_CHECKING:
    from graphstash_server.testing import ServerProcess

__all__ = ["Cost", "Meter", "forget_peak", "kibibytes"]


def kibibytes(name: str, process: Path = Path("/proc/self")) -> int:
    """Memory of a process: VmRSS now, VmHWM at its peak. `ru_maxrss` begins with the parent's."""
    lines = (process / "status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1])


def forget_peak(process: Path = Path("/proc/self")) -> None:
    """Begin VmHWM anew."""
    (process / "clear_refs").write_text("5")


@dataclass
class Cost:
    """Of everything that was done in between.

    Attributes:
        loop_ms: CPU time of the thread that runs the event loop.
        memory_mib: how far the process grew, at its largest.
    """

    loop_ms: float = 0.0
    memory_mib: float = 0.0


class Meter:
    """Reads what Linux knows about a process."""

    def __init__(self, server: "ServerProcess") -> None:
        self._process = Path(f"/proc/{server.process.pid}")

    @contextmanager
    def measured(self) -> Iterator[Cost]:
        cost = Cost()
        forget_peak(self._process)
        began, before = self._loop_ms(), kibibytes("VmRSS", self._process)
        yield cost
        cost.loop_ms = self._loop_ms() - began
        cost.memory_mib = (kibibytes("VmHWM", self._process) - before) / 1024

    @contextmanager
    def leaves_no_connection(self) -> Iterator[None]:
        """Waits until the process has no more files open than before. Those of its database do not
        count: it opens a few when they are first needed, and keeps them.
        """
        before = self._files()
        yield
        until(lambda: self._files() <= before)

    def _loop_ms(self) -> float:
        thread = self._process / "task" / self._process.name / "schedstat"
        return int(thread.read_text().split()[0]) / 1e6

    def _files(self) -> int:
        found = 0
        for fd in (self._process / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                found += not fd.readlink().name.startswith("graphstash.sqlite3")
        return found
