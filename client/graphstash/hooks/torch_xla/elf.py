"""Find and replace the pointers through which a loaded library calls functions.

The module reads the library's ELF tables in memory, like the dynamic loader. `dlinfo` returns the
addresses of the library and of its dynamic section. The dynamic section contains the addresses of
the symbol table, its strings and the relocations of the procedure linkage table (PLT). If a library
or the kernel does not allow a call, the functions raise `GateUnavailable`.

Layouts: "System V ABI, AMD64 supplement", chapters 4 and 5. GNU hash table:
https://sourceware.org/legacy-ml/binutils/2006-10/msg00377.html.
"""

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from graphstash.hooks.mappings import memory_mappings

__all__ = [
    "PAGE",
    "GateUnavailable",
    "find_own_slots",
    "find_slot",
    "libc_function",
    "map_pages",
    "protect",
    "read_pointer",
    "replace_pointers",
    "require_x86_64_linux",
]

# The gate runs only on x86-64, where the base page size is always 4096 bytes.
PAGE: Final = 4096
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_RTLD_DI_LINKMAP: Final = 2  # <dlfcn.h>

# Tags of the dynamic section, <elf.h>.
_DT_NULL: Final = 0
_DT_PLTRELSZ: Final = 2
_DT_HASH: Final = 4
_DT_STRTAB: Final = 5
_DT_SYMTAB: Final = 6
_DT_JMPREL: Final = 23
_DT_GNU_HASH: Final = 0x6FFFFEF5

_POINTER_BYTES: Final = 8
_SYMBOL_BYTES: Final = 24  # Elf64_Sym; its first four bytes are the offset of the name
_RELOCATION: Final = struct.Struct("<QQq")  # Elf64_Rela: offset, info, addend
_INFO_OFFSET: Final = 8
_R_X86_64_JUMP_SLOT: Final = 7


class GateUnavailable(RuntimeError):  # noqa: N818 - it names a state, as `queue.Empty` does
    """A library's calls cannot be intercepted in this process."""


class _LinkMap(ctypes.Structure):
    """The first fields of glibc's `struct link_map`."""

    _fields_ = (("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_uint64))


def require_x86_64_linux() -> None:
    """Raise GateUnavailable unless this is a 64-bit process on x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize <= 2**32:
        raise GateUnavailable("it needs machine code for 64-bit x86 Linux")


def find_slot(library: Path, symbol: str) -> int:
    """Return the address of the jump slot through which `library` calls the imported `symbol`."""
    link_map = _link_map(library)
    dynamic = _dynamic_section(link_map)
    try:
        index = _import_index(dynamic, symbol.encode())
        relocations, size = dynamic[_DT_JMPREL], dynamic[_DT_PLTRELSZ]
    except KeyError as error:
        raise GateUnavailable(f"{library.name} has no dynamic tag {error}") from error
    if index is not None:
        # torch_xla has 235 000 relocations, so search their bytes instead of unpacking each
        # relocation. Skip matches that are not aligned with an info field.
        table = ctypes.string_at(relocations, size)
        pattern = struct.pack("<Q", index << 32 | _R_X86_64_JUMP_SLOT)
        found = table.find(pattern)
        while found >= 0 and found % _RELOCATION.size != _INFO_OFFSET:
            found = table.find(pattern, found + 1)
        if found >= 0:
            offset, _, _ = _RELOCATION.unpack_from(table, found - _INFO_OFFSET)
            return int(link_map.base + offset)
    raise GateUnavailable(f"{library.name} has no jump slot for {symbol}: a build we do not know")


def find_own_slots(library: Path, symbols: Iterable[str]) -> dict[str, list[int]]:
    """Return the addresses of the jump slots through which `library` calls its own functions."""
    link_map = _link_map(library)
    loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    slots: dict[str, list[int]] = {}
    by_address: dict[int, list[int]] = {}
    for symbol in symbols:
        try:
            address = ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise GateUnavailable(
                f"{library.name} has no {symbol}: a build we do not know"
            ) from error
        if address in by_address:
            raise GateUnavailable(f"{symbol} is another name of a function: a build we do not know")
        slots[symbol] = by_address[address] = []
    dynamic = _dynamic_section(link_map)
    # The slots are contiguous and in the order of their relocations, so the first and the last
    # relocation give their range. Unpacking all 235 000 relocations of torch_xla would be slow.
    count = dynamic.get(_DT_PLTRELSZ, 0) // _RELOCATION.size
    if not count:
        raise GateUnavailable(f"{library.name} has no jump slots: a build we do not know")
    first, last = (
        _RELOCATION.unpack(ctypes.string_at(dynamic[_DT_JMPREL] + index * _RELOCATION.size, 24))[0]
        for index in (0, count - 1)
    )
    begin = link_map.base + first
    if last - first != (count - 1) * _POINTER_BYTES:
        raise GateUnavailable(f"{library.name} has jump slots with gaps: a build we do not know")
    table = memoryview((ctypes.c_uint64 * count).from_address(begin)).cast("B").cast("Q")
    for index, address in enumerate(table):
        if address in by_address:
            by_address[address].append(begin + index * _POINTER_BYTES)
    for symbol, found in slots.items():
        if not found:
            raise GateUnavailable(
                f"{library.name} has no jump slot for {symbol}: a build we do not know"
            )
    return slots


def libc_function(symbol: str, version: str) -> int:
    """Return the address of a glibc function, also of an old version hidden from new code."""
    try:
        libc = ctypes.CDLL("libc.so.6", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        call = ctypes.CDLL(None).dlvsym
    except (OSError, AttributeError) as error:
        raise GateUnavailable("the C library is not glibc") from error
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    address = call(libc._handle, symbol.encode(), version.encode())
    if address is None:
        raise GateUnavailable(f"the C library has no {symbol}@{version}")
    return int(address)


def map_pages(count: int) -> int:
    """Return the address of `count` new zeroed, writable pages, which are never unmapped."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    readable = mmap.PROT_READ | mmap.PROT_WRITE
    address = call(None, count * PAGE, readable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise GateUnavailable(f"mmap failed: {os.strerror(ctypes.get_errno())}")
    return int(address)


def protect(address: int, protection: int) -> None:
    """Set the protection of the page at `address`. Hardened kernels allow no executable page."""
    call = ctypes.CDLL(None, use_errno=True).mprotect
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if call(address & -PAGE, PAGE, protection):
        raise GateUnavailable(f"mprotect failed: {os.strerror(ctypes.get_errno())}")


def read_pointer(address: int) -> int:
    """Return the pointer that is stored at `address`."""
    return ctypes.c_uint64.from_address(address).value


def replace_pointers(values: Mapping[int, int]) -> None:
    """Store each value at its aligned address, with one write per value. Make a read-only page
    writable during the write.
    """
    for address, before in _protections(values).items():
        if not before & mmap.PROT_WRITE:
            protect(address, before | mmap.PROT_WRITE)
        ctypes.c_uint64.from_address(address).value = values[address]
        if not before & mmap.PROT_WRITE:
            protect(address, before)


def _link_map(library: Path) -> _LinkMap:
    try:
        loaded = ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        call = ctypes.CDLL(None).dlinfo
    except OSError as error:
        raise GateUnavailable(f"{library.name} is not loaded") from error
    except AttributeError as error:
        raise GateUnavailable("the C library is not glibc") from error
    call.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    found = ctypes.POINTER(_LinkMap)()
    if call(loaded._handle, _RTLD_DI_LINKMAP, ctypes.byref(found)):
        raise GateUnavailable(f"the loader has no information about {library.name}")
    return found.contents


def _dynamic_section(link_map: _LinkMap) -> dict[int, int]:
    addresses = {_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL, _DT_GNU_HASH}
    entries: dict[int, int] = {}
    position = link_map.dynamic
    while True:
        tag, value = (ctypes.c_uint64 * 2).from_address(position)
        if tag == _DT_NULL:
            return entries
        # Unless the section is read-only, glibc has already added the load address to the entries.
        is_relative = tag in addresses and value < link_map.base
        entries[tag] = value + link_map.base if is_relative else value
        position += 16


def _import_index(dynamic: dict[int, int], symbol: bytes) -> int | None:
    # The symbol table begins with imported symbols, which are not in the GNU hash table. The second
    # word of the hash table is the index of its first symbol, so the loop compares hundreds of
    # names, not hundreds of thousands. In the older hash table, it is the number of all symbols.
    table = dynamic.get(_DT_GNU_HASH) or dynamic[_DT_HASH]
    count = ctypes.c_uint32.from_address(table + 4).value
    symbols, strings = dynamic[_DT_SYMTAB], dynamic[_DT_STRTAB]
    terminated = symbol + b"\0"
    for index in range(count):
        name = ctypes.c_uint32.from_address(symbols + index * _SYMBOL_BYTES).value
        if ctypes.string_at(strings + name, len(terminated)) == terminated:
            return index
    return None


def _protections(addresses: Iterable[int]) -> dict[int, int]:
    bits = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
    left, found = sorted(addresses, reverse=True), {}
    for mapping in memory_mappings():
        while left and mapping.start <= left[-1] < mapping.end:
            found[left.pop()] = sum(bits.get(flag, 0) for flag in mapping.permissions[:3])
        if not left:
            return found
    raise GateUnavailable(f"address {left[-1]:#x} is not mapped")
