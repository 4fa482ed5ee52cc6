"""A gate in torch_xla's way to its cache directory: each look-up of a missing file is announced.

torch_xla's persistent cache calls `stat` for an executable's file once before it compiles and once
after. `StatGate` takes the place of that call in one library, for the files below one directory:
it calls `answer(path)` in a thread of ours, and the file may be there when `answer` returns.

    torch_xla --jump slot--> stub (native, `stub`) --socket--> threads (`answering`) --> answer
                               |  real __xstat before and after

How the pointer is found and replaced: `elf`. Everything that can be wrong is
checked before the slot is changed; a gate that does not open leaves the process as it was.
"""

import ctypes
import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from graphstash.hooks.torch_xla.answering import Answering
from graphstash.hooks.torch_xla.elf import (
    GateUnavailable,
    find_slot,
    libc_function,
    read_pointer,
    replace_pointer,
    require_x86_64_linux,
)
from graphstash.hooks.torch_xla.stub import PATH_LIMIT, Stub

__all__ = ["GateUnavailable", "StatGate"]

# What `stat` is in a library built against glibc older than 2.33, as torch_xla's wheels are:
# `int __xstat(int version, const char *path, struct stat *buffer)`.
_SYMBOL: Final = "__xstat"
_SYMBOL_VERSION: Final = "GLIBC_2.2.5"
_STAT_VERSION: Final = 1  # _STAT_VER_LINUX of <bits/stat.h> on x86-64
_STAT_BYTES: Final = 144  # sizeof(struct stat) there

# Several replies per patience, so that one late thread switch does not end the wait.
_HEARTBEATS_PER_LIVENESS: Final = 5


class StatGate:
    """Asks `answer` whenever a library misses a file whose path begins with `prefix`.

    The missing thread holds torch_xla's cache mutex while `answer` runs. So `answer` needs a
    deadline of its own, and must not wait for a thread that may be inside torch_xla. If Python
    cannot run for `liveness_seconds`, the caller continues without an answer (`give_ups`).

    Not for use by several threads at once. Opening and closing are the owner's; `answer` runs in
    the gate's own thread, one call at a time, and what it raises is logged and goes no further.
    """

    def __init__(
        self,
        library: Path,
        prefix: str,
        answer: Callable[[str], None],
        *,
        liveness_seconds: float = 3.0,
    ) -> None:
        """Prepares; nothing is changed before `open`.

        Args:
            library: The loaded shared object whose calls are caught.
            prefix: What the paths begin with, normally a private directory and its slash. `open`
                makes and removes one file there.
            answer: Called with the path of the missing file; may create it, may take minutes.
            liveness_seconds: How long a caller waits without a sign of life from Python.

        Raises:
            ValueError: the prefix is empty or longer than a path can be, or the time not positive.
        """
        self._library = library
        self._prefix = os.fsencode(prefix)
        self._answer = answer
        self._liveness_seconds = liveness_seconds
        self._stub: Stub | None = None
        self._answering: Answering | None = None
        self._slot = 0
        if not 0 < len(self._prefix) < PATH_LIMIT or b"\0" in self._prefix:
            raise ValueError("prefix must be the beginning of a path")
        if liveness_seconds <= 0:
            raise ValueError("liveness_seconds must be positive")

    @property
    def requests(self) -> int:
        """How many times the library missed a file and asked, in this process."""
        return 0 if self._stub is None else int(self._stub.block.sequence)

    @property
    def give_ups(self) -> int:
        """How many of its callers went on without an answer, in this process."""
        return 0 if self._stub is None else int(self._stub.block.give_ups)

    def open(self) -> None:
        """Puts the gate in place; does nothing if it is open.

        Raises:
            GateUnavailable: it cannot work here; the message says why.
        """
        if self._answering is not None:
            return
        require_x86_64_linux()
        slot = find_slot(self._library, _SYMBOL)
        real = libc_function(_SYMBOL, _SYMBOL_VERSION)
        if read_pointer(slot) != real:
            raise GateUnavailable(f"{_SYMBOL} of {self._library.name} is replaced by another tool")
        stub = Stub(real=real, prefix=self._prefix, patience_seconds=self._liveness_seconds)
        answering = self._answer_for(stub)
        with ExitStack() as undo:
            undo.callback(answering.stop)
            _self_test(stub, answering)
            answering.answer = self._answer
            replace_pointer(slot, stub.address)
            undo.pop_all()
        self._stub, self._answering, self._slot = stub, answering, slot

    def close(self) -> None:
        """Restores the slot and ends the threads; does nothing if the gate is not open.

        A caller that is waiting continues without an answer. The counters keep their values.
        """
        if self._stub is None or self._answering is None:
            return
        # Whoever came after us points to the stub, which from now on only passes calls on.
        if read_pointer(self._slot) == self._stub.address:
            replace_pointer(self._slot, self._stub.block.real)
        self._answering.stop()
        self._answering = None

    def reopen_in_child(self) -> None:
        """Gives a forked child, where the stub only passes calls on, threads of its own.

        To be called in the child, which inherits the changed slot; the counters begin again.
        Does nothing if the gate was not open.

        Raises:
            GateUnavailable: there is no socket or thread; the stub keeps passing calls on.
        """
        if self._stub is None or self._answering is None:
            return
        self._answering.stop()
        self._stub.block.sequence = self._stub.block.give_ups = 0
        self._answering = self._answer_for(self._stub)

    def _answer_for(self, stub: Stub) -> Answering:
        heartbeat_seconds = self._liveness_seconds / _HEARTBEATS_PER_LIVENESS
        try:
            return Answering(stub.block, self._answer, heartbeat_seconds=heartbeat_seconds)
        except (OSError, RuntimeError) as error:
            raise GateUnavailable(f"no connection to the stub: {error}") from error


def _self_test(stub: Stub, answering: Answering) -> None:
    # A foreign call through ctypes leaves the interpreter to the threads, as torch_xla's do.
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)(
        stub.address
    )
    buffer = ctypes.create_string_buffer(_STAT_BYTES)
    missing = stub.block.prefix + f".gate-{secrets.token_hex(8)}".encode()
    seen: list[str] = []
    answering.answer = seen.append
    if call(_STAT_VERSION, b"/", buffer) != 0 or seen:
        raise GateUnavailable("self-test: an existing file is not found")
    if call(_STAT_VERSION, missing, buffer) != -1 or seen != [os.fsdecode(missing)]:
        raise GateUnavailable("self-test: a missing file is not announced")
    answering.answer = _create
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
