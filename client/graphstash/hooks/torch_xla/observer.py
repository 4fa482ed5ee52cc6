"""Native observers, which record the arguments of a function's calls in this process.

A library calls even its own exported functions through pointers. An observer replaces these
pointers with the address of its own machine code. The code records the arguments and jumps to the
function. It uses no Python, mutex or stack frame, so it never blocks and C++ exceptions pass
through. In C:

    void observer(...) {
        ones |= argument; zeros |= ~argument;   // for each compared argument, atomically
        sum += argument;                        // for each added argument, atomically
        called = 1;
        goto *real;
    }

If all calls passed the same value, `ones` and `zeros` share no bit. If two calls differed, `ones`
and `zeros` share a bit.

The code changes only `rax` and the flags, which any function may overwrite. Its page is never
writable and executable at the same time.
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
    replace_pointers,
    require_x86_64_linux,
)

__all__ = ["ADDED", "COMPARED", "FINISH", "Argument", "Observation", "observe"]

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
        code: Machine code that loads the argument into `rax` and changes no other register.
        assembly: Assembly source of `code`; semicolons separate the instructions.
        is_added: Whether the observer adds the values of all calls instead of comparing them.
    """

    name: str
    code: str
    assembly: str
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """The record of an observer."""

    called: bool
    values: tuple[int | None, ...]
    """For each argument an unsigned number: the sum over all calls if `is_added`, else the value of
    every call, or None if calls differed."""


def observe(library: Path, functions: Sequence[tuple[str, Sequence[Argument]]]) -> list["Observer"]:
    """Observe functions of a loaded library until the process ends. It must export them and call
    them through pointers. Each function is followed by the arguments to record.

    Raises:
        GateUnavailable: The library has no such function or pointer, the platform is not 64-bit
            x86 Linux, or the kernel refuses the memory.
    """
    require_x86_64_linux()
    slots = find_own_slots(library, [symbol for symbol, _ in functions])
    observers: list[Observer] = []
    replaced: dict[int, int] = {}
    for symbol, arguments in functions:
        observer = Observer(read_pointer(slots[symbol][0]), arguments)
        observers.append(observer)
        replaced |= dict.fromkeys(slots[symbol], observer.address)
    replace_pointers(replaced)
    return observers


class Observer:
    """Machine code, at `address`, that records the arguments of a call and jumps to `real`.

    Raises:
        GateUnavailable: The kernel refuses the memory.
    """

    def __init__(self, real: int, arguments: Sequence[Argument]) -> None:
        self._arguments = tuple(arguments)
        self.address = map_pages(2)
        self._called = self.address + PAGE
        self._variables = self._called + 2 * _WORD  # two words for each argument
        ctypes.c_uint64.from_address(self._called + _WORD).value = real
        code = self._assemble()
        ctypes.memmove(self.address, code, len(code))
        protect(self.address, mmap.PROT_READ | mmap.PROT_EXEC)

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

    def _assemble(self) -> bytes:
        code = bytearray()
        for position, argument in enumerate(self._arguments):
            first = self._variables + 2 * position * _WORD
            names = {"ones": first, "zeros": first + _WORD, "sum": first}
            code += bytes.fromhex(argument.code)
            _append(code, ADDED if argument.is_added else COMPARED, self.address, names)
        names = {"called": self._called, "real": self._called + _WORD}
        _append(code, FINISH, self.address, names)
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
