"""Threads beside the training thread: one that works in the background, and one for a device.

    with WorkerPool("checkpoint") as pool:
        written = pool.submit(write, state)     # waits only if `capacity` calls are queued
        written.result()

    with DeviceExecutor(depth=2) as device:     # in order, at most `depth` steps ahead
        for batch in loader:
            loss = device.submit(step, batch)   # returns at once: the next batch is prepared
        print(loss.result())

While a step runs, the submitting thread loads, converts and logs. Threads share the interpreter
lock, so only work that releases it overlaps: one long product, a graph, reading files. Hundreds of
small eager operations beside a busy Python loop gain nothing, because each operation waits to get
the lock back.

A submission finishes when its callable returns. If the callable only queues device work, as in JAX
and CUDA, `depth` bounds memory only if the callable first waits for an earlier step.

    GraphstashError
    └── ExecutorError          the call would wait for itself, perhaps through other executors
        ├── ExecutorClosed     closed, or created in the parent process before a fork
        └── ExecutorStopped    not run because an earlier submission failed: its `__cause__`
"""

import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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
    """The executor is closed, or belongs to the parent process."""


class ExecutorStopped(ExecutorError):  # noqa: N818 - a state
    """The submission did not run because an earlier submission failed: its `__cause__`."""


class _Waits:
    """The waits without a timeout, by thread. They end unless threads wait for each other."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the threads of the parent process after a fork."""
        self._lock = threading.Lock()
        self._waits: dict[int, tuple[str, Callable[[AbstractSet[int]], bool]]] = {}

    @contextmanager
    def waiting(self, pool: str, is_stuck: Callable[[AbstractSet[int]], bool]) -> Iterator[None]:
        """Wait for a pool in this block.

        Args:
            pool: name of the pool.
            is_stuck: given threads that never go on, returns whether the wait never ends.

        Raises:
            ExecutorError: the wait would never end.
        """
        this = threading.get_ident()
        with self._lock:
            waits = self._waits | {this: (pool, is_stuck)}
            stuck = set(waits)
            while free := {each for each in stuck if not waits[each][1](stuck)}:
                stuck -= free
            if this in stuck:
                names = ", ".join(sorted({repr(waits[each][0]) for each in stuck}))
                raise ExecutorError(
                    f"{threading.current_thread().name!r} would wait for itself: calls of {names} "
                    "would wait for each other; submit and wait outside of submitted callables"
                )
            self._waits = waits
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(this, None)


_waits = _Waits()
os.register_at_fork(after_in_child=_waits.forget)


class DeviceFuture(Generic[_T]):
    """The result of a submission. As an argument of another submission, it stands for its result.

    Nothing but this future keeps the result alive.
    """

    def __init__(self, future: Future[_T], pool: "WorkerPool") -> None:
        self._future = future
        self._pool = pool

    def done(self) -> bool:
        """Return whether the callable has returned or raised, or will not run."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> _T:
        """Wait for the result, at most `timeout` seconds.

        Raises:
            TimeoutError: the result was not available in time.
            ExecutorStopped: an earlier submission failed.
            ExecutorClosed: the executor was closed and dropped the submission.
            BaseException: the exception that the callable raised.
        """
        error = self.exception(timeout)
        try:
            if error is not None:
                raise error
            return self._future.result()
        finally:
            del error, self  # the error's traceback refers to this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that `result` would raise, which then counts as read."""
        is_bounded = timeout is not None or self._future.done()
        if not self._future.done():
            self._pool._require_other_thread()
        try:
            with nullcontext() if is_bounded else _waits.waiting(self._pool.name, self._never_ends):
                error = self._future.exception(timeout)
        except CancelledError:
            return ExecutorClosed(f"{self._pool.name!r} was closed and dropped this submission")
        if error is not None:
            self._pool._mark_read(error)
        return error

    def _never_ends(self, stuck: AbstractSet[int]) -> bool:
        return not self._future.done() and self._pool._is_stuck(stuck)


def resolve(value: Any) -> Any:
    """Return the value with futures replaced by results; the same object if it has no futures."""
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
    """Runs calls on a thread, in order of submission.

    The next `submit` or `close` raises an unread failure. Without such a call, the failure is
    logged when the pool is garbage-collected or the process exits. A job that forgets `close` can
    still end: the interpreter runs the queued calls before exit handlers, torch_xla's included.

    Args:
        name: prefix of the thread's name. The thread starts with the first submission.
        capacity: number of submissions that may wait for the thread, 0 or more.
    """

    _stops_at_failure: ClassVar[bool] = False

    def __init__(self, name: str, *, capacity: int = 8) -> None:
        if capacity < 0:
            raise ConfigError(f"capacity must be at least 0 (got {capacity})")
        self.name = name
        self._pid = os.getpid()
        self._closed = False
        self._stopped_by: BaseException | None = None
        self._unread: dict[int, BaseException] = {}
        self._members: set[int] = set()
        """Id of the thread; empty before it starts and after it has ended."""
        self._numbers = itertools.count(1)
        self._slots = threading.Semaphore(1 + capacity)
        self._threads = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=_begin, initargs=(self._members,)
        )
        weakref.finalize(self, _report, name, self._pid, self._unread)

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> DeviceFuture[_T]:
        """Queue a call; wait while the queue is full.

        The worker's thread replaces futures among the arguments, also inside tuples, lists and
        dicts, by their results. It waits for unfinished ones.

        Raises:
            BaseException: a failure that stopped the run, or an unread failure.
            ExecutorError: called from this pool's thread, or from one for which this pool's calls
                wait while the queue is full.
            ExecutorClosed: the pool is closed, or belongs to the parent process.
        """
        self._require_other_thread()
        if not self._slots.acquire(blocking=False):
            with _waits.waiting(self.name, self._stays_full):
                self._slots.acquire()
        call = [(function, args, kwargs)]
        del args, kwargs
        try:
            self._require_open()
            number = next(self._numbers)
            future = self._threads.submit(self._run, number, call)
        except BaseException:
            call.clear()  # a call stays queued even if no thread could start
            self._slots.release()
            raise
        slots = self._slots
        future.add_done_callback(lambda _: slots.release())
        return DeviceFuture(future, self)

    def check(self) -> None:
        """Raise a failure that no call has raised yet. Do not wait for running submissions.

        Raises:
            BaseException: the first unread failure, which then counts as read.
        """
        for error in list(self._unread.values()):
            self._mark_read(error)
            raise error

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all submissions and end the thread. Idempotent.

        Args:
            cancel: drop submissions that have not started, and wait only for the running one.

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
        """Close; after an exception, drop submissions that have not started."""
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
        function, args, kwargs = call.pop()  # now only this frame holds the arguments
        try:
            return function(*resolve(args), **resolve(kwargs))
        except BaseException as error:
            self._unread[id(error)] = error
            if self._stops_at_failure:
                self._stopped_by = error
            raise

    def _require_other_thread(self) -> None:
        """Raise if this thread would wait for itself, or for a thread that a fork left behind."""
        if os.getpid() != self._pid:
            raise ExecutorClosed(
                f"the thread of {self.name!r} is in process {self._pid}; create another in this one"
            )
        if threading.get_ident() in self._members:
            raise ExecutorError(
                f"{self.name!r} would wait for itself: this is its thread; submit and wait outside "
                "of submitted callables"
            )

    def _is_stuck(self, stuck: AbstractSet[int]) -> bool:
        """Return whether the pool makes no progress if these threads never go on."""
        return not self._members.isdisjoint(stuck)

    def _stays_full(self, stuck: AbstractSet[int]) -> bool:
        if has_room := self._slots.acquire(blocking=False):
            self._slots.release()
        return not has_room and self._is_stuck(stuck)

    def _require_open(self) -> None:
        if self._closed:
            raise ExecutorClosed(f"{self.name!r} is closed; submit before close()")
        self.check()
        if self._stopped_by is not None:
            raise self._stopped_by

    def _mark_read(self, error: BaseException) -> None:
        for failure in (error, error.__cause__):
            self._unread.pop(id(failure), None)

    def _shut_down(self, *, cancel: bool) -> BaseException | None:
        if os.getpid() != self._pid:
            return None
        self._require_other_thread()
        with _waits.waiting(self.name, self._is_stuck):
            self._closed = True
            self._threads.shutdown(wait=True, cancel_futures=cancel)
        failures = list(self._unread.values())
        self._unread.clear()
        self._members.clear()  # the system reuses the ids of ended threads
        for other in failures[1:]:
            failures[0].add_note(f"another failure of {self.name!r}: {other!r}")
        return failures[0] if failures else None


def _begin(members: set[int]) -> None:
    members.add(threading.get_ident())
    # torch applies the process's number of OpenMP threads to a new thread in get_num_threads, not
    # at its first product. Until then, each product may use every core, which is thirty times
    # slower on busy cores and rounds differently from the main thread.
    if (torch := sys.modules.get("torch")) is not None:
        torch.get_num_threads()


def _report(name: str, pid: int, unread: dict[int, BaseException]) -> None:
    """Log unread failures when the pool is garbage collected, or at exit."""
    for error in list(unread.values()) if os.getpid() == pid else ():
        _log.error("unhandled error in %r", name, exc_info=error)


class DeviceExecutor(WorkerPool):
    """A thread that runs nothing after the first failure.

    Results of submissions behind the failed one raise `ExecutorStopped`, and `submit` raises the
    failure itself.

    Args:
        name: name of the device; prefix of the thread's name.
        depth: number of submissions that may be unfinished, 1 or more. Their inputs are alive, and
            the inputs of one more submission that waits for room.
    """

    _stops_at_failure: ClassVar[bool] = True

    def __init__(self, name: str = "device", *, depth: int = 2) -> None:
        if depth < 1:
            raise ConfigError(f"depth must be at least 1 (got {depth})")
        super().__init__(name, capacity=depth - 1)
