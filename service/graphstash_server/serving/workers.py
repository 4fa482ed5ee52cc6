"""run_workers: several processes serve one port under a small parent.

The parent imports everything once and forks. It starts no thread and no event loop, so forking is
safe. A new worker imports nothing, and all workers share the memory of the code. The workers accept
from listening sockets that stay open in the parent. A new connection waits until a worker accepts
it. If no worker serves, the parent closes the connection after a short wait.

uvicorn's own supervisor kills a worker that misses a ping for seconds, which happens on a loaded
host. It also starts every worker from scratch.

    SIGTERM, SIGINT   the workers end gracefully, then the parent; a further SIGINT kills them
    SIGHUP            rolling restart: successors replace the workers one after another, which
                      frees memory and renews connections. Workers run the parent's code, so new
                      code needs a restart of the server
    parent killed     the workers detect the end of a pipe, the lifeline, and end gracefully

No state is lost when a worker ends, because everything that outlives a request is in the database.
"""

import gc
import logging
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import NoReturn

from graphstash_server.services.counters import HostCounters
from graphstash_server.serving.server import PARENT_SIGNALS, run_worker
from graphstash_server.serving.sockets import ignore_new_connections
from graphstash_server.settings import Settings

__all__ = ["run_workers"]

_LOGGER = logging.getLogger(__name__)

_MARGIN_SECONDS = 4.0
"""Seconds beyond `shutdown_seconds` after which the parent kills an ending worker. They allow for
the last write of the counters and for a loaded host."""

_READY_SECONDS = 60.0
"""Seconds within which the successor of a rolling restart must be ready."""

_UNSERVED_SECONDS = 0.5
"""Seconds without a serving worker after which the parent closes new connections. Proxies and
clients then try another server at once, instead of after a timeout."""

_EARLY_SECONDS = 5.0
"""Age below which the end of a worker counts as early: its successor will probably end early."""
_FIRST_ATTEMPTS = 5
"""Number of workers killed in a row at which the server gives up its start. If a worker exits with
an error, it gives up at once, because the next worker would meet the same error."""
_FIRST_PAUSE_SECONDS = 0.5
_MAX_PAUSE_SECONDS = 10.0


def run_workers(
    settings: Settings, listeners: list[socket.socket], *, when_ready: Callable[[], None]
) -> bool:
    """Serve with `settings.workers` processes until a signal.

    All processes share the listeners, which are closed at the end. `when_ready` is called once,
    when all workers serve.

    Returns:
        False if the server could not start: before the first worker served, a worker exited with an
        error, or several were killed in a row.
    """
    return _Supervisor(settings, listeners, when_ready=when_ready).run()


@dataclass(slots=True, eq=False)
class _Slot:
    """The place of one worker, which several processes fill in turn."""

    worker: "_Worker | None" = None
    successor: "_Worker | None" = None  # starts in a rolling restart
    early_ends: int = 0  # consecutive ends soon after the start
    start_at: float = 0.0  # when to start a worker if there is none


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    slot: _Slot
    ready_pipe: int | None  # the worker writes a byte when it is ready; None once closed
    started_at: float
    row: int  # row of the counters
    kill_at: float = inf  # deadline of a successor to be ready, and of an ending worker to end
    is_ready: bool = False
    is_ending: bool = False


class _Supervisor:
    def __init__(
        self, settings: Settings, listeners: list[socket.socket], *, when_ready: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._listeners = listeners
        self._when_ready = when_ready
        self._slots = [_Slot() for _ in range(settings.workers)]
        self._alive: dict[int, _Worker] = {}
        # Per slot, one process serves, one starts and two may be ending, which takes seconds.
        self._counters = HostCounters(4 * settings.workers)
        self._outdated: deque[_Worker] = deque()  # still to be replaced in a rolling restart
        self._is_prepared = False
        self._is_announced = False
        self._is_stopping = False
        self._has_failed = False
        self._selector = selectors.DefaultSelector()
        self._lifeline, self._held = os.pipe()  # never written to: workers detect its closing
        self._woken, self._waking = socket.socketpair()
        self._turn_away_at = inf  # finite while no worker serves
        self._is_turning_away = False

    def run(self) -> bool:
        gc.collect()
        gc.freeze()  # a collection in a worker would write to shared pages, and so copy them
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        for listener in self._listeners:
            listener.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)
        for number in PARENT_SIGNALS:
            signal.signal(number, lambda *_: None)  # the wake-up byte carries the number
        while self._alive or not self._is_stopping:
            now = monotonic()
            self._act(now)
            for key, _ in self._selector.select(self._rest_seconds(now)):
                if isinstance(key.data, _Worker):
                    self._handle_ready(key.data)
                elif isinstance(key.data, socket.socket):
                    self._turn_away(key.data)
            self._take_signals()
            self._reap()
        return not self._has_failed

    def _act(self, now: float) -> None:
        for worker in list(self._alive.values()):
            if worker.kill_at <= now:
                _LOGGER.warning(
                    "worker %d was not ready or did not stop in time; killing it", worker.pid
                )
                self._kill(worker)
        if self._is_stopping:
            return
        self._watch_listeners(now)
        for slot in self._empty():
            if slot.start_at <= now:
                slot.worker = self._start(slot)
        is_rolling = any(slot.successor for slot in self._slots) or any(
            worker.is_ending for worker in self._alive.values()
        )
        while self._outdated and not is_rolling:
            worker = self._outdated.popleft()
            if worker.slot.worker is worker:
                is_rolling = True
                worker.slot.successor = self._start(worker.slot, kill_at=now + _READY_SECONDS)
                if worker.slot.successor is None:
                    self._outdated.clear()

    def _empty(self) -> list[_Slot]:
        """Return the slots to fill. The first worker starts alone: it migrates the database."""
        slots = self._slots if self._is_prepared else self._slots[:1]
        return [slot for slot in slots if slot.worker is None]

    def _watch_listeners(self, now: float) -> None:
        """Close new connections if no worker has served for `_UNSERVED_SECONDS`."""
        is_served = any(each.is_ready and not each.is_ending for each in self._alive.values())
        if is_served or not self._is_prepared:
            self._turn_away_at = inf
        elif self._turn_away_at == inf:
            self._turn_away_at = now + _UNSERVED_SECONDS
        self._set_turning_away(self._turn_away_at <= now)

    def _set_turning_away(self, is_turning_away: bool) -> None:  # noqa: FBT001 - it sets a state
        if is_turning_away == self._is_turning_away:
            return
        self._is_turning_away = is_turning_away
        for listener in self._listeners:
            if is_turning_away:
                self._selector.register(listener, selectors.EVENT_READ, listener)
            else:
                self._selector.unregister(listener)

    def _turn_away(self, listener: socket.socket) -> None:
        """Accept and close a connection, because no worker would accept it."""
        try:
            listener.accept()[0].close()
        except (BlockingIOError, ConnectionError):
            pass  # the client closed it first
        except OSError as error:  # the connection stays, so without a pause this would repeat
            _LOGGER.warning("cannot close new connections (%s); will retry", error.strerror)
            self._turn_away_at = monotonic() + _UNSERVED_SECONDS

    def _rest_seconds(self, now: float) -> float | None:
        """Return the seconds until the next action is due, or None."""
        due = min((worker.kill_at for worker in self._alive.values()), default=inf)
        if not self._is_stopping:
            due = min([due, *(slot.start_at for slot in self._empty())])
            if not self._is_turning_away:
                due = min(due, self._turn_away_at)
        return None if due == inf else max(due - now, 0.0)

    def _take_signals(self) -> None:
        with suppress(BlockingIOError):
            for number in self._woken.recv(4096):
                if number == signal.SIGHUP and self._is_announced:
                    _LOGGER.info("a rolling restart of %d workers begins", len(self._slots))
                    self._outdated = deque(slot.worker for slot in self._slots if slot.worker)
                elif number == signal.SIGINT and self._is_stopping:
                    for worker in self._alive.values():
                        self._kill(worker)
                elif number in {signal.SIGTERM, signal.SIGINT}:
                    self._stop()

    def _handle_ready(self, worker: _Worker) -> None:
        """Handle a worker that is ready, or that ended before it was ready."""
        if worker.ready_pipe is None:
            return
        worker.is_ready = os.read(worker.ready_pipe, 1) != b""
        self._hang_up(worker)
        if self._is_stopping or not worker.is_ready:
            return
        _LOGGER.info("worker %d serves", worker.pid)
        self._is_prepared = True
        worker.kill_at = inf
        slot = worker.slot
        if slot.successor is worker:
            old, slot.worker, slot.successor = slot.worker, worker, None
            if old is not None:
                self._end(old)
        if not self._is_announced and all(
            each.worker and each.worker.is_ready for each in self._slots
        ):
            self._is_announced = True
            self._when_ready()

    def _reap(self) -> None:
        while self._alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            worker = self._alive.pop(pid, None)
            if worker is not None:  # as process 1, the parent also inherits orphans
                self._hang_up(worker)
                self._counters.give_back(worker.row)
                self._replace(worker, os.waitstatus_to_exitcode(status))

    def _replace(self, worker: _Worker, code: int) -> None:
        slot, ended = worker.slot, _exit_text(code)
        if self._is_stopping or worker.is_ending:
            _LOGGER.info("worker %d %s", worker.pid, ended)
        elif not self._is_prepared and (code > 0 or slot.early_ends >= _FIRST_ATTEMPTS - 1):
            _LOGGER.error("worker %d %s: the server cannot start", worker.pid, ended)
            self._has_failed = True
            self._stop()
        elif slot.successor is worker:
            slot.successor = None
            self._outdated.clear()
            message = "worker %d %s before it was ready; the rolling restart stops, the others stay"
            _LOGGER.error(message, worker.pid, ended)
        else:
            slot.worker, slot.successor = slot.successor, None
            pause_seconds = 0.0 if slot.worker else _pause_seconds(worker)
            slot.start_at = monotonic() + pause_seconds
            _LOGGER.error("worker %d %s; restarting it in %g s", worker.pid, ended, pause_seconds)

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            self._set_turning_away(False)
            for listener in self._listeners:
                ignore_new_connections(listener)
                listener.close()
            for worker in self._alive.values():
                self._end(worker)

    def _end(self, worker: _Worker) -> None:
        if not worker.is_ending:
            worker.is_ending = True
            worker.kill_at = monotonic() + self._settings.shutdown_seconds + _MARGIN_SECONDS
            os.kill(worker.pid, signal.SIGTERM)

    @staticmethod
    def _kill(worker: _Worker) -> None:
        worker.kill_at = inf
        os.kill(worker.pid, signal.SIGKILL)

    def _hang_up(self, worker: _Worker) -> None:
        if worker.ready_pipe is not None:
            self._selector.unregister(worker.ready_pipe)
            os.close(worker.ready_pipe)
            worker.ready_pipe = None

    def _start(self, slot: _Slot, *, kill_at: float = inf) -> _Worker | None:
        row = self._counters.take()
        try:
            ready_pipe, say = os.pipe()
        except OSError as error:
            self._postpone(slot, row, error)
            return None
        signal.pthread_sigmask(signal.SIG_BLOCK, PARENT_SIGNALS)  # until the child has handlers
        try:
            pid = os.fork()
            if pid == 0:
                self._run_worker(say, row)
        except OSError as error:
            os.close(ready_pipe)
            self._postpone(slot, row, error)
            return None
        finally:
            os.close(say)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENT_SIGNALS)
        worker = self._alive[pid] = _Worker(pid, slot, ready_pipe, monotonic(), row, kill_at)
        self._selector.register(ready_pipe, selectors.EVENT_READ, worker)
        return worker

    def _postpone(self, slot: _Slot, row: int, error: OSError) -> None:
        """Retry the start of a worker later, because the host has too few processes or files."""
        self._counters.give_back(row)
        slot.start_at = monotonic() + _MAX_PAUSE_SECONDS
        _LOGGER.error("cannot start a worker (%s); will retry", error.strerror)

    def _run_worker(self, say: int, row: int) -> NoReturn:
        """Close the parent's files and serve. Always ends the process."""
        try:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            self._woken.close()
            self._waking.close()
            for pipe in (self._held, *(other.ready_pipe for other in self._alive.values())):
                if pipe is not None:
                    os.close(pipe)
            run_worker(
                self._settings,
                self._listeners,
                ready_pipe=say,
                lifeline=self._lifeline,
                counters=self._counters.of(row),
            )
        finally:
            os._exit(1)


def _pause_seconds(worker: _Worker) -> float:
    """Count early ends in a row, and return the pause: none after the first, then doubling."""
    slot = worker.slot
    is_early = not worker.is_ready or monotonic() - worker.started_at < _EARLY_SECONDS
    slot.early_ends = slot.early_ends + 1 if is_early else 0
    if slot.early_ends < 2:
        return 0.0
    doublings = min(slot.early_ends - 2, 16)
    return min(_FIRST_PAUSE_SECONDS * 2.0**doublings, _MAX_PAUSE_SECONDS)


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed by {names.get(-code, -code)}"
