r"""The files of one complete Triton kernel, and their form in an artifact.

Triton writes a file `<name>.<stage>` for every stage of its compiler, then `<name>.json` with
metadata, and finally `__grp__<name>.json`, which lists these files. Triton does not check the
files: it raises for a truncated `<name>.json`, and loads a truncated cubin. So one artifact holds
all files, and they are checked before the upload and after the download:

    "graphstash-triton\1"  u32(number of files)
    then for every file, sorted by name:  u16(len(name)) u64(len(content)) name content

Numbers are big-endian, names are UTF-8. Equal files make equal bytes, and `unpack` refuses any
other form. The contents need no checksum, because the envelope has one.
"""

import base64
import json
import re
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = [
    "GROUP_PREFIX",
    "MAX_FILES",
    "ArchiveError",
    "KernelError",
    "group_file",
    "pack",
    "pack_kernel",
    "unpack",
    "unpack_kernel",
]

GROUP_PREFIX: Final = "__grp__"
"""Prefix of the file that lists a kernel's files. Triton calls these files a group."""

_BINARY: Final = {"cuda": "cubin", "hip": "hsaco"}
"""The stage that Triton loads, by backend. Kernels of other backends are not shared: code for CPUs
depends on features of the host that Triton's key does not cover.
"""

_STAGE: Final = re.compile(r"(?a:[a-z]\w{0,15})")

_HOST_CODE: Final = frozenset({"so", "o", "a", "dll", "dylib", "pyd"})
"""Stages that the C compiler builds for the C library of one host."""

MAX_FILES: Final = 64
"""Maximum number of files in an archive. A kernel has about eight."""

_MAGIC: Final = b"graphstash-triton\1"
_COUNT: Final = struct.Struct(">I")
_SIZES: Final = struct.Struct(">HQ")
_MAX_NAME_BYTES: Final = 255  # NAME_MAX of <linux/limits.h>


class KernelError(ValueError):
    """The files are incomplete or must not be shared."""


class ArchiveError(KernelError):
    """The bytes are not a valid archive, or an archive cannot hold the files."""


def group_file(children: Iterable[str]) -> bytes:
    """Return the list of a kernel's files, only names, as Triton's `RemoteCacheManager` does."""
    return json.dumps({"child_paths": sorted(children)}).encode()


def pack_kernel(group: str, children: Mapping[str, bytes], *, key: str) -> bytes:
    """Return the payload of an artifact, or raise KernelError.

    Args:
        group: the name of the group, `<name>.json`.
        children: contents of its files, by name.
        key: Triton's key of the kernel, which is the name of its directory.
    """
    _check(group, children, key=key)
    return pack({**children, GROUP_PREFIX + group: group_file(children)})


def unpack_kernel(group: str, payload: bytes, *, key: str) -> dict[str, bytes]:
    """Return the `children` that `pack_kernel` packed into a payload, or raise KernelError."""
    children = unpack(payload)
    listed = children.pop(GROUP_PREFIX + group, None)
    if listed is None or listed != group_file(children):
        raise KernelError(f"the list of {group} does not name the files that are there")
    _check(group, children, key=key)
    return children


def _check(group: str, children: Mapping[str, bytes], *, key: str) -> None:
    stem = group.removesuffix(".json")
    for name in children:
        stage = name.removeprefix(f"{stem}.")
        if stage == name or not _STAGE.fullmatch(stage):
            raise KernelError(f"{name!r} is not a file of {group!r}")
        if stage in _HOST_CODE:
            raise KernelError(f"{name!r} is code of the host that built it")
    if group not in children:
        raise KernelError(f"{group!r} is missing")
    metadata = _metadata(children[group])
    binary = f"{stem}.{_binary_stage(metadata)}"
    if not children.get(binary):
        raise KernelError(f"{binary!r} is missing")
    for name, content in children.items():
        if name != binary:
            _check_text(name, content)  # Triton reads it as text when it loads the kernel
    if metadata.get("ir_override"):
        raise KernelError("a file of the user took the place of a stage, and no key knows of it")
    if metadata.get("hash") is not None and not _is_key(metadata["hash"], key):
        raise KernelError("another kernel")


def _metadata(content: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise KernelError(f"the description is not JSON: {error}") from None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise KernelError("the description names no kernel")
    return metadata


def _binary_stage(metadata: Mapping[str, Any]) -> str:
    target = metadata.get("target")
    if not isinstance(target, dict) or not {"backend", "arch", "warp_size"} <= target.keys():
        raise KernelError("the description names no target")
    stage = _BINARY.get(str(target["backend"]))
    if stage is None:
        raise KernelError(f"kernels for {target['backend']!r} are not shared")
    return stage


def _check_text(name: str, content: bytes) -> None:
    try:
        content.decode()
    except UnicodeDecodeError:
        raise KernelError(f"{name!r} is not text") from None


def _is_key(hexadecimal: object, key: str) -> bool:
    """Return whether a key is the kernel's hash, in hexadecimal (up to Triton 3.1) or in base32."""
    try:
        raw = bytes.fromhex(str(hexadecimal))
    except ValueError:
        return False
    return key in {raw.hex(), base64.b32encode(raw).decode().rstrip("=")}


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of 1 to `MAX_FILES` files by plain name. Raise ArchiveError for others."""
    if not 1 <= len(files) <= MAX_FILES:
        raise ArchiveError(f"{len(files)} files; expected 1 to {MAX_FILES}")
    encoded = sorted((_encoded(name), content) for name, content in files.items())
    pieces = [_MAGIC, _COUNT.pack(len(encoded))]
    for name, content in encoded:
        pieces += (_SIZES.pack(len(name), len(content)), name, content)
    return b"".join(pieces)


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the files of an archive by name. Raise ArchiveError unless `pack` made the archive."""
    read = _Reader(archive)
    if read.take(len(_MAGIC)) != _MAGIC:
        raise ArchiveError("not an archive of Triton files")
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
    _check_name(encoded)
    return encoded


def _decoded(name: bytes) -> str:
    _check_name(name)
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ArchiveError(f"{name!r} is not UTF-8") from None


def _check_name(name: bytes) -> None:
    """Refuse names that could lead out of the directory into which the files are written."""
    if not 1 <= len(name) <= _MAX_NAME_BYTES:
        raise ArchiveError(f"a name of {len(name)} bytes")
    if name in {b".", b".."} or any(byte < 0x20 or byte in b"/\\\x7f" for byte in name):
        raise ArchiveError(f"{name!r} is not a file name")
