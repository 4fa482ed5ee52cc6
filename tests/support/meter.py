"""Costs of a request for a server process: event loop time, memory, files, rows and disk."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.waiting import until

if TYPE_CHECKING:
    from graphstash_server.testing import ServerProcess


def kibibytes(name: str, process: Path = Path("/proc/self")) -> int:
    """Return a process's memory: VmRSS now, or VmHWM at its peak.

    `ru_maxrss` would begin with the parent's peak.
    """
    lines = (process / "status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1])


def forget_peak(process: Path = Path("/proc/self")) -> None:
    """Reset VmHWM."""
    (process / "clear_refs").write_text("5")


@dataclass
class Cost:
    """Costs of the requests in a block.

    Attributes:
        loop_ms: CPU time of the thread that runs the event loop.
        memory_mib: growth of the process at its peak.
    """

    loop_ms: float = 0.0
    memory_mib: float = 0.0


class Meter:
    """Reads Linux's statistics of a process."""

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
        """Wait until the process has no more open files than before the block.

        Files of its database do not count, because the process opens some on first use and keeps
        them.
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
            with suppress(FileNotFoundError):  # closed meanwhile
                found += not fd.readlink().name.startswith("graphstash.sqlite3")
        return found
