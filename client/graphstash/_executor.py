"""BoundedExecutor: background threads behind a bounded queue, for work that a job can do without.

A full queue refuses work instead of waiting: a training step must never wait for an upload. The
threads of the training loop are a `WorkerPool`, which does the opposite: the caller waits, errors
are raised, and the process does not end before the work is done.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from time import monotonic

__all__ = ["BoundedExecutor"]

_log = logging.getLogger("graphstash")


class BoundedExecutor:
    """Runs calls in order of submission.

    The threads are daemons: they never keep a job alive. `drain` waits for them, `close` stops
    them; the owner calls both.

    Args:
        name: prefix of the threads' names.
        workers: how many threads; they start with the first call.
        capacity: how many calls may wait.
    """

    def __init__(self, name: str, *, workers: int, capacity: int) -> None:
        self._name = name
        self._workers = workers
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()  # guards the three fields below
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, call: Callable[[], None]) -> bool:
        """Queues a call; False when the queue is full or closed, and then nothing happens."""
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
        """Starts a thread for calls that are submitted when the process ends.

        Python 3.12 and newer start none at that time.
        """
        with self._idle:
            if not self._threads and not self._closed:
                self._add_thread()

    def drain(self, timeout_seconds: float) -> bool:
        """Waits until nothing is queued or running; False after the timeout."""
        deadline = monotonic() + timeout_seconds
        with self._idle:
            while self._unfinished:
                left = deadline - monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self) -> None:
        """Refuses further calls and lets idle threads end; queued calls are dropped."""
        with self._idle:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
                    self._unfinished -= 1
            self._idle.notify_all()
            for _ in self._threads:
                self._queue.put(None)

    def _add_thread(self) -> None:
        thread = threading.Thread(
            target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
        )
        # Raised where the container's limit of threads is reached, and at the end of a process.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001 - a thread's outermost frame
                _log.exception("background work of the cache failed")
            finally:
                with self._idle:
                    self._unfinished -= 1
                    self._idle.notify_all()
