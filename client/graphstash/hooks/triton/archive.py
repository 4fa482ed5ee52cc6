r"""The payload of a `triton` artifact: the files of one kernel, one after the other.

    "graphstash-triton\1"  u32(number of files)
    then for every file, sorted by name:  u16(len(name)) u64(len(content)) name content

Numbers are big-endian, names are UTF-8. The same files always make the same bytes, and of every
archive there is one form only: whatever is not exactly that is refused as a whole. The contents
need no checksum here, the envelope around the payload has one.
"""

import struct
from collections.abc import Mapping
from typing import Final

__all__ = ["MAX_FILES", "ArchiveError", "pack", "unpack"]

MAX_FILES: Final = 64
"""Most files in one archive; a kernel has about eight."""

_MAGIC: Final = b"graphstash-triton\1"
_COUNT: Final = struct.Struct(">I")
_SIZES: Final = struct.Struct(">HQ")
_LONGEST_NAME_BYTES: Final = 255  # NAME_MAX of <linux/limits.h>


class ArchiveError(ValueError):
    """Not an archive, or not one that may be unpacked; the message says why."""


def pack(files: Mapping[str, bytes]) -> bytes:
    """Makes an archive.

    Args:
        files: contents by file name; 1 to `MAX_FILES`.

    Raises:
        ArchiveError: a name is more than a file name, or there are too many files.
    """
    if not 1 <= len(files) <= MAX_FILES:
        raise ArchiveError(f"{len(files)} files; expected 1 to {MAX_FILES}")
    encoded = sorted((_encoded(name), content) for name, content in files.items())
    pieces = [_MAGIC, _COUNT.pack(len(encoded))]
    for name, content in encoded:
        pieces += (_SIZES.pack(len(name), len(content)), name, content)
    return b"".join(pieces)


def unpack(archive: bytes) -> dict[str, bytes]:
    """The files of an archive, by name.

    Raises:
        ArchiveError: the bytes are not what `pack` makes.
    """
    read = _Reader(archive)
    if read.take(len(_MAGIC)) != _MAGIC:
        raise ArchiveError("no archive of Triton files")
    (count,) = _COUNT.unpack(read.take(_COUNT.size))
    if not 1 <= count <= MAX_FILES:
        raise ArchiveError(f"{count} files; expected 1 to {MAX_FILES}")
    files: dict[str, bytes] = {}
    before = b""
    for _ in range(count):
        name_bytes, content_bytes = _SIZES.unpack(read.take(_SIZES.size))
        name = read.take(name_bytes)
        if name <= before:  # sorted, so no name comes twice
            raise ArchiveError(f"{name!r} behind {before!r}")
        before = name
        files[_decoded(name)] = read.take(content_bytes)
    if not read.is_at_end:
        raise ArchiveError("there is more behind the last file")
    return files


class _Reader:
    def __init__(self, archive: bytes) -> None:
        self._archive = archive
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._archive)

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._archive):
            raise ArchiveError(f"{len(self._archive)} bytes; at least {end} expected")
        taken, self._at = self._archive[self._at : end], end
        return taken


def _encoded(name: str) -> bytes:
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        raise ArchiveError(f"{name!r} is not UTF-8") from None
    _check(encoded)
    return encoded


def _decoded(name: bytes) -> str:
    _check(name)
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ArchiveError(f"{name!r} is not UTF-8") from None


def _check(name: bytes) -> None:
    """A name is joined to a directory later, so nothing in it may lead out of there."""
    if not 1 <= len(name) <= _LONGEST_NAME_BYTES:
        raise ArchiveError(f"a name of {len(name)} bytes")
    if name in {b".", b".."} or any(byte < 0x20 or byte in b"/\\\x7f" for byte in name):
        raise ArchiveError(f"{name!r} is not a file name")
