"""Costs of a process: CPU time, and memory as Linux counts it.

Memory is not `ru_maxrss`, which begins with the peak of the parent process.
"""

import os
import re
import time
from pathlib import Path


class Watch:
    """Measure this process in a block: `seconds`, `cpu_seconds`, and `grown` of its peak."""

    def __enter__(self):
        self._peak = peak_bytes()
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self._began[0]
        self.cpu_seconds = time.process_time() - self._began[1]
        self.grown = peak_bytes() - self._peak


def resident_bytes():
    return _read("self", "VmRSS")


def peak_bytes(process="self"):
    return _read(process, "VmHWM")


def _read(process, name):
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)[1])


def cpu_seconds(pid):
    """Return the CPU time of a process and its living descendants, with their ended children's."""
    return sum(_tree(pid).values()) / os.sysconf("SC_CLK_TCK")


def threads_of(pid):
    """Yield the threads of a process and its living descendants, and whether each is the main one
    of its process.
    """
    for process in _tree(pid):
        for path in Path(f"/proc/{process}/task").iterdir():
            yield int(path.name), int(path.name) == process


def _tree(pid):
    """Return the clock ticks of a process and its living descendants."""
    ticks, parents = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command, in brackets, may contain spaces. After it: state, parent, ...
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        number = int(path.parent.name)
        parents[number] = int(fields[1])
        ticks[number] = sum(map(int, fields[11:15]))
    tree = {pid}
    while more := {child for child, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return {number: ticks[number] for number in tree}
