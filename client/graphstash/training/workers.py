"""Worker pool: named threads behind a queue that makes one wait; and what they hand back.

    with WorkerPool("checkpoint") as pool:
        written = pool.submit(write, state)     # waits only while `capacity` others wait
        written.result()

For what runs beside the training: reading metrics, writing checkpoints, publishing. Threads share
the interpreter lock: what overlaps is the time that either side spends outside of it.
"""

import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from graphstash._errors import ConfigError
from graphstash.training.placeholder import (
    ExecutorClosed,
    ExecutorError,
    ExecutorStopped,
    Placeholder,
    resolve,
)

__all__ = ["WorkerPool"]

_log = logging.getLogger("graphstash")
_T = TypeVar("_T")


class WorkerPool:
    """Runs calls on a few threads, begun in order of submission.

    A failure that nobody has read is raised by the next `submit` or by `close`; where neither
    comes it is logged at exit. A job that forgets `close` can still end: the interpreter runs what
    waits before it calls exit handlers, torch_xla's among them.

    Args:
        name: prefix of the threads' names.
        workers: how many threads, 1 or more; they start with the first submissions.
        capacity: how many submissions may wait for a thread, 0 or more.
    """

    _stops_at_failure: ClassVar[bool] = False

    def __init__(self, name: str, *, workers: int = 1, capacity: int = 8) -> None:
        if workers < 1:
            raise ConfigError(f"workers is {workers}, the least is 1: give {name!r} a thread")
        if capacity < 0:
            raise ConfigError(f"capacity is {capacity}, the least is 0: then nothing waits")
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

    def submit(self, function: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Placeholder[_T]:
        """Queues a call; waits while there is no room for it.

        Placeholders among the arguments, also inside of tuples, lists and dicts, are replaced by
        their results on the worker's thread, which waits for those of other pools.

        Raises:
            BaseException: a failure that stopped the run, or that nobody has read.
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
        return Placeholder(future, self)

    def close(self, *, cancel: bool = False) -> None:
        """Waits for all that was submitted and ends the threads; may be called again.

        Args:
            cancel: drop what has not begun, and wait only for what runs.

        Raises:
            BaseException: the first failure that nobody has read; its notes name the others.
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
        """Closes; an exception goes on, with what has not begun dropped."""
        if error is None:
            self.close()
        elif (failure := self._shut_down(cancel=True)) is not None:
            error.add_note(f"{self.name!r} had failed as well: {failure!r}")

    def _run(self, number: int, call: list[tuple[Callable[..., _T], Any, Any]]) -> _T:
        if self._stopped_by is not None:
            call.clear()
            raise ExecutorStopped(
                f"submission {number} to {self.name!r} was not run, for an earlier one failed:"
                f" {self._stopped_by!r}"
            ) from self._stopped_by
        function, args, kwargs = call.pop()  # from here on nobody else holds the arguments
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
                f"the threads of {self.name!r} are in process {self._pid}: make another in this one"
            )
        # A worker may wait for its colleagues: what they run was submitted before.
        if threading.get_ident() in self._members and not (waits and self._workers > 1):
            raise ExecutorError(
                f"{self.name!r} would wait for itself: this is a thread of it;"
                " submit and wait outside of submitted callables"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ExecutorClosed(f"{self.name!r} is closed: submit before close()")
        for error in list(self._unread.values()):
            self._mark_read(error)
            raise error
        if self._stopped_by is not None:
            raise self._stopped_by

    def _mark_read(self, error: BaseException) -> None:
        for one in (error, error.__cause__):
            self._unread.pop(id(one), None)

    def _shut_down(self, *, cancel: bool) -> BaseException | None:
        """The first failure that nobody has read."""
        if os.getpid() != self._pid:
            return None
        self._require_other_thread(waits=False)
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=cancel)
        failures = list(self._unread.values())
        self._unread.clear()
        self._members.clear()  # the system gives numbers of ended threads to new ones
        for other in failures[1:]:
            failures[0].add_note(f"{self.name!r} failed once more: {other!r}")
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
        _log.error("nobody has read a failure of %r", name, exc_info=error)
