"""Native observers of calls: what values the arguments of a function had in this process.

A library calls its own functions through pointers too, so that they can be replaced. An observer
takes the place of one, notes arguments, and jumps to the function: it needs no interpreter, no
lock and no stack, so exceptions pass and nothing can wait for it. For each argument it does

    ones  |= value          # atomically
    zeros |= ~value

When all calls had one value, `zeros` is the complement of `ones`; otherwise the two overlap. An
argument can also be added up instead. In C:

    void observer(...) {
        ones |= argument; zeros |= ~argument;   // for each argument that is compared
        sum += argument;                        // for each one that is added up
        called = 1;
        goto *real;
    }

The code uses only registers that no caller keeps values in. The code page is never writable while
it can run.
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

# Machine code and the assembly it comes from (GNU as, Intel syntax), after which four bytes follow:
# the distance of a variable from the end of the instruction.
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
    """One argument of a function, or a part of it.

    Attributes:
        name: for people.
        code: machine code that loads it into `rax`, and may use no other register.
        assembly: what `code` comes from, in instructions that are separated by semicolons.
        is_added: whether its values are added up instead of compared.
    """

    name: str
    code: str
    assembly: str
    is_added: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What an observer has noted.

    Attributes:
        called: whether the function was called.
        values: of each argument, as an unsigned number; None if calls differ in it.
    """

    called: bool
    values: tuple[int | None, ...]


class Observer:
    """Observes one function of one library, until the process ends.

    Args:
        library: the loaded library.
        symbol: the function, which the library exports and calls through a pointer.
        arguments: that are noted.

    Raises:
        GateUnavailable: the function or its pointer is not there, or the kernel refuses.
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
        """Return what was noted so far."""
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
