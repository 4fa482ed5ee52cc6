"""Machine code from the GNU assembler, and calls of it."""

import ctypes
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

STAT = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, use_errno=True
)
"""The type of `__xstat` in the C library."""


def stat_by(address: int, path: object) -> int:
    """Call the function at an address as `__xstat`, and return its result."""
    buffer = ctypes.create_string_buffer(256)
    return int(STAT(address)(1, os.fsencode(str(path)), ctypes.addressof(buffer)))


def assembled(directory: Path, lines: Iterable[str]) -> bytes:
    """Return the machine code of lines in Intel's syntax."""
    source, made, raw = (directory / name for name in ("code.s", "code.o", "code.bin"))
    source.write_text("\n".join([".intel_syntax noprefix", *lines]) + "\n")
    subprocess.run(["as", "-o", made, source], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, raw], check=True)
    return raw.read_bytes()
