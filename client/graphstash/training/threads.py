"""Threads beside the training thread: worker pools, and an executor of device work.

    with WorkerPool("checkpoint") as pool:
        written = pool.submit(write, state)     # waits only while `capacity` others wait
        written.result()

    with DeviceExecutor(depth=2) as device:     # in order, at most `depth` steps ahead
        for batch in loader:
            loss = device.submit(step, batch)   # returns at once: the next batch is prepared
        print(loss.result())

While a step runs, the submitting thread loads, converts and logs. Threads share the interpreter
lock: what overlaps is the time that either side spends outside of it (one long product, a graph,
reading files). Hundreds of small eager operations beside a busy Python loop gain nothing: each
releases the lock and has to wait for it.

A submission is finished when its callable has returned. One that only queues work on a device, as
JAX and CUDA do, bounds memory only if it waits for an earlier step before it returns.

    GraphstashError
    └── ExecutorError          a call that would wait for itself
        ├── ExecutorClosed     closed, or made in the parent process before a fork
        └── ExecutorStopped    not run, because an earlier submission failed: its `__cause__`
"""

import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from graphstash.errors import ConfigError, GraphstashError

__all__ = [
    "DeviceExecutor",
    "DeviceFuture",
    "ExecutorClosed",
    "ExecutorError",
    "ExecutorStopped",
    "WorkerPool",
]

_log = logging.getLogger("graphstash")
_T = TypeVar("_T")


class ExecutorError(GraphstashError, RuntimeError):
    """A call that would wait for itself."""


class ExecutorClosed(ExecutorError):  # noqa: N818 - a state, as in queue.Full
    """The executor was closed before this could run."""


class ExecutorStopped(ExecutorError):  # noqa: N818 - a state
    """Not run, because an earlier submission failed; that failure is the `__cause__`."""


class DeviceFuture(Generic[_T]):
    """The result of a submission; as an argument of another submission it stands for its result.

    Only its holder keeps the result alive.

    Args:
        future: of the submitted call.
        executor: name of the executor, for messages.
        before_waiting: raises where this thread would wait for itself.
        on_read: called with a failure once it was read.
    """

    def __init__(
        self,
        future: Future[_T],
        *,
        executor: str,
        before_waiting: Callable[[], None],
        on_read: Callable[[BaseException], None],
    ) -> None:
        self._future = future
        self._executor = executor
        self._before_waiting = before_waiting
        self._on_read = on_read

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
            self._before_waiting()
        try:
            error = self._future.exception(timeout)
        except CancelledError:
            return ExecutorClosed(f"{self._executor!r} was closed and dropped this submission")
        if error is not None:
            self._on_read(error)
        return error


def resolve(value: Any) -> Any:
    """The value with results in place of futures; the same object if it has none."""
    if isinstance(value, DeviceFuture):
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


class WorkerPool:
    """Runs calls on a few threads, begun in order of submission.

    A failure that was not read is raised by the next `submit` or by `close`, or logged at exit if
    neither is called. A job that forgets `close` can still end: the interpreter runs what waits
    before it calls exit handlers, torch_xla's among them.

    Args:
        name: prefix of the threads' names.
        workers: how many threads, 1 or more; they start with the first submissions.
        capacity: how many submissions may wait for a thread, 0 or more.
    """

    _stops_at_failure: ClassVar[bool] = False

    def __init__(self, name: str, *, workers: int = 1, capacity: int = 8) -> None:
        if workers < 1:
            raise ConfigError(f"workers must be at least 1 (got {workers})")
        if capacity < 0:
            raise ConfigError(f"capacity must be at least 0 (got {capacity})")
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._stopped_by: BaseException | None = None
        self._unread: dict[int, BaseException] = {}
        self._members: set[int] = set()
        self._numbers = itertools.count(1)
        self._workers = workers
        self._slots = threading.Semaphore(workers + capacity)
        self._threads = ThreadPoolExecutor(
            workers, thread_name_prefix=name, initializer=_begin, initargs=(self._members,)
        )
        weakref.finalize(self, _report, name, self._pid, self._unread)

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> DeviceFuture[_T]:
        """Queues a call; waits while there is no room for it.

        Futures among the arguments, also inside tuples, lists and dicts, are replaced by their
        results on the worker's thread, which waits for those of other pools.

        Raises:
            BaseException: a failure that stopped the run, or that was not read yet.
            ExecutorError: called from a thread of this pool, which might wait for itself.
            ExecutorClosed: the pool is closed, or belongs to the parent process.
        """
        self._require_other_thread(waits=False)
        self._slots.acquire()
        call = [(function, args, kwargs)]
        del args, kwargs
        try:
            self._require_open()
            future = self._threads.submit(self._run, next(self._numbers), call)
        except BaseException:
            call.clear()  # where no thread could be started, it is queued all the same
            self._slots.release()
            raise
        slots = self._slots
        future.add_done_callback(lambda _: slots.release())
        return DeviceFuture(
            future,
            executor=self.name,
            before_waiting=partial(self._require_other_thread, waits=True),
            on_read=self._mark_read,
        )

    def close(self, *, cancel: bool = False) -> None:
        """Waits for all that was submitted and ends the threads; may be called again.

        Args:
            cancel: drop what has not begun, and wait only for what runs.

        Raises:
            BaseException: the first unread failure; its notes name the others.
        """
        failure = self._shut_down(cancel=cancel)
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        """Closes; after an exception, which propagates, drops what has not begun."""
        if error is None:
            self.close()
        elif (failure := self._shut_down(cancel=True)) is not None:
            error.add_note(f"{self.name!r} failed as well: {failure!r}")

    def _run(self, number: int, call: list[tuple[Callable[..., _T], Any, Any]]) -> _T:
        if self._stopped_by is not None:
            call.clear()
            raise ExecutorStopped(
                f"submission {number} to {self.name!r} was not run because an earlier one failed:"
                f" {self._stopped_by!r}"
            ) from self._stopped_by
        function, args, kwargs = call.pop()  # from here on only this frame holds the arguments
        try:
            return function(*resolve(args), **resolve(kwargs))
        except BaseException as error:
            self._unread[id(error)] = error
            if self._stops_at_failure:
                self._stopped_by = error
            raise

    def _require_other_thread(self, *, waits: bool) -> None:
        """Raises where this thread would wait for itself, or for one that a fork left behind."""
        if os.getpid() != self._pid:
            raise ExecutorClosed(
                f"the threads of {self.name!r} are in process {self._pid}; "
                "create another in this one"
            )
        # A worker may wait for its colleagues: what they run was submitted before.
        if threading.get_ident() in self._members and not (waits and self._workers > 1):
            raise ExecutorError(
                f"{self.name!r} would wait for itself: this is one of its threads;"
                " submit and wait outside of submitted callables"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ExecutorClosed(f"{self.name!r} is closed; submit before close()")
        for error in list(self._unread.values()):
            self._mark_read(error)
            raise error
        if self._stopped_by is not None:
            raise self._stopped_by

    def _mark_read(self, error: BaseException) -> None:
        for one in (error, error.__cause__):
            self._unread.pop(id(one), None)

    def _shut_down(self, *, cancel: bool) -> BaseException | None:
        """The first unread failure."""
        if os.getpid() != self._pid:
            return None
        self._require_other_thread(waits=False)
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=cancel)
        failures = list(self._unread.values())
        self._unread.clear()
        self._members.clear()  # the system gives numbers of ended threads to new ones
        for other in failures[1:]:
            failures[0].add_note(f"another failure of {self.name!r}: {other!r}")
        return failures[0] if failures else None


def _begin(members: set[int]) -> None:
    """A thread's first act."""
    members.add(threading.get_ident())
    # torch gives a thread the process's number of OpenMP threads when the thread asks for it, not
    # when it multiplies: until then each product may use every core, thirty times slower on busy
    # ones, and round otherwise than in the main thread.
    if (torch := sys.modules.get("torch")) is not None:
        torch.get_num_threads()


def _report(name: str, pid: int, unread: dict[int, BaseException]) -> None:
    """Runs when the pool is gone, or at exit."""
    for error in list(unread.values()) if os.getpid() == pid else ():
        _log.error("unhandled error in %r", name, exc_info=error)


class DeviceExecutor(WorkerPool):
    """A pool of one thread, whose first failure stops the run.

    What is queued behind a failed submission is not run: its result is a `GraphstashError` caused
    by the failure. `submit` raises the failure itself from then on, so no training step follows
    one that went wrong.

    Args:
        name: of the device; the thread's name begins with it.
        depth: how many submissions may be unfinished, 1 or more. So many inputs are alive, and the
            one that waits for room.
    """

    _stops_at_failure: ClassVar[bool] = True

    def __init__(self, name: str = "device", *, depth: int = 2) -> None:
        if depth < 1:
            raise ConfigError(f"depth must be at least 1 (got {depth})")
        super().__init__(name, workers=1, capacity=depth - 1)
