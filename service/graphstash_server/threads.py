"""Threads: blocking calls of the event loop, at a low cost per call.

`loop.run_in_executor` takes several times the instructions: it makes a future of a second kind,
which needs locks and conditions, and chains it to the loop's future.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

__all__ = ["Threads"]

T = TypeVar("T")

_Job: TypeAlias = "tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]"
_Jobs: TypeAlias = "SimpleQueue[_Job | None]"


class Threads:
    """Up to `most` threads, which start when calls need them. Use it from one event loop."""

    def __init__(
        self, most: int, *, name: str, when_ended: Callable[[], None] = lambda: None
    ) -> None:
        """Start nothing yet. Each thread calls `when_ended` after its last call."""
        self._most = most
        self._name = name
        self._when_ended = when_ended
        self._jobs: _Jobs = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0

    def call(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `work` in a thread, after all earlier calls have begun. If the future is cancelled
        before that, drop the call.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._unfinished += 1
        if len(self._threads) < min(self._unfinished, self._most):
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, args=[self._jobs], name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._jobs.put((work, future, loop))
        return future

    async def close(self) -> None:
        """Finish the earlier calls, then end the threads. A later call starts another thread."""
        threads = self._threads
        self.end()
        for thread in threads:
            await asyncio.to_thread(thread.join)

    def end(self) -> None:
        """Like `close`, but do not wait."""
        threads, self._threads = self._threads, []
        jobs, self._jobs = self._jobs, SimpleQueue()
        for _ in threads:
            jobs.put(None)

    def _run(self, jobs: "_Jobs") -> None:
        while (job := jobs.get()) is not None:
            work, future, loop = job
            try:
                deliver = partial(self._settle, future, None if future.cancelled() else work())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                deliver = partial(self._fail, future, error)
            try:
                loop.call_soon_threadsafe(deliver)
            except RuntimeError:  # the loop has ended, so no caller waits
                break
            del job, work, future, deliver  # release the references while the thread is idle
        self._when_ended()

    def _settle(self, future: "asyncio.Future[Any]", result: Any) -> None:
        self._unfinished -= 1
        if not future.done():
            future.set_result(result)

    def _fail(self, future: "asyncio.Future[Any]", error: BaseException) -> None:
        self._unfinished -= 1
        if not future.done():
            future.set_exception(error)
