"""Which files are one whole Triton kernel that may be handed to other hosts.

Triton writes `<name>.<stage>` for every stage of its compiler, `<name>.json` about the kernel, and
`__grp__<name>.json` last, the list of all of them. Triton believes what it finds: a truncated
`<name>.json` ends the job with an exception, a truncated cubin is loaded. So these files travel
together, and are looked through on both sides.
"""

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from graphstash.hooks.triton.archive import ArchiveError, pack, unpack

__all__ = ["GROUP_PREFIX", "KernelError", "group_file", "pack_kernel", "unpack_kernel"]

GROUP_PREFIX: Final = "__grp__"
"""What Triton puts before a group's name to name the file that lists the group."""

_BINARY: Final = {"cuda": "cubin", "hip": "hsaco"}
"""Triton's backends whose keys pin what the kernel runs on, and the stage that is loaded. Others
are not shared: what a CPU backend makes depends on more of its host than Triton's key knows."""

_STAGE: Final = re.compile(r"(?a:[a-z]\w{0,15})")

_HOST_CODE: Final = frozenset({"so", "o", "a", "dll", "dylib", "pyd"})
"""Stages that are built by the host's own C compiler, for the host's own C library."""


class KernelError(ValueError):
    """Not a whole kernel, or not one that may be shared; the message says why."""


def group_file(children: Iterable[str]) -> bytes:
    """The list of a group's files, as Triton's `RemoteCacheManager` writes it: names, no paths."""
    return json.dumps({"child_paths": sorted(children)}).encode()


def pack_kernel(group: str, children: Mapping[str, bytes], *, key: str) -> bytes:
    """Makes the payload of an artifact.

    Args:
        group: the name of the group, `<name>.json`.
        children: contents of its files, by name.
        key: Triton's key of the kernel, i.e. the name of its directory.

    Raises:
        KernelError: the files are not a whole kernel, or not one that may be shared.
    """
    _check(group, children, key=key)
    try:
        return pack({**children, GROUP_PREFIX + group: group_file(children)})
    except ArchiveError as error:
        raise KernelError(str(error)) from None


def unpack_kernel(group: str, payload: bytes, *, key: str) -> dict[str, bytes]:
    """The files of a kernel from the payload of its artifact; all of them, or an error.

    Args and errors as for `pack_kernel`.
    """
    try:
        children = unpack(payload)
    except ArchiveError as error:
        raise KernelError(str(error)) from None
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
            raise KernelError(f"{name!r} is no file of {group!r}")
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
            _text(name, content)  # Triton reads it as text when it loads the kernel
    if metadata.get("ir_override"):
        raise KernelError("a file of the user took the place of a stage, and no key knows of it")
    if metadata.get("hash") is not None and not _is_key(metadata["hash"], key):
        raise KernelError("another kernel")


def _metadata(content: bytes) -> dict[str, Any]:
    try:
        metadata = json.loads(content)
    except ValueError as error:
        raise KernelError(f"the description is no JSON: {error}") from None
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


def _text(name: str, content: bytes) -> None:
    try:
        content.decode()
    except UnicodeDecodeError:
        raise KernelError(f"{name!r} is no text") from None


def _is_key(hexadecimal: object, key: str) -> bool:
    """Whether the hash that a kernel was compiled under belongs to its directory's name.

    The name is the hash itself up to Triton 3.1, and base32 of it since.
    """
    try:
        raw = bytes.fromhex(str(hexadecimal))
    except ValueError:
        return False
    return key in {raw.hex(), base64.b32encode(raw).decode().rstrip("=")}
