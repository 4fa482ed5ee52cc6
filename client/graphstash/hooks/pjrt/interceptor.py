"""Stands in for the compile functions in the table of one plug-in.

Frameworks call them from any thread, JAX and torch_xla (2.9) with the interpreter lock released;
the callback takes it like any Python code, gives it up while it waits or compiles, and holds no
other lock meanwhile. A framework that kept the interpreter lock of one thread while it waits for a
thread that compiles would be stuck; none is known.

Whatever happens in here, the framework gets what the plug-in's own function returns.
"""

import _thread
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from graphstash._compile.cache import CompileCache
from graphstash.hooks.pjrt.abi import (
    POINTER_BYTES,
    PROFILER_EXTENSION,
    AheadOfTimeArgs,
    ClientCompileArgs,
    ClientCreateArgs,
    Extension,
    Function,
)
from graphstash.hooks.pjrt.api import FUNCTION_TYPE, Api
from graphstash.hooks.pjrt.call import AheadOfTimeCall, Call, ClientCall, Experience, Original
from graphstash.hooks.pjrt.fingerprint import TOPOLOGY_FUNCTIONS, Fingerprints
from graphstash.hooks.pjrt.plugins import Plugin, is_writable

__all__ = ["Interceptor", "Shield"]


_T = TypeVar("_T")
_Args = TypeVar("_Args", ClientCompileArgs, AheadOfTimeArgs)

_AHEAD_OF_TIME: Final = (Function.COMPILE, *TOPOLOGY_FUNCTIONS)

_KEPT: Final[list[Any]] = []
"""Every callback of this process."""

_MEMORY: Final = Path("/proc/self/mem")

_POLL_SECONDS: Final = 0.01
"""How often a thread looks whether another thread has left its callback."""


class Interceptor:
    """Owns the patches of one table.

    Args:
        plugin: whose table it is; must have every function of `ClientCall`.
        cache_now: the cache of this process; None while there is none.

    Raises:
        OSError: the kernel does not let the table be written.
    """

    def __init__(self, plugin: Plugin, cache_now: Callable[[], CompileCache | None]) -> None:
        self._plugin = plugin
        self._cache_now = cache_now
        self._experience = Experience()
        self._fingerprints = Fingerprints(plugin)
        api = plugin.api
        self._compile = api.function(Function.CLIENT_COMPILE)
        self._patches = [_TablePatch(api, Function.CLIENT_COMPILE, self._client_compile)]
        if api.has(Function.CLIENT_CREATE):
            self._create = api.function(Function.CLIENT_CREATE)
            self._patches.append(_TablePatch(api, Function.CLIENT_CREATE, self._client_create))
        if api.has(*_AHEAD_OF_TIME):
            self._compile_ahead = api.function(Function.COMPILE)
            self._patches.append(_TablePatch(api, Function.COMPILE, self._compile_ahead_of_time))

    def close(self) -> None:
        """Puts the plug-in's own functions back.

        Raises:
            OSError: the kernel does not let the table be written.
        """
        for patch in self._patches:
            patch.close()

    def _client_create(self, address: int) -> int:
        args = ClientCreateArgs.from_address(address)
        args.client = None

        def create() -> int:
            # After a signal's exception, a client that exists is not created again.
            return 0 if args.client else self._create(address) or 0

        shield = Shield(self._failed)
        shield.attempt(self._fingerprints.observe_environment)
        error = shield.insist(create)
        shield.close()
        return error

    def _client_compile(self, address: int) -> int:
        return self._answer(self._compile, address, ClientCompileArgs, ClientCall)

    def _compile_ahead_of_time(self, address: int) -> int:
        return self._answer(self._compile_ahead, address, AheadOfTimeArgs, AheadOfTimeCall)

    def _answer(
        self,
        function: Callable[[int], int | None],
        address: int,
        layout: type[_Args],
        kind: type[Call],
    ) -> int:
        args = layout.from_address(address)
        original = Original(function, address, args)
        shield = Shield(self._failed)
        call = shield.attempt(lambda: self._call(args, kind))
        error = 0
        if call is None:
            error = shield.insist(original)
        elif not shield.attempt(lambda: call.serve(self._fingerprints)):
            error = shield.insist(original)
            if not error:
                shield.attempt(lambda: call.publish(compile_seconds=original.seconds))
            shield.attempt(call.end)
        shield.close()
        return error

    def _call(self, args: _Args, kind: type[Call]) -> Call | None:
        """The call to serve; None to pass it on unchanged."""
        cache = self._cache_now()
        if cache is None or self._experience.should_give_up:
            return None
        if args.struct_size < ctypes.sizeof(args) or not args.program or _is_extended(args):
            return None  # of a version, or with an extension, whose meaning is not known here
        return kind(args, plugin=self._plugin, cache=cache, experience=self._experience)

    def _failed(self, error: Exception) -> None:
        if (cache := self._cache_now()) is not None:
            cache.record_fallback(error)


def _is_extended(args: _Args) -> bool:
    """Whether the caller wants anything that only an extension says."""
    address = args.extension_start
    while address:
        extension = Extension.from_address(address)
        if extension.type != PROFILER_EXTENSION:
            return True
        address = extension.next
    return False


class _TablePatch:
    """One function of one table, replaced by Python.

    A pointer is stored in one move, so a thread that reads it meanwhile sees the old or the new
    one. What it has read it may call at any time later: callbacks are therefore never freed.

    Args:
        api: the table as it was.
        function: which one.
        stand_in: gets the address of the arguments, returns a `PJRT_Error *` or 0; must not raise.

    Raises:
        OSError: the kernel does not let the table be written.
    """

    def __init__(self, api: Api, function: Function, stand_in: Callable[[int], int]) -> None:
        self._address = api.address_of(function)
        self._original = api.pointer(function)
        callback = FUNCTION_TYPE(stand_in)
        _KEPT.append(callback)
        self._ours = ctypes.cast(callback, ctypes.c_void_p).value or 0
        _store(self._address, self._ours)

    def close(self) -> None:
        """Puts the plug-in's own function back, unless another tool has replaced ours.

        Raises:
            OSError: the kernel does not let the table be written.
        """
        if ctypes.c_uint64.from_address(self._address).value == self._ours:
            _store(self._address, self._original)


def _store(address: int, value: int) -> None:
    if is_writable(address):
        ctypes.c_uint64.from_address(address).value = value
        return
    # A table of constants may lie in pages that are read-only after relocation. The kernel writes
    # to them for a debugger, and for the process itself, without a change of their protection.
    with _MEMORY.open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(value.to_bytes(POINTER_BYTES, "little"))


class Shield:
    """Runs the steps of one callback, and keeps exceptions out of its C++ caller.

    A callback of ctypes that ends in an exception returns null, which PJRT reads as success.
    Handlers of signals run in the main thread, between any two steps of Python: someone presses
    Ctrl-C while a graph is compiled for a minute, and KeyboardInterrupt is raised right after the
    compiler has returned, in the middle of the callback. Without a hook it would be raised where
    the framework comes back to Python; so that is where it goes.

    Args:
        failed: told of the errors of our own steps; must not raise.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._interrupt: BaseException | None = None

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """The step's value; None when it raised."""
        try:
            try:
                return step()
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                self._failed(error)
        except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
            self._interrupt = interrupt
        return None

    def insist(self, step: Callable[[], _T]) -> _T:
        """The value of a step that raises nothing by itself; after a signal it is called again."""
        while True:
            try:
                return step()
            except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
                self._interrupt = interrupt

    def close(self) -> None:
        """Raise what a signal raised again in this thread, after the caller has returned to C++."""
        if self._interrupt is not None:
            # Unlike `Thread.start`, this waits for nothing: a wait would meet the next signal.
            arguments = (threading.get_ident(), sys._getframe(1), self._interrupt)
            _thread.start_new_thread(_raise_in, arguments)


def _raise_in(thread: int, callback: FrameType, interrupt: BaseException) -> None:
    time.sleep(_POLL_SECONDS)
    while _is_in(thread, callback):  # an exception that reaches C++ there ends the process
        time.sleep(_POLL_SECONDS)
    is_ctrl_c = isinstance(interrupt, KeyboardInterrupt)
    if is_ctrl_c and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_kill(thread, signal.SIGINT)  # ends a wait for a lock, too
    else:
        # Whatever another handler has counted or closed, it must not do twice.
        again = ctypes.py_object(_again(interrupt))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), again)


def _is_in(thread: int, callback: FrameType) -> bool:
    """Whether a thread has not returned from a call yet."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame is not callback:
        frame = frame.f_back
    return frame is not None


def _again(interrupt: BaseException) -> type[BaseException]:
    """A class whose instances are like `interrupt`: only a class can be raised in a thread."""
    kind = type(interrupt)

    def init(self: BaseException) -> None:
        kind.__init__(self, *interrupt.args)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
