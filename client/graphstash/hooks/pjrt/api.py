"""Call a PJRT plug-in through its function table, and raise its errors as exceptions.

Each call releases the GIL.
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
    """A plug-in returned an error.

    Attributes:
        code: The `PJRT_Error_Code`, or -1 if the plug-in returned none.
    """

    def __init__(self, message: str, *, code: int) -> None:
        self.code = code
        super().__init__(message)


class Api:
    """The functions of one table. The pointers are copied at creation, so calls bypass a hook that
    replaces pointers in the table later.

    Methods that call the plug-in raise `PjrtError` if the plug-in returns an error.

    Attributes:
        table: Address of the table.
        major: Major version of the interface. The hook supports only 0.
        minor: Minor version. Each one appends fields to the table or to argument structures.
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
        """Return the address in the table at which the pointer to `function` is stored."""
        return self.table + FUNCTIONS_OFFSET + POINTER_BYTES * function

    def has(self, *functions: Function) -> bool:
        """Return whether the plug-in implements all of the functions."""
        return all(function in self._functions for function in functions)

    def pointer(self, function: Function) -> int:
        """Return the address of the plug-in's function, or 0 if the plug-in lacks it."""
        return self._functions.get(function, 0)

    def function(self, function: Function) -> Callable[[int], int | None]:
        """Return a callable that takes the arguments' address and returns a `PJRT_Error *`."""
        return FUNCTION_TYPE(self._functions[function])

    def ask(self, function: Function, subject: int) -> AskArgs:
        """Call a function whose only input is `subject`, the address of an object. Return the
        argument structure, which contains the result.
        """
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=subject)
        self._check(self.function(function)(ctypes.addressof(args)))
        return args

    def text(self, function: Function, subject: int) -> str:
        """Return a string property of an object, such as a platform's name."""
        args = self.ask(function, subject)
        return bytes(view_of(args.answer, args.size)).decode("utf-8", "replace")

    @contextmanager
    def serialized(self, function: Function, subject: int) -> Iterator[memoryview]:
        """Yield a serialized executable or topology. The context's end frees the bytes."""
        args = self.ask(function, subject)
        try:
            yield view_of(args.answer, args.size)
        finally:
            if args.deleter:
                _DELETER_TYPE(args.deleter)(args.backing)

    @contextmanager
    def executable_of(self, loaded: int) -> Iterator[int]:
        """Yield a loaded executable's `PJRT_Executable`. The context's end frees the handle."""
        executable = self.ask(Function.LOADED_EXECUTABLE_GET_EXECUTABLE, loaded).answer
        try:
            yield executable
        finally:
            self.ask(Function.EXECUTABLE_DESTROY, executable)

    def load(self, client: int, serialized: bytes, *, options: int, options_size: int) -> int:
        """Load a serialized executable and return the address of the loaded executable.

        `options` is the address of the caller's serialized compile options, `options_size` their
        length in bytes. They name the caller's devices and replace the options of the compilation.
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
        """Do nothing for a null pointer. Otherwise free the `PJRT_Error` and raise `PjrtError`."""
        if not error:
            return
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=error)
        self.function(Function.ERROR_MESSAGE)(ctypes.addressof(args))
        message = bytes(view_of(args.answer, args.size)).decode("utf-8", "replace")
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=error)
        failed = self.function(Function.ERROR_GET_CODE)(ctypes.addressof(args))
        code = -1 if failed else int(args.answer or 0) & 0xFFFFFFFF
        args = AskArgs(struct_size=ctypes.sizeof(AskArgs), subject=error)
        self.function(Function.ERROR_DESTROY)(ctypes.addressof(args))
        raise PjrtError(message, code=code)


def view_of(address: int | None, size: int) -> memoryview:
    """Return a view of native memory, not a copy. The view is empty if the address is null."""
    if not address or not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
