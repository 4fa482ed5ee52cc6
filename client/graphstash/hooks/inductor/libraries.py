"""Find the loaded libraries that can register operations: the libraries linked to torch.

A library that defines an operation or replaces torch's kernels takes part in compilations. Its
description consists of the digests of its file and of the libraries that it needs.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

from graphstash.hooks.code import UndescribableError
from graphstash.hooks.mappings import MemoryMapping, memory_mappings

__all__ = ["Library", "libraries", "needed_by", "needed_libraries"]

_OF_TORCH: Final = ("libc10", "libtorch")
_OF_SYSTEM: Final = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB = 1, 5

_DELETED: Final = " (deleted)"
"""What Linux appends to the path of a mapped file that was replaced or deleted."""

_REGISTERS: Final = b"5torch7Library"
"""Part of the name of the class that registers kernels, as C++ mangles it."""


class Library:
    """A library linked to torch.

    Attributes:
        path: path of its file.
        needed: names of the libraries that it needs.
    """

    def __init__(self, path: Path, needed: tuple[str, ...]) -> None:
        self.path = path
        self.needed = needed
        self._content = path.read_bytes()
        self.digest = sha256(self._content).hexdigest()
        self._registers = _REGISTERS in self._content
        self._found: dict[bytes, bool] = {}

    def registers_in(self, namespace: str) -> bool:
        """Return whether the library may register operations or kernels in a namespace.

        A linker merges a string into a longer one that ends with it, so only the end is checked.
        """
        return self._registers and self._contains(f"{namespace}\0".encode())

    def mentions(self, operation: str) -> bool:
        """Return whether the library contains the names of an operation and its namespace."""
        return all(self._contains(word.encode()) for word in operation.split("::"))

    def _contains(self, word: bytes) -> bool:
        if word not in self._found:
            self._found[word] = word in self._content
        return self._found[word]


def libraries() -> list[Library]:
    """Return the loaded libraries linked to torch that do not belong to torch.

    Raises:
        UndescribableError: the file of a library that registers operations was replaced or deleted
            before its first reading.
    """
    if lost := next(
        (path for path, registers in _replaced_libraries(_count()).items() if registers), ""
    ):
        raise UndescribableError(f"{lost} was replaced or deleted after a program had loaded it")
    return _libraries(_count())


@lru_cache(maxsize=1)
def _libraries(count: tuple[int, int]) -> list[Library]:
    found = (_read_library(path, *_mtime_and_size(path)) for path in _loaded_paths(count))
    return [each for each in found if each is not None]


def needed_by(library: Library) -> Iterator[str]:
    """Yield the digests of a library and its dependencies, except torch's and the system's.

    Raises:
        UndescribableError: the file of a dependency was replaced or deleted.
    """
    lost = {Path(path).name for path in _replaced_libraries(_count())}
    files = {Path(path).name: path for path in _loaded_paths(_count()) if not _is_of_system(path)}
    files[library.path.name] = str(library.path)
    names, seen = [library.path.name], set[str]()
    while names:
        name = names.pop()
        if name in lost:
            raise UndescribableError(f"{name} was replaced or deleted after it was loaded")
        if name in seen or name not in files:
            continue
        seen.add(name)
        needed, digest = _needed_and_digest(files[name], *_mtime_and_size(files[name]))
        names += (Path(each).name for each in needed)
        yield digest


class _LibraryInfo(ctypes.Structure):
    """`dl_phdr_info` of <link.h>."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("header_count", ctypes.c_uint16),
        ("added", ctypes.c_ulonglong),
        ("removed", ctypes.c_ulonglong),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_LibraryInfo), ctypes.c_size_t, ctypes.POINTER(ctypes.c_ulonglong)
)


@_Callback  # type: ignore[untyped-decorator] # ctypes
def _read_count(info: Any, _size: int, into: Any) -> int:
    into[0], into[1] = info.contents.added, info.contents.removed
    return 1


def _count() -> tuple[int, int]:
    """Return how many libraries this process has loaded, and how many unloaded."""
    counts = _Counts()
    _iterate(_read_count, counts)
    return counts[0], counts[1]


_Counts = ctypes.c_ulonglong * 2
_iterate: Final = ctypes.CDLL(None).dl_iterate_phdr


@lru_cache(maxsize=1)
def _loaded_paths(_count: tuple[int, int]) -> list[str]:
    own = f"{Path(torch.__file__).parent}{os.sep}"
    paths = {each.path for each in _code_mappings() if not each.path.endswith(_DELETED)}
    paths |= {
        path
        for each in _code_mappings()
        if (path := each.path.removesuffix(_DELETED)) in _read_paths
    }
    found = [
        path
        for path in sorted(paths)
        if not path.startswith(own)
        and not (_is_of_system(path) and Path(path).name.startswith(_OF_TORCH))
        and (path in _read_paths or Path(path).is_file())
    ]
    _read_paths.update(found)
    return found


_read_paths: Final = set[str]()
"""Paths that were read. Caches hold what `Library` reads, so the files may change later."""


@lru_cache(maxsize=1)
def _replaced_libraries(_count: tuple[int, int]) -> dict[str, bool]:
    """Return the loaded libraries that were not read before their files were replaced or deleted,
    each with whether it may register operations.
    """
    codes = [
        each.path
        for each in _code_mappings()
        if each.path.endswith(_DELETED) and ".so" in each.path
    ]
    lost = {each for each in codes if each.removesuffix(_DELETED) not in _read_paths}
    held = [each for each in memory_mappings() if each.path in lost and "r" in each.permissions]
    registers = {
        each.path
        for each in held
        if _REGISTERS in ctypes.string_at(each.start, each.end - each.start)
    }
    return {each.removesuffix(_DELETED): each in registers for each in sorted(lost)}


def _code_mappings() -> Iterator[MemoryMapping]:
    return (e for e in memory_mappings() if e.permissions == "r-xp" and "/" in e.path)


def _is_of_system(path: str) -> bool:
    return path.startswith(_OF_SYSTEM) and "-packages/" not in path


@lru_cache(maxsize=4096)
def _mtime_and_size(path: str) -> tuple[int, int]:
    """Return the modification time and size that a loaded file had at the first call."""
    status = Path(path).stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=4096)
def _read_library(path: str, _changed_ns: int, _size: int) -> Library | None:
    needed = needed_libraries(Path(path))
    is_extension = any(name.startswith(_OF_TORCH) for name in needed)
    return Library(Path(path), needed) if is_extension else None


@lru_cache(maxsize=4096)
def _needed_and_digest(path: str, _changed_ns: int, _size: int) -> tuple[tuple[str, ...], str]:
    return needed_libraries(Path(path)), sha256(Path(path).read_bytes()).hexdigest()


def needed_libraries(path: Path) -> tuple[str, ...]:
    """Return the names of the libraries that a 64-bit ELF file needs. Empty for other files."""
    try:
        with path.open("rb") as file:
            return tuple(_read_needed(file))
    except (OSError, struct.error, ValueError):
        return ()


def _read_needed(file: Any) -> Iterator[str]:
    head = file.read(64)
    if head[:5] != b"\x7fELF\x02":
        return
    order = "<" if head[5] == 1 else ">"
    (start,) = struct.unpack_from(f"{order}Q", head, 32)
    size, count = struct.unpack_from(f"{order}HH", head, 54)
    file.seek(start)
    table = file.read(size * count)
    loads, dynamic = [], b""
    for at in range(count):
        kind, _, offset, address, _, length = struct.unpack_from(f"{order}IIQQQQ", table, at * size)
        if kind == _PT_LOAD:
            loads.append((address, length, offset))
        elif kind == _PT_DYNAMIC:
            file.seek(offset)
            dynamic = file.read(length)
    entries = list(struct.iter_unpack(f"{order}qQ", dynamic[: len(dynamic) // 16 * 16]))
    strings = next((value for tag, value in entries if tag == _DT_STRTAB), 0)
    for address, length, offset in loads:
        if address <= strings < address + length:
            for tag, value in entries:
                if tag == _DT_NEEDED:
                    file.seek(offset + strings - address + value)
                    yield file.read(256).split(b"\0", 1)[0].decode()
            return
