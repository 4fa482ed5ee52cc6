"""Checkpoints: a directory of atomic checkpoints, written while training continues.

    with Checkpoints("runs/7") as checkpoints:
        if (last := checkpoints.load()) is not None:
            restore(last.state)
        ...
        checkpoints.save(step, {"model": model.state_dict(), ...})

The newest checkpoint is complete, however the process ends. The writer writes to a temporary file,
syncs it, and then renames it. It holds a lock on the file until the rename, so the next `load` can
remove files of killed processes and leave files that are still being written.

The format is that of `torch.save`: a zip archive with a checksum for every tensor, which
`torch.load` does not check but `load` does. It holds plain data and no code.

In a job of several processes, the first process saves and all processes load.

    GraphstashError
    └── CheckpointError        writing failed, or no existing checkpoint can be read
"""

import copy
import fcntl
import logging
import os
import re
import uuid
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

import torch
from torch import Tensor, nn
from torch.utils.serialization import config

from graphstash.errors import ConfigError, GraphstashError
from graphstash.training.device import torch_xla_functions
from graphstash.training.sharding import full, is_sharded
from graphstash.training.threads import DeviceFuture, WorkerPool

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "to_host", "whole"]

_log = logging.getLogger("graphstash")
_NAME: Final = re.compile(r"step-(\d{8,})\.pt")
_FORMAT: Final = 1
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_DICTIONARIES: Final = (dict, OrderedDict, Counter)


def write(path: Path, step: int, state: dict[str, Any]) -> None:
    """Write a file and sync it to disk, or leave the old file.

    Raises:
        Exception: any error of the disk or of torch.
    """
    temporary, file = _create(path)
    try:
        # Given a path, torch would not detect that the disk is too full for the last bytes.
        with file:
            with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined] # made by torch
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
    """Return the written state, with its tensors on the host.

    Raises:
        Exception: the file is damaged, of another format, or contains more than plain data.
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
    """Remove incomplete files of killed processes."""
    for path in directory.glob(".step-*.tmp"):
        with suppress(OSError), path.open("r+b") as file:  # without working locks, the file stays
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _create(path: Path) -> tuple[Path, BinaryIO]:
    """Create a file beside `path`, locked if the file system supports locks."""
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        file = temporary.open("xb")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if temporary.exists():
            return temporary, file
        file.close()  # another process removed it as a leftover before it was locked


def to_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state to the host, including tensors that are there already.

    On torch_xla, one transfer copies all tensors. It records nothing, and executes nothing after
    `torch_xla.sync()`. Tensors that share memory share it in the copy.

    Args:
        state: tensors, numbers, strings, bytes and None, in lists, tuples and dictionaries, as
            `torch.load(weights_only=True)` accepts. NumPy numbers become Python numbers.

    Raises:
        ConfigError: the state contains anything else; the message says where.
    """
    tensors: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            raise ConfigError(
                "the state has a sharded tensor (DTensor), of which this process has a part; call "
                "full_tensor() in every process, or save with torch.distributed.checkpoint"
            )
        tensors[id(tensor)] = tensor
        return tensor

    plain = _map(collect, dict(state), "state")
    copies = dict(zip(tensors, _copies(list(tensors.values())), strict=True))
    copied: dict[str, Any] = _map(lambda tensor: copies[id(tensor)], plain, "state")
    return copied


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with its DTensors gathered whole on the host; every process calls it."""

    def gathered(tensor: Tensor) -> Tensor:
        return full(tensor).cpu() if is_sharded(tensor) else tensor

    gathered_state: dict[str, Any] = _map(gathered, dict(state), "state")
    return gathered_state


def _map(function: Callable[[Tensor], Tensor], value: Any, place: str) -> Any:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter or (isinstance(value, Tensor) and is_sharded(value)):
        return function(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(_map(function, part, f"{place}[{i}]") for i, part in enumerate(value))
    if kind in _DICTIONARIES:
        new = copy.copy(value)
        for key, part in value.items():
            if _map(function, key, f"a key of {place}") is not key:
                raise ConfigError(f"{key!r}, a key of {place}, is a tensor: use a string")
            new[key] = _map(function, part, f"{place}[{key!r}]")
        if kind is OrderedDict:  # a module's state dictionary keeps versions in an attribute
            vars(new).update(_map(function, vars(value), place))
        return new
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, "
        "strings, lists, tuples and dictionaries, for it must not run code when it is loaded: "
        "convert it in state_dict() and back in load_state_dict()"
    )


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    on_xla = [tensor for tensor in tensors if tensor.device.type == "xla"]
    from_xla = iter(torch_xla_functions()._xla_get_cpu_tensors(on_xla) if on_xla else ())
    copies: list[Tensor] = []
    same: dict[Hashable, Tensor] = {}
    for tensor in tensors:
        if tensor.device.type == "xla":
            copies.append(next(from_xla))
            continue
        place = _place(tensor)
        if place not in same:
            same[place] = tensor.detach().to("cpu", copy=True)
        copies.append(same[place])
    return copies


def _place(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors of the same memory."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor)
    address = tensor.data_ptr()
    return address, tensor.device, tensor.dtype, tensor.shape, tensor.stride()


class CheckpointError(GraphstashError, RuntimeError):
    """A checkpoint could not be written, or no existing checkpoint can be read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The saved state of a step, with its tensors on the host."""

    step: int
    state: dict[str, Any]
    path: Path


class Checkpoints:
    """The checkpoints of one run. Other files in the directory are not touched.

    Args:
        directory: created if it does not exist.
        keep: number of checkpoints to keep, 1 or more.

    Raises:
        ConfigError: `keep` is out of its range, or the directory cannot be used.
    """

    def __init__(self, directory: Path | str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1 (got {keep})")
        self.directory = Path(directory)
        self._keep = keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.directory} cannot hold checkpoints: {error.strerror}; name a directory "
                "that exists or can be created"
            ) from error
        self._pool = WorkerPool("checkpoint", capacity=0)

    def save(self, step: int, state: Mapping[str, Any]) -> DeviceFuture[Path]:
        """Copy the state to the host and write it in a thread; the next step may begin.

        First waits for a checkpoint that is being written, so there is only one copy at a time.

        Args:
            step: number of the completed step, 0 or more.
            state: see `to_host`.

        Returns:
            The checkpoint's path, available once it is on disk.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
            ConfigError: the state contains a value that a checkpoint cannot hold.
        """
        if step < 0:
            raise ConfigError(f"step must be at least 0 (got {step})")
        self.wait()
        return self._pool.submit(self._write, step, to_host(state))

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: writing failed, and the error was not raised yet.
        """
        self._pool.submit(int).result()  # waits for room; the pool has room for one call

    def close(self) -> None:
        """Wait for the writer and end its thread; may be called again.

        Raises:
            CheckpointError: the last write failed, and the error was not raised yet.
        """
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Close after completing the write; an exception propagates."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def load(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be read, or None if there is none.

        Skips damaged checkpoints with a warning, and removes incomplete files of killed processes.

        Raises:
            CheckpointError: checkpoints exist, but none can be read.
        """
        remove_leftovers(self.directory)
        checkpoints = self._checkpoints()
        failure: Exception | None = None
        for step in sorted(checkpoints, reverse=True):
            path = checkpoints[step]
            try:
                return Checkpoint(step, read(path, step), path)
            except FileNotFoundError:
                continue  # another process has removed it
            except Exception as error:  # noqa: BLE001 - a damaged file may raise anything
                _log.warning("cannot read checkpoint %s, trying an older one: %s", path, error)
                failure = failure or error
        if failure is not None:
            raise CheckpointError(
                f"none of the {len(checkpoints)} checkpoints in {self.directory} can be read, the "
                f"newest because of: {failure}; to start from the beginning, move them away"
            ) from failure
        return None

    def _checkpoints(self) -> dict[int, Path]:
        matches = ((path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir())
        return {int(match[1]): path for path, match in matches if match}

    def _write(self, step: int, state: dict[str, Any]) -> Path:
        path = self.directory / f"step-{step:08}.pt"
        try:
            write(path, step, state)
            # Keep checkpoints of later steps: they are damaged, or this run will overwrite them.
            earlier = sorted(item for item in self._checkpoints().items() if item[0] <= step)
            for _, old in earlier[: -self._keep]:
                old.unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame
            cause: BaseException = error
            while cause.__context__ is not None:  # torch's file writer fails after the disk fails
                cause = cause.__context__
            raise CheckpointError(
                f"the checkpoint {path} could not be written: {cause}; earlier ones are intact: "
                "make room or choose another directory, and start again to resume from the newest"
            ) from cause
        return path
