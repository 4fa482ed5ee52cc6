"""Replace the compile functions in the table of one plug-in.

Frameworks call these functions from any thread. JAX and torch_xla (2.9) release the interpreter
lock before the call. The callback acquires it, releases it while it waits or compiles, and then
holds no other lock. A framework in which a thread keeps the interpreter lock while it waits for a
compiling thread would deadlock; we know of none.

If the hook fails, the plug-in's own function runs.
"""

import ctypes
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

from graphstash._compile.cache import CompileCache
from graphstash._interrupts import raise_after
from graphstash.hooks.partitioners import Partitioners
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
from graphstash.hooks.pjrt.call import AheadOfTimeCall, Call, ClientCall, OriginalCall, TrackRecord
from graphstash.hooks.pjrt.client_options import client_options
from graphstash.hooks.pjrt.fingerprint import TOPOLOGY_FUNCTIONS, Fingerprints
from graphstash.hooks.pjrt.plugins import Plugin, is_writable

__all__ = ["Interceptor", "Shield"]


_T = TypeVar("_T")
_Args = TypeVar("_Args", ClientCompileArgs, AheadOfTimeArgs)

_AHEAD_OF_TIME: Final = (Function.COMPILE, *TOPOLOGY_FUNCTIONS)

_CALLBACKS: Final[list[Any]] = []
"""All callbacks of this process, kept alive because tables may still point to them."""

_MEMORY: Final = Path("/proc/self/mem")


class Interceptor:
    """Owns the patches of the table of a plug-in, which has every function that `ClientCall` uses.

    `current_cache` returns the cache of this process, or None if it has none at the moment.
    For `partitioners` and `late_options`, see `Fingerprints`.

    Raises:
        OSError: The kernel refuses a write to the table, here or in `close`.
    """

    def __init__(
        self,
        plugin: Plugin,
        current_cache: Callable[[], CompileCache | None],
        *,
        partitioners: Callable[[], Partitioners | None] = lambda: None,
        late_options: Callable[[], Mapping[str, object] | None] = lambda: None,
    ) -> None:
        self._plugin = plugin
        self._current_cache = current_cache
        self._track_record = TrackRecord()
        self._fingerprints = Fingerprints(
            plugin, partitioners=partitioners, late_options=late_options
        )
        api = plugin.api
        self._compile = api.function(Function.CLIENT_COMPILE)
        stand_ins = {Function.CLIENT_COMPILE: self._client_compile}
        if api.has(Function.CLIENT_CREATE):
            self._create = api.function(Function.CLIENT_CREATE)
            stand_ins[Function.CLIENT_CREATE] = self._client_create
        if api.has(*_AHEAD_OF_TIME):
            self._compile_ahead = api.function(Function.COMPILE)
            stand_ins[Function.COMPILE] = self._compile_ahead_of_time
        self._patches: list[_TablePatch] = []
        try:
            for function, stand_in in stand_ins.items():
                self._patches.append(_TablePatch(api, function, stand_in))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the plug-in's own functions."""
        for patch in self._patches:
            patch.close()

    def _client_create(self, address: int) -> int:
        args = ClientCreateArgs.from_address(address)
        args.client = None

        def create() -> int:
            # A signal handler that raises repeats this step, which must not create two clients.
            return 0 if args.client else self._create(address) or 0

        shield = Shield(self._record_failure)
        count = shield.attempt(self._fingerprints.observe_environment)
        options = shield.attempt(lambda: client_options(args))
        error = shield.repeat_until_done(create)
        if count is not None and options is not None and args.client:
            self._fingerprints.add_client(args.client, count, options)
        shield.close(sys._getframe())
        return error

    def _client_compile(self, address: int) -> int:
        return self._intercept(self._compile, address, ClientCompileArgs, ClientCall)

    def _compile_ahead_of_time(self, address: int) -> int:
        return self._intercept(self._compile_ahead, address, AheadOfTimeArgs, AheadOfTimeCall)

    def _intercept(
        self,
        function: Callable[[int], int | None],
        address: int,
        layout: type[_Args],
        kind: type[Call],
    ) -> int:
        args = layout.from_address(address)
        original = OriginalCall(function, address, args)
        shield = Shield(self._record_failure)
        call = shield.attempt(lambda: self._make_call(args, kind))
        error = 0
        if call is None:
            error = shield.repeat_until_done(original)
        elif not shield.attempt(lambda: call.serve(self._fingerprints)):
            error = shield.repeat_until_done(original)
            if not error:
                shield.attempt(lambda: call.publish(compile_seconds=original.seconds))
            shield.attempt(call.end)
        shield.close(sys._getframe(1))
        return error

    def _make_call(self, args: _Args, kind: type[Call]) -> Call | None:
        """Return the call to serve, or None to run only the plug-in's own function."""
        cache = self._current_cache()
        if cache is None or self._track_record.should_give_up:
            return None
        if args.struct_size < ctypes.sizeof(args) or not args.program or _is_extended(args):
            return None  # unsupported version or extension of the arguments
        return kind(args, plugin=self._plugin, cache=cache, track_record=self._track_record)

    def _record_failure(self, error: Exception) -> None:
        if (cache := self._current_cache()) is not None:
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

    A single write stores the pointer, so a concurrent reader gets the old or the new one.
    The reader may call it at any later time, so callbacks are never freed.

    `stand_in` maps the address of the arguments to a `PJRT_Error *` or 0. It must not raise.
    """

    def __init__(self, api: Api, function: Function, stand_in: Callable[[int], int]) -> None:
        self._address = api.address_of(function)
        self._original = api.pointer(function)
        callback = FUNCTION_TYPE(stand_in)
        _CALLBACKS.append(callback)
        self._ours = ctypes.cast(callback, ctypes.c_void_p).value or 0
        _write_pointer(self._address, self._ours)

    def close(self) -> None:
        """Restore the plug-in's own function, unless another tool has replaced the stand-in."""
        if ctypes.c_uint64.from_address(self._address).value == self._ours:
            _write_pointer(self._address, self._original)


def _write_pointer(address: int, value: int) -> None:
    if is_writable(address):
        ctypes.c_uint64.from_address(address).value = value
        return
    # A constant table may lie in pages that are read-only after relocation. Debuggers also write
    # to such pages through /proc/<pid>/mem, without changing their protection.
    with _MEMORY.open("r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(value.to_bytes(POINTER_BYTES, "little"))


class Shield:
    """Runs the steps of one callback, and keeps exceptions out of its C++ caller.

    A ctypes callback that raises returns null, which PJRT reads as success. Signal handlers may
    raise between any two Python steps in the main thread. After Ctrl-C during a compilation, Python
    would raise KeyboardInterrupt in the callback, as soon as the compiler returns. `close` raises
    it after the callback instead, when the framework returns to Python.

    `on_error` is called with the errors of the hook's own steps. It must not raise.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._interrupt: BaseException | None = None

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """Return the value of a hook's step, or None if the step or a signal handler raised."""
        try:
            try:
                return step()
            except Exception as error:  # noqa: BLE001 - the hook's outermost frame
                self._on_error(error)
        except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
            self._interrupt = interrupt
        return None

    def repeat_until_done(self, step: Callable[[], _T]) -> _T:
        """Return the value of a step, repeated while signal handlers interrupt it."""
        while True:
            try:
                return step()
            except BaseException as interrupt:  # noqa: BLE001 - raised again by `close`
                self._interrupt = interrupt

    def close(self, callback: FrameType) -> None:
        """Raise a signal handler's exception in this thread after the callback has returned.
        `callback` is its outermost frame, because any other frame returns to Python.
        """
        if self._interrupt is not None:
            raise_after(callback, self._interrupt)
