"""Prefetch: download artifacts to this host's disk before the job needs them, at low priority.

Prefetching uses its own connections and circuit breaker, so that slow or failed prefetches do not
affect the job's calls. While the job downloads an artifact, prefetches pause between two chunks. If
the job needs an artifact that is being prefetched, it waits for the prefetch. All waits of a
prefetch for a busy server together last at most `wait_seconds`. A failed verification counts only
when the job requests the artifact.
"""

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from random import uniform
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from graphstash._artifacts.envelope import NullFile
from graphstash._artifacts.reader import Fetched, Reader
from graphstash._artifacts.stash import Stash
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable
from graphstash.errors import BusyError, CacheError, Reason
from graphstash_schema import ArtifactKey

if TYPE_CHECKING:
    from graphstash_schema import ArtifactInfo, ManifestEntry

__all__ = ["Outcome", "Prefetch", "value_of"]

_log = logging.getLogger("graphstash")

Outcome: TypeAlias = Fetched | CacheError | None
"""Outcome for one artifact: on this host, an error, or None for a miss."""

_WORKERS: Final = 8
"""Parallel downloads. More would take the server's capacity from other jobs."""

_MIN_BYTES: Final = 4096
"""Minimum size by which an artifact is valued, because every request has a cost."""

_MAX_COMPILE_SECONDS: Final = 3600.0
"""Maximum compile time that counts for the order: publishers may claim any time."""

_LOOK_SECONDS: Final = 0.2
"""Seconds between checks of `is_stopped`."""

_MIN_WAIT_SECONDS: Final = 0.1

_PAUSE_SECONDS: Final = 0.02
_MAX_PAUSE_SECONDS: Final = 2.0
"""Maximum seconds of all pauses of one download: servers time out an idle download."""

_T = TypeVar("_T")


class Prefetch:
    """Downloads artifacts in parallel.

    Args:
        stash: cache whose disk receives the artifacts. The caller closes it.
        limit_bytes: maximum bytes to download. Sizes are known in advance only for
            `config.namespace`, so downloads in progress at the limit are finished.
        is_stopped: polled repeatedly. If true, downloads end.
        done: called for each artifact that was tried, in the thread that downloaded it.
        at_first_wait: called once, before the first wait for a busy server.
    """

    def __init__(
        self,
        stash: Stash,
        *,
        is_stopped: Callable[[], bool],
        done: Callable[[ArtifactKey, Outcome], None],
        limit_bytes: int = sys.maxsize,
        at_first_wait: Callable[[BusyError], None] = lambda _: None,
    ) -> None:
        self._stash = stash
        self._limit_bytes = limit_bytes
        self._counting = threading.Lock()  # guards the three fields below
        self._fetched_bytes = 0
        self._busy_since: float | None = None  # first busy answer since the server served a call
        self._waited_seconds = 0.0  # before that
        self._is_stopped = is_stopped
        self._done = done
        self._at_first_wait = at_first_wait
        self.server = stash.server.with_own_connections()

    def retry_while_busy(self, call: Callable[[], _T]) -> _T:
        """Call the server, and retry while it is busy.

        Raises:
            CacheError: the call failed, or the server stayed busy.
        """
        while True:
            try:
                result = call()
            except BusyError as error:
                if not self._wait(error, lambda: None):
                    raise
            else:
                self._end_wait()
                return result

    def fetch_best(self, entries: "Iterable[ManifestEntry]") -> None:
        """Download the artifacts of a manifest that this host lacks, the most valuable first.

        Each writer of the manifest gets an equal share of the bytes: a writer can list artifacts
        that no job needs, and claim any compile time.

        Raises:
            CacheError: the server does not answer the look-up.
        """
        self.fetch(self._in_order({entry.key: entry.writer for entry in entries}))

    def fetch(self, wanted: Sequence[ArtifactKey]) -> None:
        """Download the artifacts in this order, unless this host has a valid copy.

        Return when all downloads have ended or `is_stopped` returns true.
        """
        # Daemon threads, so that downloads do not delay the end of the process.
        workers = BoundedExecutor(
            "graphstash-fetch", workers=_WORKERS, capacity=len(wanted), delays_forks=True
        )
        for key in wanted:
            workers.submit(partial(self._fetch, key))
        with forkable():
            while not workers.drain(_LOOK_SECONDS) and not self._is_stopped():
                pass
        workers.close()

    def close(self) -> None:
        """Close the connections."""
        self.server.close()

    def _in_order(self, writers: Mapping[ArtifactKey, int | None]) -> Sequence[ArtifactKey]:
        """Return the artifacts to download within the limit, in order."""
        absent = [key for key in writers if not self._stash.is_on_this_host(key)]
        if not absent:
            return ()
        asked_at, stash = time(), self._stash
        reply = self.retry_while_busy(partial(self.server.lookup, absent))
        stash.standing.follow(stash.config.namespace, reply.newest_withdrawal, asked_at=asked_at)
        found = reply.found
        chosen, left = [], self._limit_bytes
        for info in _share_by_writer(sorted(found, key=_value, reverse=True), writers):
            if info.size_bytes <= left:
                left -= info.size_bytes
                chosen.append(info.key)
        if len(stash.config.readable) > 1:  # the look-up covered one namespace only
            known = {info.key for info in found}
            chosen += [key for key in absent if key not in known]
        return chosen

    def _fetch(self, key: ArtifactKey) -> None:
        if self._is_stopped() or self._fetched_bytes >= self._limit_bytes:
            return
        reader = Reader(
            self.server,
            self._stash.local,
            self._stash.signatures,
            self._stash.standing,
            self._stash.downloads,
            between_chunks=self._pacing(),
        )
        outcome: Outcome
        try:
            outcome = reader.read(key, NullFile(), when_busy=self._wait)
            self._end_wait()
        except CacheError as error:
            _log.debug("not prefetched: %s", error)
            outcome = error
        with self._counting:
            self._fetched_bytes += reader.received_bytes
        self._done(key, outcome)

    def _wait(self, busy: BusyError, signal: Callable[[], None]) -> bool:
        """Sleep before the next call to a busy server. Return False to give up."""
        seconds = max(busy.retry_after_seconds, _MIN_WAIT_SECONDS)
        with self._counting:
            now, config = monotonic(), self._stash.config
            since = now if self._busy_since is None else self._busy_since
            left = min(config.wait_seconds - self._waited_seconds, busy.patience_seconds)
            if now + seconds > since + left:
                return False
            is_first = self._busy_since is None and not self._waited_seconds
            self._busy_since = since
        if is_first:
            self._at_first_wait(busy)
        seconds *= uniform(0.1, 1.0)  # noqa: S311 - no secret
        with forkable():
            while seconds > 0.0 and not self._is_stopped():
                signal()
                sleep(min(seconds, _LOOK_SECONDS))
                seconds -= _LOOK_SECONDS
        return not self._is_stopped()

    def _end_wait(self) -> None:
        """End a wait, if one has begun, because the server serves calls again."""
        with self._counting:
            if self._busy_since is not None:
                self._waited_seconds += monotonic() - self._busy_since
                self._busy_since = None

    def _pacing(self) -> Callable[[], None]:
        left = _MAX_PAUSE_SECONDS

        def pause() -> None:
            nonlocal left
            self._end_wait()
            began = monotonic()
            while left > 0 and self._stash.local.is_downloading():
                with forkable():
                    sleep(_PAUSE_SECONDS)
                left -= monotonic() - began
                began = monotonic()
            if self._is_stopped():
                raise CacheError(Reason.TIMEOUT, "the job ends")

        return pause


def _share_by_writer(
    found: "Iterable[ArtifactInfo]", writers: Mapping[ArtifactKey, int | None]
) -> "Sequence[ArtifactInfo]":
    """Reorder artifacts so that the writers who listed them get equal shares of the bytes.

    Fair queueing: sort by the time at which each download would end if all writers' queues shared
    the connection (Demers, Keshav, Shenker 1989).
    """
    taken_bytes: Counter[int | None] = Counter()
    turns = []
    for info in found:
        writer = writers.get(info.key)
        taken_bytes[writer] += max(info.size_bytes, _MIN_BYTES)
        turns.append((taken_bytes[writer], info))
    return [info for _, info in sorted(turns, key=itemgetter(0))]


def _value(info: "ArtifactInfo") -> float:
    return value_of(info.compile_seconds or 0.0, info.size_bytes)


def value_of(compile_seconds: float, size_bytes: int) -> float:
    """Return the value of a transfer: compile seconds that it saves, per byte."""
    return min(compile_seconds, _MAX_COMPILE_SECONDS) / max(size_bytes, _MIN_BYTES)
