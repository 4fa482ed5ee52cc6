"""HeldLease: the right to compile, kept alive while the compilation runs."""

import contextlib
import threading
from time import monotonic

from graphstash._errors import CacheError, LeaseLostError
from graphstash._stash import Stash
from graphstash_schema import ArtifactKey, LeaseOutcome
from graphstash_schema.protocol import MAX_LEASE_SECONDS, MIN_LEASE_SECONDS

__all__ = ["HeldLease"]


class HeldLease:
    """Renews a lease three times per lifetime, in a daemon thread, until it is released.

    A lost or unreachable lease stops nothing here: leases are advice. `release` ends the thread,
    which then tells the server, unless the artifact is there: its upload has ended the lease.

    Args:
        stash: where the lease was granted.
        key: what may be compiled.
        token: what the grant returned.
        ttl_seconds: lifetime without a renewal.
        budget_seconds: after this long nothing is renewed any more, so that a compiler which hangs
            does not keep a team waiting for ever.
    """

    def __init__(
        self,
        stash: Stash,
        key: ArtifactKey,
        *,
        token: str,
        ttl_seconds: float,
        budget_seconds: float,
    ) -> None:
        self._stash = stash
        self._key = key
        self._token = token
        self._interval_seconds = min(max(ttl_seconds, MIN_LEASE_SECONDS), MAX_LEASE_SECONDS) / 3
        self._until = monotonic() + budget_seconds
        self._released = threading.Event()
        self._outcome = LeaseOutcome.FAILED
        self._thread = threading.Thread(target=self._keep, name="graphstash-lease", daemon=True)
        self._thread.start()

    def release(self, outcome: LeaseOutcome) -> None:
        """Ends the lease, without waiting for the server; harmless when it was ended before."""
        if not self._released.is_set():
            self._outcome = outcome
            self._released.set()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do for it."""
        return not self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        """Waits until the server has been told."""
        self._thread.join(timeout_seconds)

    def _keep(self) -> None:
        while not self._released.wait(self._interval_seconds) and monotonic() < self._until:
            try:
                self._stash.renew(self._key, self._token)
            except LeaseLostError:
                return
            except CacheError:
                continue  # the next renewal may still come in time
        if self._released.is_set() and self._outcome is LeaseOutcome.FAILED:
            with contextlib.suppress(CacheError):
                self._stash.release(self._key, self._token, self._outcome)
