"""The contents of files and directories that XLA's flags and compile options name.

Keys of compilers hash at most the names, but another file of the same name leads to another
program. A name reaches XLA by a flag, by an option of one program, or by a setting of a framework.
All of them are in the serialized `CompileOptionsProto`.
"""

import os
import re
from functools import lru_cache
from hashlib import file_digest, sha256
from os import stat_result
from pathlib import Path
from stat import S_IFMT, S_ISDIR, S_ISREG
from typing import Final

from graphstash.hooks.protobuf import NotAMessageError, fields_of, texts_in

__all__ = ["contents_of", "is_output", "option_files", "toolkits_in"]

_OUTPUT: Final = re.compile(r"cache|dump|(?:^|[-_])logs?(?:_|$)")

_UNREAD: Final = frozenset(
    f"3.3.{each}"
    for each in (
        *(109, 222, 292, 306, 310, 407),  # flags that match `_OUTPUT`
        *(110, 111, 154, 433),  # patterns of what XLA dumps
    )
)
"""Fields of `DebugOptions` that name no file to read."""

_DEBUG_OPTIONS: Final = "3.3."
"""Place of `DebugOptions`. Other fields hold numbers of devices, which may look like texts: 46 is
the text `.`, the working directory."""

_TOOLKIT: Final = ("3.3.61", "xla_gpu_cuda_data_dir")
"""Field and flag of the directory of a toolkit. `device_libraries` reads what XLA needs of it."""

_OPTIONS_BY_NAME: Final = 7
"""Field of `CompileOptionsProto` with the options of one program, by the names of flags."""

_MAX_READ_BYTES: Final = 2**28
"""Bytes in a directory above which its files are described by size and time of change."""


def is_output(flag: str) -> bool:
    """Return whether XLA writes the file that a flag names, or finds only its own results in it.

    XLA stores the fastest variants that it measured in a directory of its autotuning cache. Without
    that directory it measures again, and may choose any of them.
    """
    return bool(_OUTPUT.search(flag))


def contents_of(name: str) -> str:
    """Return a digest of a file, or of the files in a directory. Empty if `name` names neither."""
    try:
        status = os.stat(name := name.removeprefix("file://"))  # noqa: PTH116 - for every option
        path = Path(name)
        if not S_ISDIR(status.st_mode):
            return _describe_by_digest(path, status) if S_ISREG(status.st_mode) else ""
        files = [(each, _status(each)) for each in sorted(path.iterdir())]
    except (OSError, ValueError):  # most texts name no file, and one may contain a null byte
        return ""
    describe = (
        _describe_by_digest
        if sum(each.st_size for _, each in files) < _MAX_READ_BYTES
        else _describe_by_status
    )
    lines = [f"{each.name!r} {describe(each, each_status)}" for each, each_status in files]
    return sha256("\n".join(lines).encode()).hexdigest()


def option_files(options: bytes) -> dict[str, str]:
    """Return the part for the files that a serialized `CompileOptionsProto` names, if any."""
    found = [
        f"{place}={digest}"
        for place, text in _texts_of(options)
        if place not in _TOOLKIT and (digest := contents_of(text))
    ]
    return {"option_files": " ".join(sorted(found))} if found else {}


def toolkits_in(options: bytes) -> list[str]:
    """Return the directories of toolkits, CUDA's or ROCm's, that a `CompileOptionsProto` names."""
    return [text for place, text in _texts_of(options) if place in _TOOLKIT]


@lru_cache(maxsize=16)
def _texts_of(options: bytes) -> tuple[tuple[str, str], ...]:
    """Return the texts in options that may name a file to read, each with a field or a flag."""
    found = [each for each in texts_in(options) if each[0].startswith(_DEBUG_OPTIONS)]
    try:
        entries = [field.body for field in fields_of(options) if field.number == _OPTIONS_BY_NAME]
        for entry in entries:
            name, *value = fields_of(entry)
            flag = name.body.decode()
            found += [(flag, text) for each in value for _, text in texts_in(each.body)]
    except (NotAMessageError, ValueError):  # not the message that XLA's frameworks send
        pass
    is_read = (
        (place, text)
        for place, text in found
        if text.isprintable() and place not in _UNREAD and not is_output(place)
    )
    return tuple(is_read)


def _describe_by_status(_path: Path, status: stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns}"


def _status(path: Path) -> stat_result:
    """Return the status of a file, or of a link that leads to no file."""
    try:
        return path.stat()
    except OSError:
        return path.lstat()


def _describe_by_digest(path: Path, status: stat_result) -> str:
    if not S_ISREG(status.st_mode):  # reading a pipe would wait for its writer
        return f"{S_IFMT(status.st_mode):o}"
    try:
        return _digest_of(path, status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
    except OSError as error:  # a file that XLA cannot read
        return type(error).__name__


@lru_cache(maxsize=256)
def _digest_of(path: Path, *_status: int) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
