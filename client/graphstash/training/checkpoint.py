"""Checkpoints: a directory of atomic checkpoints, written while training goes on.

    with Checkpoints("runs/7") as checkpoints:
        if (last := checkpoints.load()) is not None:
            restore(last.state)
        ...
        checkpoints.save(step, {"model": model.state_dict(), ...})

Whatever ends the process, the newest checkpoint is complete; what was being written is removed by
the next `load`.

In a job of several processes the first one saves and all of them load.

    GraphstashError
    └── CheckpointError        it could not be written, or none of those that exist can be read
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from graphstash._errors import ConfigError, GraphstashError
from graphstash.training.checkpoint_file import read, remove_leftovers, write
from graphstash.training.placeholder import Placeholder
from graphstash.training.snapshot import to_host
from graphstash.training.workers import WorkerPool

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints"]

_log = logging.getLogger("graphstash")
_NAME: Final = re.compile(r"step-(\d{8,})\.pt")


class CheckpointError(GraphstashError, RuntimeError):
    """A checkpoint could not be written, or none of those that exist can be read."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was saved after a step; its tensors are on the host."""

    step: int
    state: dict[str, Any]
    path: Path


class Checkpoints:
    """The checkpoints of one run. Other files in the directory are left alone.

    Args:
        directory: is made if need be.
        keep: how many stay, 1 or more.

    Raises:
        ConfigError: `keep` is out of its range, or the directory cannot be used.
    """

    def __init__(self, directory: Path | str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}, the least is 1: the newest checkpoint stays")
        self.directory = Path(directory)
        self._keep = keep
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.directory} cannot hold checkpoints: {error.strerror}; name a directory "
                "that exists or can be made"
            ) from error
        self._pool = WorkerPool("checkpoint", capacity=0)

    def save(self, step: int, state: Mapping[str, Any]) -> Placeholder[Path]:
        """Copies the state to the host and has the copy written; the next step may begin.

        Waits first for the checkpoint that is being written: there is one copy at a time.

        Args:
            step: after which the state is that, 0 or more.
            state: see `to_host`.

        Returns:
            The checkpoint's path, once it is on the disk.

        Raises:
            CheckpointError: an earlier one could not be written.
            ConfigError: the state has something that a checkpoint does not hold.
        """
        if step < 0:
            raise ConfigError(f"step is {step}, the least is 0: nothing is trained yet")
        self.wait()
        return self._pool.submit(self._write, step, to_host(state))

    def wait(self) -> None:
        """Waits until nothing is being written.

        Raises:
            CheckpointError: it could not be written, and nobody has read that yet.
        """
        self._pool.submit(int).result()  # waits for room, and there is only room for one

    def close(self) -> None:
        """Waits and ends the thread; may be called again.

        Raises:
            CheckpointError: the last one could not be written, and nobody has read that yet.
        """
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Closes; an exception goes on, with what has begun written to its end."""
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def load(self) -> Checkpoint | None:
        """The newest checkpoint that can be read; None if there is none.

        Passes over damaged ones with a warning, and removes what killed processes have left.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be read.
        """
        remove_leftovers(self.directory)
        checkpoints = self._checkpoints()
        failure: Exception | None = None
        for step in sorted(checkpoints, reverse=True):
            path = checkpoints[step]
            try:
                return Checkpoint(step, read(path, step), path)
            except FileNotFoundError:
                continue  # another process has removed it since
            except Exception as error:  # noqa: BLE001 - whatever damage makes its readers raise
                _log.warning("checkpoint %s cannot be read, so an older one is: %s", path, error)
                failure = failure or error
        if failure is not None:
            raise CheckpointError(
                f"none of the {len(checkpoints)} checkpoints in {self.directory} can be read, the "
                f"newest because of: {failure}; to begin anew, move them away"
            ) from failure
        return None

    def _checkpoints(self) -> dict[int, Path]:
        """The paths by step."""
        matches = ((path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir())
        return {int(match[1]): path for path, match in matches if match}

    def _write(self, step: int, state: dict[str, Any]) -> Path:
        path = self.directory / f"step-{step:08}.pt"
        try:
            write(path, step, state)
            # Those of later steps are damaged, or of a future that is trained once more.
            earlier = sorted(item for item in self._checkpoints().items() if item[0] <= step)
            for _, old in earlier[: -self._keep]:
                old.unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - a thread's outermost frame
            cause: BaseException = error
            while cause.__context__ is not None:  # after the disk, torch's file writer fails too
                cause = cause.__context__
            raise CheckpointError(
                f"the checkpoint {path} could not be written: {cause}; earlier ones are intact: "
                "make room or choose another directory, and start again to go on from the newest"
            ) from cause
        return path
