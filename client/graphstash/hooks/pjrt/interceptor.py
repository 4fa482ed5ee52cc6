"""Replace the compile functions in the table of one plug-in.

Frameworks call these functions from any thread. JAX and torch_xla (2.9) release the interpreter
lock before the call. The callback acquires the lock, releases it while it waits or compiles, and
holds no other lock meanwhile. A framework would deadlock if one thread held the interpreter lock
while it waits for a compiling thread. We know of no such framework.

If the hook fails, the framework receives the result of the plug-in's own function.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from graphstash._compile.cache import CompileCache
from graphstash._interrupts import raise_after
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
"""All callbacks of this process, kept alive because plug-in tables may still point to them."""

_MEMORY: Final = Path("/proc/self/mem")

"""Seconds between two checks whether a thread has left its callback."""


class Interceptor:
    """Owns the patches of one table.

    Args:
        plugin: Owner of the table. It must have every function that `ClientCall` uses.
        cache_now: Returns the cache of this process, or None if there is none at the moment.

    Raises:
        OSError: The kernel refuses to write to the table.
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
        """Restore the plug-in's own functions.

        Raises:
            OSError: The kernel refuses to write to the table.
        """
        for patch in self._patches:
            patch.close()

    def _client_create(self, address: int) -> int:
        args = ClientCreateArgs.from_address(address)
        args.client = None

        def create() -> int:
            # `Shield.repeat_until_done` repeats this if a signal handler raises: create one client.
            return 0 if args.client else self._create(address) or 0

        shield = Shield(self._failed)
        shield.attempt(self._fingerprints.observe_environment)
        error = shield.repeat_until_done(create)
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
            error = shield.repeat_until_done(original)
        elif not shield.attempt(lambda: call.serve(self._fingerprints)):
            error = shield.repeat_until_done(original)
            if not error:
                shield.attempt(lambda: call.publish(compile_seconds=original.seconds))
            shield.attempt(call.end)
        shield.close()
        return error

    def _call(self, args: _Args, kind: type[Call]) -> Call | None:
        """Return the call to serve, or None if only the plug-in's own function must run."""
        cache = self._cache_now()
        if cache is None or self._experience.should_give_up:
            return None
        if args.struct_size < ctypes.sizeof(args) or not args.program or _is_extended(args):
            return None  # the hook does not support this version or extension of the arguments
        return kind(args, plugin=self._plugin, cache=cache, experience=self._experience)

    def _failed(self, error: Exception) -> None:
        if (cache := self._cache_now()) is not None:
            cache.record_fallback(error)


def _is_extended(args: _Args) -> bool:
    """Return whether an extension other than the profiler's may change the meaning of a call."""
    address = args.extension_start
    while address:
        extension = Extension.from_address(address)
        if extension.type != PROFILER_EXTENSION:
            return True
        address = extension.next
    return False


class _TablePatch:
    """Replaces one function of one table by a Python function.

    A single write stores the pointer, so a concurrent reader gets the old or the new pointer. The
    reader may call that pointer at any later time. Therefore callbacks are never freed.

    Args:
        api: Functions of the table before the change.
        function: Function to replace.
        stand_in: Maps the address of the arguments to a `PJRT_Error *` or 0. It must not raise.

    Raises:
        OSError: The kernel refuses to write to the table.
    """

    def __init__(self, api: Api, function: Function, stand_in: Callable[[int], int]) -> None:
        self._address = api.address_of(function)
        self._original = api.pointer(function)
        callback = FUNCTION_TYPE(stand_in)
        _KEPT.append(callback)
        self._ours = ctypes.cast(callback, ctypes.c_void_p).value or 0
        _store(self._address, self._ours)

    def close(self) -> None:
        """Restore the plug-in's own function, unless another tool has replaced ours."""
        if ctypes.c_uint64.from_address(self._address).value == self._ours:
            _store(self._address, self._original)


def _store(address: int, value: int) -> None:
    if is_writable(address):
        ctypes.c_uint64.from_address(address).value = value
        return
    # A constant table may lie in pages that are read-only after relocation. A write to
    # /proc/self/mem reaches such a page without changing its protection, as a debugger's does.
    with _MEMORY.open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(value.to_bytes(POINTER_BYTES, "little"))


class Shield:
    """Runs the steps of one callback, and keeps exceptions out of its C++ caller.

    A ctypes callback that raises returns null, which PJRT reads as success. Signal handlers run in
    the main thread, between any two Python steps. For example, a user presses Ctrl-C during a long
    compilation. Python then raises KeyboardInterrupt right after the compiler has returned, in the
    middle of the callback. Without the hook, Python would raise it when the framework returns from
    C++ to Python. Therefore `close` has it raised there.

    Args:
        failed: Called with the errors of the hook's own steps. It must not raise.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._interrupt: BaseException | None = None

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """Return the value of a hook's step, or None if the step or a signal handler raised."""
        try:
            try:
                return step()
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                self._failed(error)
        except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
            self._interrupt = interrupt
        return None

    def repeat_until_done(self, step: Callable[[], _T]) -> _T:
        """Return the value of a step that must finish; repeat it after a signal handler raises."""
        while True:
            try:
                return step()
            except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
                self._interrupt = interrupt

    def close(self) -> None:
        """Have a signal handler's exception raised again in this thread, after the callback."""
        if self._interrupt is not None:
            # An exception that leaves the callback ends the process.
            raise_after(sys._getframe(1), self._interrupt)
