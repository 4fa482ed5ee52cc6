"""Page protection: what mprotect and /proc/self/maps are needed for when a pointer is replaced.

The one error of this family lives here too, because every step of opening a gate can raise it.
"""

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

__all__ = ["PAGE", "GateUnavailable", "map_pages", "protect", "read_pointer", "replace_pointer"]

# x86-64, the only machine the gate runs on, has no other base page size.
PAGE: Final = 4096
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class GateUnavailable(RuntimeError):  # noqa: N818 - it names a state, as `queue.Empty` does
    """The gate cannot be opened in this process; the message says why."""


def map_pages(count: int) -> int:
    """Returns the address of fresh zeroed pages (read, write) which are never unmapped.

    Raises:
        GateUnavailable: the kernel gives no memory.
    """
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    readable = mmap.PROT_READ | mmap.PROT_WRITE
    address = call(None, count * PAGE, readable, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise GateUnavailable(f"mmap failed: {os.strerror(ctypes.get_errno())}")
    return int(address)


def protect(address: int, protection: int) -> None:
    """Sets the protection of the page that holds `address`.

    Raises:
        GateUnavailable: the kernel refuses, as hardened ones do for memory that becomes executable.
    """
    call = ctypes.CDLL(None, use_errno=True).mprotect
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if call(address & -PAGE, PAGE, protection):
        raise GateUnavailable(f"mprotect failed: {os.strerror(ctypes.get_errno())}")


def read_pointer(address: int) -> int:
    """Returns the eight bytes at `address`."""
    return ctypes.c_uint64.from_address(address).value


def replace_pointer(address: int, value: int) -> None:
    """Stores `value` at the aligned `address` in one move; the page's protection stays as it was.

    Raises:
        GateUnavailable: the page is not mapped, or the kernel refuses to make it writable.
    """
    before = _protection(address)
    if not before & mmap.PROT_WRITE:
        protect(address, before | mmap.PROT_WRITE)
    ctypes.c_uint64.from_address(address).value = value
    if not before & mmap.PROT_WRITE:
        protect(address, before)


def _protection(address: int) -> int:
    bits = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        span, flags, _ = line.split(" ", 2)
        start, _, end = span.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return sum(bits.get(flag, 0) for flag in flags[:3])
    raise GateUnavailable(f"address {address:#x} is not mapped")
