"""Working and failing trials: functions for `CallableTarget`, which measuring processes import."""

import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graphstash.config import ClientConfig
from graphstash.tuning.targets.callable import CallableTarget


class Unprepared(CallableTarget):
    def prepare(self) -> None:
        raise ModuleNotFoundError("No module named 'compiler'")


def build(configuration: Any) -> Any:
    """Return a kernel that returns 1, with the fault that the configuration's "does" names."""
    what = configuration["does"]
    if what in _WHILE_BUILDING:
        return _WHILE_BUILDING[what](configuration)
    does: Callable[[Any], Any] = _WHILE_RUNNING.get(what, lambda _: 1)
    return lambda: does(configuration)


def is_one(result: Any) -> Any:
    return result == 1


def numbered(configuration: Any) -> Any:
    """Return a kernel that returns 1 and has its configuration as an attribute."""

    def kernel() -> int:
        return 1

    kernel.configuration = configuration  # type: ignore[attr-defined] # for tests
    return kernel


def costs_what_it_says(kernel: Any, calls: int) -> Any:
    return _COSTS[kernel.configuration["says"]]


def costs_its_distance(kernel: Any, calls: int) -> Any:
    """Return the distance from 37. From 90 on, trials fail, and every tenth cost is NaN."""
    x = kernel.configuration["x"]
    if x >= 90:
        raise RuntimeError("too many registers")
    return math.nan if x % 10 == 0 else 1 + abs(x - 37)


def flatters_at_first(kernel: Any, calls: int) -> Any:
    """Return a low cost for 5, until the process measures other configurations beside it."""
    _seen.add(kernel.configuration["x"])
    if kernel.configuration["x"] == 5 and len(_seen) == 1:
        return 0.001
    return 1 + kernel.configuration["x"]


_seen: set[int] = set()


def calls_of(_: Any, calls: int) -> Any:
    """Return the number of calls of a kernel that takes no time, instead of a cost."""
    return calls


def logged_cost(kernel: Any, calls: int) -> Any:
    """Return "x" as the cost, and append a line to the file "log" at the begin and at the end."""
    x, log = kernel.configuration["x"], Path(kernel.configuration["log"])
    with log.open("a") as file:
        file.write(f"{x} begins\n")
        file.flush()
        time.sleep(0.01)
        file.write(f"{x} ends\n")
    return x


_COSTS = {
    "right": 1.5,
    "of numpy": np.float32(1.5),
    "too large": 10**400,
    "longer than the world": 1e308,
    "nan": math.nan,
    "infinite": math.inf,
    "negative": -1.0,
    "zero": 0,
    "text": "fast",
    "bytes": b"1",
    "nothing": None,
    "true": True,
    "list": [1.0],
}


def _overwrite_the_heap(_: Any) -> Any:
    ctypes.memset(id(build) - 2**20, 255, 2**21)


def _write_into_every_descriptor(_: Any) -> Any:
    for number in [int(each.name) for each in Path("/proc/self/fd").iterdir()][3:]:
        for text in (b'{"token": "x", "step": "measured"}', b"\xff" * 100, b"[" * 10_000, b"7"):
            with contextlib.suppress(OSError):
                os.write(number, text)
    return 1


def _close_every_descriptor(_: Any) -> Any:
    os.closerange(0, 1024)
    return 1


def _print(_: Any) -> Any:
    print("[garbage]" * 10)
    os.write(1, b'{"step": "measured"}\n')
    return 1


def _shout(_: Any) -> Any:
    os.write(2, b"trouble " * 2**20)
    return 1


def _hang(_: Any) -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        pass


def _hang_without_releasing_the_interpreter(_: Any) -> Any:
    ctypes.PyDLL(None).sleep(1000)


def _kill_the_guard(configuration: Any) -> Any:
    with Path(configuration["file"]).open("a+") as pids:
        pids.seek(0)
        if len(pids.readlines()) == configuration["times"]:
            return 1
        pids.write(f"{os.getpid()}\n")
    os.kill(os.getppid(), signal.SIGKILL)
    return time.sleep(1000)


def _stop(_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)


def _take_all_memory(_: Any) -> Any:
    return len(bytearray(2**36))


def _recurse(_: Any) -> Any:
    sys.setrecursionlimit(10**9)

    class Deep:
        def __repr__(self) -> str:
            return repr([self])

    return repr(Deep())


def _leave_processes_behind(configuration: Any) -> Any:
    """Start a child, and a grandchild in a session of its own whose parent has ended.

    Write the numbers of both, of this process and of its guard to the file.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        time.sleep(1000)
    if not (between := os.fork()):
        os.setsid()
        if grandchild := os.fork():
            os.write(writer, str(grandchild).encode())
            os._exit(0)
        time.sleep(1000)
    os.waitpid(between, 0)
    numbers = (os.getpid(), os.getppid(), child, int(os.read(reader, 20)))
    Path(configuration["file"]).write_text(" ".join(map(str, numbers)))
    if configuration["then"] == "crashes":
        os.abort()
    _hang_without_releasing_the_interpreter(configuration)


def _fork(child: Callable[[], Any]) -> int:
    """Return 1 if a child that ends as requested has the status 3 or 0."""
    if number := os.fork():
        return int(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) in {0, 3})
    return int(child())


_poison: list[int] = []


def _leave_poison(_: Any) -> Any:
    _poison.append(1)
    return 1


def _fail_when_poisoned(configuration: Any) -> Any:
    if not _poison:
        return 1
    if configuration["by"] == "crash":
        os.abort()
    return 2


def _meet(configuration: Any) -> Any:
    """Build until another build with the same folder has begun."""
    folder = Path(configuration["folder"])
    (folder / str(configuration["x"])).touch()
    while len(list(folder.iterdir())) < 2:
        time.sleep(0.01)
    return lambda: 1


def _raise(_: Any) -> Any:
    raise RuntimeError("too many registers")


def _leave_its_directory(_: Any) -> Any:
    os.chdir("/")
    return lambda: 1


def _read_a_file_beside_it(configuration: Any) -> Any:
    Path(configuration["beside"]).read_bytes()
    return lambda: 1


_WHILE_BUILDING: dict[str, Callable[[Any], Any]] = {
    "does not compile": _raise,
    "exits while it builds": lambda _: sys.exit("no"),
    "builds nothing": lambda _: None,
    "aborts while it builds": lambda _: os.abort(),
    "hangs while it builds": _hang,
    "meets another build": _meet,
    "leaves its directory": _leave_its_directory,
    "reads a file beside it": _read_a_file_beside_it,
}


def _is_beside_the_cache(_: Any) -> Any:
    return int(not ClientConfig.load().enabled)


_WHILE_RUNNING: dict[str, Callable[[Any], Any]] = {
    "is beside the cache": _is_beside_the_cache,
    "raises": _raise,
    "exits": lambda _: sys.exit(0),
    "is wrong": lambda _: 2,
    "reads address zero": lambda _: ctypes.string_at(0),
    "overwrites the heap": _overwrite_the_heap,
    "aborts": lambda _: os.abort(),
    "leaves with status 0": lambda _: os._exit(0),
    "kills itself": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kills its guard": _kill_the_guard,
    "kills its session": lambda _: os.killpg(0, signal.SIGKILL),
    "overflows the stack": _recurse,
    "writes into every descriptor": _write_into_every_descriptor,
    "closes every descriptor": _close_every_descriptor,
    "forks a child that exits": lambda _: _fork(lambda: sys.exit(3)),
    "forks a child that returns": lambda _: _fork(lambda: 1),
    "prints": _print,
    "shouts": _shout,
    "hangs": _hang,
    "stops itself": _stop,
    "takes all memory": _take_all_memory,
    "leaves processes behind": _leave_processes_behind,
    "poisons its process": _leave_poison,
    "fails when poisoned": _fail_when_poisoned,
}
