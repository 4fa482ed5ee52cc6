"""Stands in for the compile functions of one plug-in.

Frameworks call them from any thread, JAX and torch_xla (2.9) with the interpreter lock released;
the callback takes it like any Python code, gives it up while it waits or compiles, and holds no
other lock meanwhile. A framework that kept the interpreter lock of one thread while it waits for a
thread that compiles would be stuck; none is known.

Whatever happens in here, the framework gets what the plug-in's own function returns.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from graphstash._compile import CompileCache
from graphstash._errors import CacheError, Reason
from graphstash.hooks.pjrt.abi import (
    PROFILER_EXTENSION,
    AheadOfTimeArgs,
    ClientCompileArgs,
    Extension,
    Function,
)
from graphstash.hooks.pjrt.ahead_of_time import AheadOfTimeCall
from graphstash.hooks.pjrt.call import Call, Experience, Original
from graphstash.hooks.pjrt.client_call import ClientCall
from graphstash.hooks.pjrt.fingerprint import Fingerprints
from graphstash.hooks.pjrt.patch import Patch
from graphstash.hooks.pjrt.plugins import Plugin
from graphstash.hooks.pjrt.shield import Shield
from graphstash.hooks.pjrt.topology import NEEDED

__all__ = ["Interceptor"]

_log = logging.getLogger("graphstash")

_Args = TypeVar("_Args", ClientCompileArgs, AheadOfTimeArgs)

_AHEAD_OF_TIME: Final = (Function.COMPILE, *NEEDED)


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
        self._patches = [Patch(api, Function.CLIENT_COMPILE, self._client_compile)]
        if api.has(*_AHEAD_OF_TIME):
            self._compile_ahead = api.function(Function.COMPILE)
            self._patches.append(Patch(api, Function.COMPILE, self._compile_ahead_of_time))

    def close(self) -> None:
        """Puts the plug-in's own functions back.

        Raises:
            OSError: the kernel does not let the table be written.
        """
        for patch in self._patches:
            patch.close()

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
        """What is to be done about a call; None to let it pass."""
        cache = self._cache_now()
        if cache is None or self._experience.is_hopeless:
            return None
        if args.struct_size < ctypes.sizeof(args) or not args.program or _is_extended(args):
            return None  # of a version, or with an extension, whose meaning is not known here
        return kind(args, plugin=self._plugin, cache=cache, experience=self._experience)

    def _failed(self, error: Exception) -> None:
        cache = self._cache_now()
        if cache is None:
            return
        _log.debug("serving a compile call failed", exc_info=error)
        if not isinstance(error, CacheError):
            error = CacheError(Reason.INTERNAL, repr(error))
        cache.trouble(error)


def _is_extended(args: _Args) -> bool:
    """Whether the caller wants anything that only an extension says."""
    address = args.extension_start
    while address:
        extension = Extension.from_address(address)
        if extension.type != PROFILER_EXTENSION:
            return True
        address = extension.next
    return False
