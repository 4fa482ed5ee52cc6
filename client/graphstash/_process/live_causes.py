"""LiveCauses: find the causes of misses in the background, while the programs compile."""

from __future__ import annotations

import logging
import threading
from itertools import count, product
from typing import TYPE_CHECKING, Final

from graphstash._executor import BoundedExecutor
from graphstash_schema.display import plural

if TYPE_CHECKING:
    from graphstash._compile.explaining import Cause, Explainer
    from graphstash._compile.misses import Miss
    from graphstash._http.client import ServerClient
    from graphstash_schema import ArtifactKey

__all__ = ["LiveCauses"]

_log = logging.getLogger("graphstash")

_MAX_MISSES: Final = 8
_MAX_LOGGED: Final = 32
_MAX_SMALL: Final = 4
"""Maximum number of misses to explain, of misses to log, and of misses in packs to explain or log.
Most misses of a job have the same cause, and an explanation costs the server about as much as an
upload. Failures of the cache count separately, so that they hide no miss."""


class LiveCauses:
    """Explains the first misses of a process, each with one request. Thread-safe.

    The requests use connections and a circuit breaker of their own, so that a slow explanation
    delays no look-up. After the first error, no further request is made.

    Args:
        server: Client of the job.
        started_at: Start of the run in seconds since 1970.
        logs: Whether to log each miss with its cause.
    """

    def __init__(self, server: ServerClient, *, started_at: float, logs: bool) -> None:
        self._server = server
        self._started_at = started_at
        self._explainer: Explainer | None = None  # a job without misses needs none
        self._own_server: ServerClient | None = None
        self._logs = logs
        self._most = {True: _MAX_SMALL, False: _MAX_LOGGED if logs else _MAX_MISSES}
        # By whether a program is small, and whether the cache failed.
        self._added = {kind: count(1) for kind in product((True, False), repeat=2)}
        self._logging = threading.Lock()  # guards `_logs` and `_logged`
        self._logged = 0
        self._causes: dict[ArtifactKey, Cause] = {}
        self._executor = BoundedExecutor(
            "graphstash-explain",
            workers=1,
            capacity=2 * (_MAX_LOGGED + _MAX_SMALL),
            delays_forks=True,
        )

    def add(self, miss: Miss) -> None:
        """Explain a miss in the background, unless enough misses were explained. Never waits."""
        from graphstash_schema.explanation import PACK_PART

        is_failure = miss.trouble is not None
        if is_failure and not self._logs:
            return  # the run report does not need its explanation
        is_small = PACK_PART in miss.description.program
        if next(self._added[is_small, is_failure]) <= self._most[is_small]:
            self._executor.submit(lambda: self._explain(miss))

    def found(self) -> dict[ArtifactKey, Cause]:
        """Return the causes found so far."""
        return self._causes.copy()

    def end(self, timeout_seconds: float) -> dict[ArtifactKey, Cause]:
        """Return the causes found so far. Wait until the timeout for those of running requests."""
        is_idle = self._executor.drain(timeout_seconds)
        self._executor.close()
        if is_idle and self._own_server is not None:
            self._own_server.close()
        with self._logging:
            logs, self._logs = self._logs, False
            more = sum(next(each) - 1 for each in self._added.values()) - self._logged
        if logs and more:
            _log.warning("graphstash: missed %s more, not logged", plural(more, "program"))
        return self.found()

    def _explain(self, miss: Miss) -> None:
        from graphstash._compile.explaining import Explainer, label_of

        if self._explainer is None:
            self._own_server = self._server.with_own_connections()
            self._explainer = Explainer(self._own_server, started_at=self._started_at)
        cause = self._explainer.explain(miss.description, miss.trouble)
        if not self._explainer.has_failed:
            self._causes[miss.description.key] = cause
        with self._logging:
            if not self._logs:
                return
            self._logged += 1
        _log.warning("graphstash: missed %s: %s", label_of(miss.description), cause.text)
