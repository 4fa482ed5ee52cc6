"""Write atomic checkpoints to a directory while training continues, and read them.

    with Checkpoints("runs/7") as checkpoints:
        if (last := checkpoints.load()) is not None:
            restore(last.state)
        ...
        checkpoints.save(step, {"model": model.state_dict(), ...})

A checkpoint is complete even if the process is killed while it writes the next one: the writer
writes a temporary file, syncs it, and then renames it. It locks the file until the rename. `load`
therefore removes temporary files of killed processes, but not files that are still being written.

The format is that of `torch.save`: a zip archive with a checksum for every tensor. `torch.load`
ignores the checksums; `load` verifies them. A checkpoint contains plain data and no code.

In a job with several processes, rank 0 saves and all ranks load. Two jobs must not save to one
directory: each would remove the other's checkpoints, and resume from them. So the process that
saves locks the directory until `close`.

    GraphstashError
    └── CheckpointError        writing failed, or no existing checkpoint can be read
"""

import copy
import errno
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

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "gather_shards", "to_host"]

_log = logging.getLogger("graphstash")
_NAME: Final = re.compile(r"step-(\d{8,})\.pt")
_FORMAT: Final = 1
_PLAIN: Final = (type(None), bool, int, float, str, bytes)
_DICTIONARIES: Final = (dict, OrderedDict, Counter)


def write(path: Path, step: int, state: dict[str, Any]) -> None:
    """Replace the file at `path` atomically, and sync it to disk.

    Raises:
        Exception: any error of the disk or of torch. If writing failed, the old file remains.
    """
    temporary, file = _create(path)
    try:
        # Given a path instead of a file, torch ignores a full disk when it writes the last bytes.
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
    """Return the state in a file, with its tensors on the host.

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
    """Remove temporary files that no process has locked."""
    for path in directory.glob(".step-*.tmp"):
        with suppress(OSError), path.open("r+b") as file:  # locked, or locks are unsupported
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
        file.close()  # another process removed it before it was locked


def to_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state to the host. Tensors that are on the host are copied too.

    Tensors with the same address, shape and strides share one copy; other views of the same memory
    do not. On torch_xla, one transfer copies all tensors. It adds nothing to the pending graph, and
    runs nothing if `torch_xla.sync()` has just run that graph.

    Args:
        state: tensors, numbers, strings, bytes and None, in lists, tuples and dictionaries, as
            `torch.load(weights_only=True)` accepts. NumPy numbers become Python numbers.

    Raises:
        ConfigError: the state contains another type. The message names its place.
    """
    tensors: dict[int, Tensor] = {}

    def collect(tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            raise ConfigError(
                "the state has a sharded tensor (DTensor), and this process has only a part: call "
                "full_tensor() in every process, or save with torch.distributed.checkpoint"
            )
        tensors[id(tensor)] = tensor
        return tensor

    plain = _map_tensors(collect, dict(state), "state")
    copies = dict(zip(tensors, _copy_to_host(list(tensors.values())), strict=True))
    copied: dict[str, Any] = _map_tensors(lambda tensor: copies[id(tensor)], plain, "state")
    return copied


def gather_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace every DTensor of a state by the full tensor on the host. All ranks must call it."""

    def gathered(tensor: Tensor) -> Tensor:
        return full(tensor).cpu() if is_sharded(tensor) else tensor

    gathered_state: dict[str, Any] = _map_tensors(gathered, dict(state), "state")
    return gathered_state


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any, place: str) -> Any:
    kind = type(value)
    if kind is Tensor or kind is nn.Parameter or (isinstance(value, Tensor) and is_sharded(value)):
        return function(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(_map_tensors(function, part, f"{place}[{i}]") for i, part in enumerate(value))
    if kind in _DICTIONARIES:
        new = copy.copy(value)
        for key, part in value.items():
            if _map_tensors(function, key, f"a key of {place}") is not key:
                raise ConfigError(f"{key!r}, a key of {place}, is a tensor: use a string")
            new[key] = _map_tensors(function, part, f"{place}[{key!r}]")
        if kind is OrderedDict:  # module.state_dict() stores versions in `_metadata`
            vars(new).update(_map_tensors(function, vars(value), place))
        return new
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ConfigError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, numbers, "
        "strings, lists, tuples and dictionaries, because loading it must not run code: convert "
        "the value in state_dict() and back in load_state_dict()"
    )


def _copy_to_host(tensors: list[Tensor]) -> list[Tensor]:
    on_xla = [tensor for tensor in tensors if tensor.device.type == "xla"]
    from_xla = iter(torch_xla_functions()._xla_get_cpu_tensors(on_xla) if on_xla else ())
    copies: list[Tensor] = []
    same: dict[Hashable, Tensor] = {}
    for tensor in tensors:
        if tensor.device.type == "xla":
            copies.append(next(from_xla))
            continue
        place = _key_of_view(tensor)
        if place not in same:
            same[place] = tensor.detach().to("cpu", copy=True)
        copies.append(same[place])
    return copies


def _key_of_view(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return id(tensor)
    address = tensor.data_ptr()
    return address, tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _unusable_directory(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{directory} cannot hold checkpoints: {error}; name a directory that can be created or "
        "written"
    )


class CheckpointError(GraphstashError, RuntimeError):
    """A checkpoint could not be written, or no existing checkpoint can be read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The saved state of a step, with its tensors on the host."""

    step: int
    state: dict[str, Any]
    path: Path


class Checkpoints:
    """The checkpoints of one run, and the file `.lock`. Other files are not touched.

    Args:
        directory: created if it does not exist.
        keep: number of newest checkpoints to keep, 1 or more. Default: 3.

    Raises:
        ConfigError: `keep` is below 1, or the directory cannot be used.
    """

    def __init__(self, directory: Path | str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1 (got {keep})")
        self.directory = Path(directory)
        self._keep = keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable_directory(self.directory, error) from error
        self._pool = WorkerPool("checkpoint", capacity=0)
        self._lock: BinaryIO | None = None

    def lock(self) -> None:
        """Let no other process save to the directory until `close`, if its file system has locks.

        `save` does this too. A killed process loses its lock. Further calls do nothing.

        Raises:
            ConfigError: another process saves to the directory, or it cannot be written.
        """
        if self._lock is not None:
            return
        try:
            file = (self.directory / ".lock").open("ab")
        except OSError as error:
            raise _unusable_directory(self.directory, error) from error
        try:
            # Not flock(): children of a killed process, such as workers of a loader, would hold
            # the lock. Other objects of this process are not refused.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EAGAIN}:
                file.close()
                raise ConfigError(
                    f"another process saves its checkpoints to {self.directory}, and each would "
                    "resume from those of the other: wait until it has ended, or name another "
                    "directory"
                ) from None
        self._lock = file

    def save(self, step: int, state: Mapping[str, Any]) -> DeviceFuture[Path]:
        """Copy the state to the host, and let a thread write it while training continues.

        First waits until the previous checkpoint is written, so the host holds only one copy. The
        returned future completes once the file is on disk.

        Args:
            step: number of the completed step, 0 or more.
            state: see `to_host`.

        Raises:
            CheckpointError: an earlier checkpoint could not be written.
            ConfigError: the state contains a value that a checkpoint cannot hold; or see `lock`.
        """
        if step < 0:
            raise ConfigError(f"step must be at least 0 (got {step})")
        self.lock()
        self.wait()
        return self._pool.submit(self._write, step, to_host(state))

    def check(self) -> None:
        """Check whether the last checkpoint has failed. Do not wait for it.

        Raises:
            CheckpointError: writing failed, and no earlier call has raised the error.
        """
        self._pool.check()

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            CheckpointError: writing failed, and no earlier call has raised the error.
        """
        self._pool.submit(int).result()  # the pool holds one call, so `submit` waits for the write

    def close(self) -> None:
        """Wait for the writer and end its thread; may be called again.

        Raises:
            CheckpointError: the last write failed, and no earlier call has raised the error.
        """
        try:
            self._pool.close()
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Close. If the body raised, add a failed write to that exception as a note."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def load(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be read, or None if there is none.

        Skips damaged checkpoints with a warning, and removes temporary files of killed processes.

        Raises:
            CheckpointError: checkpoints exist, but none can be read.
        """
        remove_leftovers(self.directory)
        checkpoints = self._paths_by_step()
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

    def _paths_by_step(self) -> dict[int, Path]:
        matches = ((path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir())
        return {int(match[1]): path for path, match in matches if match}

    def _write(self, step: int, state: dict[str, Any]) -> Path:
        path = self.directory / f"step-{step:08}.pt"
        try:
            write(path, step, state)
            # Leave out later steps, from before a restart: counting them would delete this one.
            earlier = sorted(item for item in self._paths_by_step().items() if item[0] <= step)
            for _, old in earlier[: -self._keep]:
                old.unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame
            cause: BaseException = error
            while cause.__context__ is not None:  # torch raises a second error after the disk's
                cause = cause.__context__
            raise CheckpointError(
                f"the checkpoint {path} could not be written: {cause}; earlier ones are intact: "
                "make room or choose another directory, and start again to resume from the newest"
            ) from cause
        return path
