"""A gate between torch_xla and its cache directory, which reports each look-up of a missing file.

torch_xla's persistent cache calls `stat` for an executable's file once before it compiles and once
after. `StatGate` intercepts these calls of one library for paths with one prefix. If the file is
missing, the gate calls `answer(path)`, which may create it, in a thread, and then repeats `stat`.

    torch_xla --jump slot--> stub (native, `stub`) --socket--> threads (`answering`) --> answer
                               |  real __xstat before and after

`elf` finds and replaces the slot, a pointer in the library. The gate first tests the stub. If
`open` raises, torch_xla still calls the real function.
"""

import ctypes
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from graphstash.hooks.torch_xla.answering import Responder
from graphstash.hooks.torch_xla.elf import (
    GateUnavailable,
    find_slot,
    libc_function,
    read_pointer,
    replace_pointers,
    require_x86_64_linux,
)
from graphstash.hooks.torch_xla.stub import PATH_LIMIT, Stub

__all__ = ["GateUnavailable", "StatGate"]

# torch_xla's wheels are built against a glibc older than 2.33, where `stat` calls
# `int __xstat(int version, const char *path, struct stat *buffer)`.
_SYMBOL: Final = "__xstat"
_SYMBOL_VERSION: Final = "GLIBC_2.2.5"
_STAT_VERSION: Final = 1  # _STAT_VER_LINUX of <bits/stat.h> on x86-64
_STAT_BYTES: Final = 144  # sizeof(struct stat) there

# Several heartbeats fit into the timeout, so that one late thread switch does not end the wait.
_HEARTBEATS_PER_LIVENESS: Final = 5


class StatGate:
    """Calls `answer` whenever a library looks up a missing file whose path begins with `prefix`.

    The calling thread holds torch_xla's cache mutex while `answer` runs. Therefore `answer` needs a
    deadline, and must not wait for a thread that may be inside torch_xla. If Python threads cannot
    run for `liveness_seconds`, the caller continues without an answer (`give_ups`).

    The gate runs `answer` in one thread, one call at a time, and logs its exceptions. The methods
    are not thread-safe.
    """

    def __init__(
        self,
        library: Path,
        prefix: str,
        answer: Callable[[str], None],
        *,
        liveness_seconds: float = 3.0,
    ) -> None:
        """Check the arguments. `open` installs the gate.

        Args:
            library: Path of the loaded shared object whose calls the gate intercepts.
            prefix: Beginning of the paths, normally a private directory and a slash. `open` creates
                and removes a file with this prefix.
            answer: Called with the path of the missing file. It may create the file and may take
                minutes.
            liveness_seconds: Seconds that a caller waits for each reply from Python. Default: 3.

        Raises:
            ValueError: The prefix is empty, contains a NUL or is too long for a path, or
                `liveness_seconds` is not positive.
        """
        self._library = library
        self._prefix = os.fsencode(prefix)
        self._answer = answer
        self._liveness_seconds = liveness_seconds
        self._stub: Stub | None = None
        self._responder: Responder | None = None
        self._slot = 0
        if not 0 < len(self._prefix) < PATH_LIMIT or b"\0" in self._prefix:
            raise ValueError("prefix must be the beginning of a path")
        if liveness_seconds <= 0:
            raise ValueError("liveness_seconds must be positive")

    @property
    def requests(self) -> int:
        """Number of look-ups of missing files for which this process has requested an answer."""
        return 0 if self._stub is None else int(self._stub.block.sequence)

    @property
    def give_ups(self) -> int:
        """Number of look-ups of missing files that ended without an answer in this process."""
        return 0 if self._stub is None else int(self._stub.block.give_ups)

    def open(self) -> None:
        """Install the gate, unless it is open.

        Raises:
            GateUnavailable: The gate cannot work in this process. The message gives the reason.
        """
        if self._responder is not None:
            return
        require_x86_64_linux()
        slot = find_slot(self._library, _SYMBOL)
        real = libc_function(_SYMBOL, _SYMBOL_VERSION)
        if read_pointer(slot) != real:
            raise GateUnavailable(f"{_SYMBOL} of {self._library.name} is replaced by another tool")
        stub = Stub(real=real, prefix=self._prefix, patience_seconds=self._liveness_seconds)
        responder = self._start_responder(stub)
        with ExitStack() as undo:
            undo.callback(responder.stop)
            _self_test(stub, responder)
            responder.answer = self._answer
            replace_pointers({slot: stub.address})
            undo.pop_all()
        self._stub, self._responder, self._slot = stub, responder, slot

    def close(self) -> None:
        """Restore the slot and end the threads. Does nothing if the gate is not open.

        A waiting caller continues without an answer. The counters keep their values.
        """
        if self._stub is None or self._responder is None:
            return
        # If another tool has replaced the slot since `open`, leave its pointer. That tool may still
        # call the stub, which then only calls the real function.
        if read_pointer(self._slot) == self._stub.address:
            replace_pointers({self._slot: self._stub.block.real})
        self._responder.stop()
        self._responder = None

    def reopen_in_child(self) -> None:
        """Start answering threads in a forked child and reset its counters.

        The child inherits the changed slot, but its stub only calls the real function until this
        method runs. Does nothing if the gate is not open.

        Raises:
            GateUnavailable: The child can open no socket or start no thread. Its stub still calls
                only the real function.
        """
        if self._stub is None or self._responder is None:
            return
        self._responder.stop()
        self._stub.block.sequence = self._stub.block.give_ups = 0
        self._responder = self._start_responder(self._stub)

    def _start_responder(self, stub: Stub) -> Responder:
        heartbeat_seconds = self._liveness_seconds / _HEARTBEATS_PER_LIVENESS
        try:
            return Responder(stub.block, self._answer, heartbeat_seconds=heartbeat_seconds)
        except (OSError, RuntimeError) as error:
            raise GateUnavailable(f"no connection to the stub: {error}") from error


def _self_test(stub: Stub, responder: Responder) -> None:
    # ctypes releases the interpreter lock during the call, so that the answering thread can run.
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)(
        stub.address
    )
    buffer = ctypes.create_string_buffer(_STAT_BYTES)
    missing = stub.block.prefix + f".gate-{secrets.token_hex(8)}".encode()
    seen: list[str] = []
    responder.answer = seen.append
    if call(_STAT_VERSION, b"/", buffer) != 0 or seen:
        raise GateUnavailable("self-test: an existing file is not found")
    if call(_STAT_VERSION, missing, buffer) != -1 or seen != [os.fsdecode(missing)]:
        raise GateUnavailable("self-test: a missing file is not announced")
    responder.answer = _create
    try:
        if call(_STAT_VERSION, missing, buffer) != 0:
            raise GateUnavailable("self-test: a file made by the answer is not found")
    finally:
        Path(os.fsdecode(missing)).unlink(missing_ok=True)
    if stub.block.give_ups:
        raise GateUnavailable("self-test: the answer came too late")
    stub.block.sequence = 0


def _create(path: str) -> None:
    Path(path).touch(exist_ok=False)
