"""Placeholder: stands for the result of a submitted call until it is there, and what can go wrong.

GraphstashError
└── ExecutorError          a call that would wait for itself
    ├── ExecutorClosed     closed, or made in the parent process before a fork
    └── ExecutorStopped    not run, because an earlier submission failed: its `__cause__`
"""

from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from graphstash._errors import GraphstashError

if TYPE_CHECKING:
    from graphstash.training.workers import WorkerPool

__all__ = ["ExecutorClosed", "ExecutorError", "ExecutorStopped", "Placeholder", "resolve"]

_T = TypeVar("_T")


class ExecutorError(GraphstashError, RuntimeError):
    """A call that would wait for itself."""


class ExecutorClosed(ExecutorError):  # noqa: N818 - a state, as in queue.Full
    """The executor was closed before this could run."""


class ExecutorStopped(ExecutorError):  # noqa: N818 - a state
    """Not run, because an earlier submission failed; that failure is the `__cause__`."""


class Placeholder(Generic[_T]):
    """The result of a submission; as an argument of another submission it stands for its result.

    Whoever holds it keeps the result alive, nobody else does.
    """

    def __init__(self, future: Future[_T], pool: "WorkerPool") -> None:
        self._future = future
        self._pool = pool

    def done(self) -> bool:
        """Whether the callable has returned, failed or been dropped."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> _T:
        """Waits for the result, `timeout` seconds at most.

        Raises:
            TimeoutError: the time was not enough.
            ExecutorStopped: an earlier submission failed.
            ExecutorClosed: the executor was closed and dropped it.
            BaseException: what the callable raised.
        """
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return self._future.result()
        finally:
            del error, self  # the error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits; what `result` would raise. A failure counts as read from now on."""
        if not self._future.done():
            self._pool._require_other_thread(waits=True)
        try:
            error = self._future.exception(timeout)
        except CancelledError:
            return ExecutorClosed(f"{self._pool.name!r} was closed and dropped this submission")
        if error is not None:
            self._pool._mark_read(error)
        return error


def resolve(value: Any) -> Any:
    """The value with results for placeholders; the very same object where there are none."""
    if isinstance(value, Placeholder):
        return value.result()
    if isinstance(value, dict):
        new = {key: resolve(part) for key, part in value.items()}
        return new if any(new[key] is not value[key] for key in new) else value
    if isinstance(value, tuple | list):
        parts = [resolve(part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
