"""Native observers, which record the argument values of a function in this process.

A library calls even its own exported functions through pointers. An observer replaces these
pointers with its own machine code. The code records the arguments and jumps to the function. It
uses no interpreter, lock or stack, so it never blocks and C++ exceptions pass through. In C:

    void observer(...) {
        ones |= argument; zeros |= ~argument;   // for each compared argument, atomically
        sum += argument;                        // for each added argument, atomically
        called = 1;
        goto *real;
    }

If all calls passed the same value, `zeros` is the complement of `ones`. If two calls differed, the
two words overlap.

The code uses only registers in which callers keep no values. Its page is never writable while it
can run.
"""

import ctypes
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from graphstash.hooks.torch_xla.elf import (
    PAGE,
    find_own_slots,
    map_pages,
    protect,
    read_pointer,
    replace_pointer,
    require_x86_64_linux,
)

__all__ = ["ADDED", "COMPARED", "FINISH", "Argument", "Observation", "Observer"]

_WORD: Final = 8

# Machine code and its assembly (GNU as, Intel syntax). `_append` completes each instruction that
# names a {variable}: it adds four bytes, the variable's distance from the end of the instruction.
COMPARED: Final = (
    ("f0 48 09 05", "lock or [rip + {ones}], rax"),
    ("48 f7 d0", "not rax"),
    ("f0 48 09 05", "lock or [rip + {zeros}], rax"),
)
ADDED: Final = (("f0 48 01 05", "lock add [rip + {sum}], rax"),)
FINISH: Final = (
    ("31 c0", "xor eax, eax"),
    ("ff c0", "inc eax"),
    ("f0 48 09 05", "lock or [rip + {called}], rax"),
    ("ff 25", "jmp [rip + {real}]"),
)


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a function, or a part of an argument.

    Attributes:
        name: Name for readers of the code.
        code: Machine code that loads the argument into `rax` and changes no other register.
        assembly: Assembly source of `code`; semicolons separate the instructions.
        is_added: Whether the observer adds the values instead of comparing them.
    """

    name: str
    code: str
    assembly: str
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """The record of an observer.

    Attributes:
        called: Whether the function was called.
        values: The value of each argument as an unsigned number, or None if calls differed in it.
    """

    called: bool
    values: tuple[int | None, ...]


class Observer:
    """Observes one function of one library until the process ends.

    Args:
        library: Path of the loaded library.
        symbol: A function that the library exports and calls through a pointer.
        arguments: Arguments to record.

    Raises:
        GateUnavailable: The library has no such function or pointer, the platform is not 64-bit
            x86 Linux, or the kernel refuses the memory.
    """

    def __init__(self, library: Path, symbol: str, arguments: Sequence[Argument]) -> None:
        require_x86_64_linux()
        self._arguments = tuple(arguments)
        slots = find_own_slots(library, symbol)
        code = map_pages(2)
        self._called = code + PAGE
        self._variables = self._called + 2 * _WORD  # two words for each argument
        real = self._called + _WORD
        ctypes.c_uint64.from_address(real).value = read_pointer(slots[0])
        body = self._assemble(code, real)
        ctypes.memmove(code, body, len(body))
        protect(code, mmap.PROT_READ | mmap.PROT_EXEC)
        for slot in slots:
            replace_pointer(slot, code)

    def observation(self) -> Observation:
        """Return the values recorded so far."""
        values = []
        for position, argument in enumerate(self._arguments):
            ones, zeros = (self._variable(position, part) for part in (0, 1))
            agreed = argument.is_added or not ones & zeros
            values.append(ones if agreed else None)
        return Observation(called=bool(read_pointer(self._called)), values=tuple(values))

    def _variable(self, position: int, part: int) -> int:
        return read_pointer(self._variables + (2 * position + part) * _WORD)

    def _assemble(self, start: int, real: int) -> bytes:
        code = bytearray()
        for position, argument in enumerate(self._arguments):
            first = self._variables + 2 * position * _WORD
            names = {"ones": first, "zeros": first + _WORD, "sum": first}
            code += bytes.fromhex(argument.code)
            _append(code, ADDED if argument.is_added else COMPARED, start, names)
        _append(code, FINISH, start, {"called": self._called, "real": real})
        return bytes(code)


def _append(
    code: bytearray, listing: Sequence[tuple[str, str]], start: int, names: dict[str, int]
) -> None:
    for instruction, text in listing:
        code += bytes.fromhex(instruction)
        _, marked, rest = text.partition("{")
        if marked:
            end = start + len(code) + 4
            code += struct.pack("<i", names[rest.partition("}")[0]] - end)
