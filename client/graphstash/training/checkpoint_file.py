"""A checkpoint's file: complete or absent, and without code.

It has its name only when all of it is on the disk: it is written under another name, brought to the
disk and then renamed. Its writer holds a lock on it until then, so that what a killed process has
left can be told from what is being written.

The format is that of `torch.save`, a zip archive with a checksum for every tensor, which
`torch.load` does not check.
"""

import fcntl
import os
import uuid
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch.utils.serialization import config

__all__ = ["read", "remove_leftovers", "write"]

_FORMAT: Final = 1


def write(path: Path, step: int, state: dict[str, Any]) -> None:
    """Writes a file or leaves what there was; on the disk when this returns.

    Raises:
        Exception: what the disk and torch raise.
    """
    temporary, file = _create(path)
    try:
        # Not a path: torch would not notice a disk that is too full for the last bytes.
        with file:
            with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
                torch.save({"format": _FORMAT, "step": step, "state": state}, file)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: Path, step: int) -> dict[str, Any]:
    """The state that was written; its tensors are on the host.

    Raises:
        Exception: the file is damaged, of another format, or has more than plain data.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"its part {damaged} is damaged")
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content["format"] != _FORMAT:
        raise ValueError(f"its format is {content['format']}, this version reads {_FORMAT}")
    if content["step"] != step:
        raise ValueError(f"it was saved after step {content['step']}")
    state: dict[str, Any] = content["state"]
    return state


def remove_leftovers(directory: Path) -> None:
    """Removes what killed processes have not written to its end."""
    for path in directory.glob(".step-*.tmp"):
        with suppress(OSError), path.open("r+b") as file:  # where locks do not work, it stays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, locked where the file system can."""
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        file = temporary.open("xb")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, file
        file.close()  # another process took it for a leftover before it was locked
