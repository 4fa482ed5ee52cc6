"""Calls into one plug-in through its function table, with errors as exceptions.

Every call releases the interpreter lock while the plug-in is at work, and goes to the plug-in's own
function: never through a pointer that the hook has replaced.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from graphstash.hooks.pjrt.abi import (
    FUNCTIONS_OFFSET,
    POINTER_BYTES,
    AskArgs,
    Function,
    LoadArgs,
    TableHead,
)

__all__ = ["FUNCTION_TYPE", "Api", "PjrtError", "view_of"]

FUNCTION_TYPE: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

_DELETER_TYPE: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class PjrtError(Exception):
    """A plug-in has answered with an error.

    Attributes:
        code: a `PJRT_Error_Code`; -1 when it could not be read.
    """

    def __init__(self, message: str, *, code: int) -> None:
        self.code = code
        super().__init__(message)


class Api:
    """The functions of one table, as they were when it was first seen.

    Attributes:
        table: the table's address.
        major: must be 0, see `abi`.
        minor: how much the table and the structures have grown.
    """

    def __init__(self, table: int) -> None:
        head = TableHead.from_address(table)
        self.table = table
        self.major = int(head.major)
        self.minor = int(head.minor)
        self._count = (int(head.struct_size) - FUNCTIONS_OFFSET) // POINTER_BYTES
        self._functions = {
            function: pointer.value
            for function in Function
            if function < self._count
            and (pointer := ctypes.c_uint64.from_address(self.address_of(function))).value
        }

    def address_of(self, function: Function) -> int:
        """Where the table holds the pointer to `function`."""
        return self.table + FUNCTIONS_OFFSET + POINTER_BYTES * function

    def has(self, *functions: Function) -> bool:
        """Whether the plug-in offers all of them."""
        return all(function in self._functions for function in functions)

    def pointer(self, function: Function) -> int:
        """The plug-in's own function; 0 when it has none."""
        return self._functions.get(function, 0)

    def function(self, function: Function) -> Callable[[int], int | None]:
        """The same, to be called with the address of its arguments; returns a `PJRT_Error *`."""
        return FUNCTION_TYPE(self._functions[function])

    def ask(self, function: Function, subject: int) -> AskArgs:
        """What the plug-in answers about an object; see `AskArgs`.

        Raises:
            PjrtError: it answers with an error.
        """
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=subject)
        self._check(self.function(function)(ctypes.addressof(args)))
        return args

    def text(self, function: Function, subject: int) -> str:
        """An answer in words, e.g. the name of a platform.

        Raises:
            PjrtError: the plug-in answers with an error.
        """
        args = self.ask(function, subject)
        return bytes(view_of(args.answer, args.size)).decode("utf-8", "replace")

    @contextmanager
    def serialized(self, function: Function, subject: int) -> Iterator[memoryview]:
        """The bytes of an executable or a topology, in the plug-in's memory, for as long as needed.

        Raises:
            PjrtError: the plug-in answers with an error.
        """
        args = self.ask(function, subject)
        try:
            yield view_of(args.answer, args.size)
        finally:
            if args.deleter:
                _DELETER_TYPE(args.deleter)(args.backing)

    @contextmanager
    def executable_of(self, loaded: int) -> Iterator[int]:
        """The `PJRT_Executable` behind a loaded one; a handle of its own, given back afterwards.

        Raises:
            PjrtError: the plug-in answers with an error.
        """
        executable = self.ask(Function.LOADED_EXECUTABLE_GET_EXECUTABLE, loaded).answer
        try:
            yield executable
        finally:
            self.ask(Function.EXECUTABLE_DESTROY, executable)

    def load(self, client: int, serialized: bytes, *, options: int, options_size: int) -> int:
        """Loads an executable; `options` are the address and size of the caller's compile options.

        Those count, not the ones the executable was compiled with: the devices are the caller's.

        Raises:
            PjrtError: the plug-in cannot load it.
        """
        args = LoadArgs(
            struct_size=ctypes.sizeof(LoadArgs),
            client=client,
            serialized=serialized,
            serialized_size=len(serialized),
            options=options,
            options_size=options_size,
        )
        load = self.function(Function.EXECUTABLE_DESERIALIZE_AND_LOAD)
        self._check(load(ctypes.addressof(args)))
        if not args.loaded:
            raise PjrtError("no executable and no error", code=-1)
        return int(args.loaded)

    def _check(self, error: int | None) -> None:
        """Raises what the error says, and frees it."""
        if not error:
            return
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=error)
        self.function(Function.ERROR_MESSAGE)(ctypes.addressof(args))
        message = bytes(view_of(args.answer, args.size)).decode("utf-8", "replace")
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=error)
        refused = self.function(Function.ERROR_GET_CODE)(ctypes.addressof(args))
        code = -1 if refused else int(args.answer or 0) & 0xFFFFFFFF
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=error)
        self.function(Function.ERROR_DESTROY)(ctypes.addressof(args))
        raise PjrtError(message, code=code)


def view_of(address: int | None, size: int) -> memoryview:
    """A view of a plug-in's or framework's memory, without a copy."""
    if not address or not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
