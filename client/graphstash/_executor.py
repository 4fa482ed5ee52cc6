"""BoundedExecutor: background threads with a bounded queue, for work that a job can lose.

If the queue is full, it rejects work instead of blocking, because a training step must never wait
for an upload. `WorkerPool` is for work of the training loop: it blocks the caller, raises errors,
and finishes its work before the process ends.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final

from graphstash._forking import unforked

__all__ = ["BoundedExecutor"]

_log = logging.getLogger("graphstash")

_END_SECONDS: Final = 1.0
"""Seconds that an idle thread may take to end."""


class BoundedExecutor:
    """Runs calls in background threads, and starts them in order of submission.

    The threads are daemons, so they never keep a job alive. The owner calls `drain` to wait for the
    calls, then `close` to stop the threads.

    Args:
        name: prefix of the thread names.
        workers: number of threads, which start on demand.
        capacity: number of calls that may wait in the queue.
        delays_forks: whether a fork of the process waits for running calls, see `unforked`.
    """

    def __init__(
        self, name: str, *, workers: int, capacity: int, delays_forks: bool = False
    ) -> None:
        self._name = name
        self._context = unforked if delays_forks else contextlib.nullcontext
        self._workers = workers
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()  # guards the three fields below
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, call: Callable[[], None]) -> bool:
        """Queue a call. Return False if the queue is full or closed, or no thread can start."""
        with self._idle:
            if self._closed or self._unfinished >= self._capacity + self._workers:
                return False
            if len(self._threads) < min(self._workers, self._unfinished + 1):
                self._add_thread()
            if not self._threads:
                return False
            self._queue.put(call)
            self._unfinished += 1
        return True

    def start(self) -> None:
        """Start a thread now: Python 3.12 and newer cannot start one while the process ends."""
        with self._idle:
            if not self._threads and not self._closed:
                self._add_thread()

    def drain(self, timeout_seconds: float) -> bool:
        """Wait until no call is queued or running. Return False after the timeout."""
        deadline = monotonic() + timeout_seconds
        with self._idle:
            while self._unfinished:
                left = deadline - monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self) -> None:
        """Reject further calls, drop queued calls, and end each thread after its running call.

        If no call runs, waits for the threads: if a thread ends while the interpreter does, the
        thread-local objects of torch abort the process. `drain` first waits for running calls.
        """
        with self._idle:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
                    self._unfinished -= 1
            self._idle.notify_all()
            for _ in self._threads:
                self._queue.put(None)
            threads = [] if self._unfinished else self._threads
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_END_SECONDS)

    def _add_thread(self) -> None:
        thread = threading.Thread(
            target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
        )
        # Raised at the container's thread limit and while the process ends.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                with self._context():
                    call()
            except Exception:  # noqa: BLE001 - outermost frame of a thread
                _log.exception("background work of the cache failed")
            finally:
                call = None  # it may keep a large payload until the next call comes
                with self._idle:
                    self._unfinished -= 1
                    self._idle.notify_all()
