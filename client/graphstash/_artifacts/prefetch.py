"""Prefetch: brings artifacts to this host's disk before they are needed, out of the way of what is.

It has connections of its own, so that a slow one of them holds nothing up, and trouble that it
meets does not stop what the job asks for. Where the job downloads something meanwhile, a prefetch
that has begun pauses between two pieces; one that the job wants itself goes on, and the job takes
what comes of it. What does not verify is left to the job, which meets and counts it if it wants it.
"""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, sleep
from typing import Final, TypeAlias

from graphstash._artifacts.envelope import Nowhere
from graphstash._artifacts.reader import Fetched, Reader
from graphstash._artifacts.stash import Stash
from graphstash._executor import BoundedExecutor
from graphstash._http.client import ServerClient
from graphstash.errors import CacheError, Reason
from graphstash_schema import ArtifactInfo, ArtifactKey

__all__ = ["Outcome", "Prefetch"]

_log = logging.getLogger("graphstash")

Outcome: TypeAlias = Fetched | CacheError | None
"""What became of one artifact: it is on this host; nobody can say, or it does not verify; nobody
has it."""

_WORKERS: Final = 8
"""Downloads at once: round trips overlap, and a server serves other jobs as well."""

_LEAST_BYTES: Final = 4096
"""What any request costs, counted in bytes."""

_LOOK_SECONDS: Final = 0.2
"""How often it looks whether it is still wanted."""

_PAUSE_SECONDS: Final = 0.02
_MAX_PAUSE_SECONDS: Final = 2.0
"""What one download pauses in all: a server does not keep one open for ever."""


class Prefetch:
    """Downloads artifacts side by side.

    Args:
        stash: whose disk gets them; stays the caller's.
        limit_bytes: most bytes to download. What is in other namespaces than the first is of no
            known size: the downloads that run when it is reached are finished.
        is_stopped: asked again and again; when it is true, nothing more is downloaded.
        done: called for each that was tried, in the thread that did.
    """

    def __init__(
        self,
        stash: Stash,
        *,
        is_stopped: Callable[[], bool],
        done: Callable[[ArtifactKey, Outcome], None],
        limit_bytes: int = sys.maxsize,
    ) -> None:
        self._stash = stash
        self._limit_bytes = limit_bytes
        self._fetched_bytes = 0  # under the lock
        self._counting = threading.Lock()
        self._is_stopped = is_stopped
        self._done = done
        self.server = ServerClient(stash.config)

    def fetch_best(self, keys: Iterable[ArtifactKey]) -> None:
        """Downloads what is absent on this host, the most valuable first.

        Raises:
            CacheError: the server does not say what it has.
        """
        self.fetch(self._in_order(keys))

    def fetch(self, wanted: Sequence[ArtifactKey]) -> None:
        """Downloads all in this order, after a look whether this host has them, sound; returns when
        they are here, or enough.
        """
        # Threads that do not keep the process from ending.
        workers = BoundedExecutor("graphstash-fetch", workers=_WORKERS, capacity=len(wanted))
        for key in wanted:
            workers.submit(partial(self._fetch, key))
        while not workers.drain(_LOOK_SECONDS) and not self._is_stopped():
            pass
        workers.close()

    def close(self) -> None:
        """Closes its connections."""
        self.server.close()

    def _in_order(self, keys: Iterable[ArtifactKey]) -> Sequence[ArtifactKey]:
        """What is absent here and on the server, within the limit; by seconds saved per byte."""
        absent = [key for key in keys if not self._stash.is_on_this_host(key)]
        if not absent:
            return ()
        found = self.server.lookup(absent).found
        chosen, left = [], self._limit_bytes
        for info in sorted(found, key=_value, reverse=True):
            if info.size_bytes <= left:
                left -= info.size_bytes
                chosen.append(info.key)
        if len(self._stash.config.readable) > 1:  # where the others are nobody has said
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
            outcome = reader.read(key, Nowhere())
        except CacheError as error:
            _log.debug("not prefetched: %s", error)
            outcome = error
        if isinstance(outcome, Fetched):
            with self._counting:
                self._fetched_bytes += outcome.size_bytes
        self._done(key, outcome)

    def _pacing(self) -> Callable[[], None]:
        """Called between two pieces of one download."""
        left = _MAX_PAUSE_SECONDS

        def pause() -> None:
            nonlocal left
            began = monotonic()
            while left > 0 and self._stash.local.is_downloading():
                sleep(_PAUSE_SECONDS)
                left -= monotonic() - began
                began = monotonic()
            if self._is_stopped():
                raise CacheError(Reason.TIMEOUT, "the job ends")

        return pause


def _value(info: ArtifactInfo) -> float:
    return (info.compile_seconds or 0.0) / max(info.size_bytes, _LEAST_BYTES)
