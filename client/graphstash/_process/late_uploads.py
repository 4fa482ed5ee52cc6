"""LateUploads: publish earlier jobs' unsent artifacts in the background of a job, by `CatchUp`.

Only one process of a run publishes at a time.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from graphstash._artifacts.stash import Stash
from graphstash._executor import BoundedExecutor
from graphstash._forking import forkable
from graphstash.errors import BusyError, CacheError, Reason, TransportError
from graphstash_schema import ManifestName

if TYPE_CHECKING:
    from graphstash._artifacts.bundle import BundleEntry
    from graphstash._artifacts.catch_up import Outcome

__all__ = ["LateUploads"]

_log = logging.getLogger("graphstash")

_MAX_SECONDS: Final = 600.0
"""Maximum seconds of all late uploads of a run."""

_RETRY_SECONDS: Final = 5.0
_MAX_RETRY_SECONDS: Final = 300.0
"""Seconds between the first two attempts to reach the server, which double each time, and their
maximum."""

_CUT_SECONDS: Final = 1.0
"""End of the drain time, reserved for aborting an upload that is still running."""


class LateUploads:
    """Late uploads of one process.

    Args:
        stash: cache with the records of the artifacts. The caller closes it.
        job: returns the name of the job.
        before_each: called before each upload. Waits for the job's own uploads.
        published: called with the size of each published artifact in bytes.
        failed: called with the error if the server rejects the token.
    """

    def __init__(
        self,
        stash: Stash,
        *,
        job: Callable[[], ManifestName],
        before_each: Callable[[], None],
        published: Callable[[int], None],
        failed: Callable[[CacheError], None],
    ) -> None:
        self._stash = stash
        self._job = job
        self._before_each = before_each
        self._published = published
        self._failed = failed
        self._executor = BoundedExecutor(
            "graphstash-catch-up", workers=1, capacity=1, delays_forks=True
        )
        self._is_ending = threading.Event()  # set: stop retrying
        self._is_ended = False  # true: abort the running upload

    def start(self) -> None:
        """Publish in the background, if this job may publish and there is a record.

        A call while uploads run queues at most one more pass, for records added since.
        """
        stash, config = self._stash, self._stash.config
        if (
            config.unsent_limit
            and not stash.server.is_read_only
            and not stash.unsent.is_empty(with_any=config.is_own_server)
        ):
            self._executor.submit(self._run)

    def end(self, until: float) -> None:
        """Stop retrying, and end the uploads by `until`, in seconds of `time.monotonic`."""
        self._is_ending.set()
        left = max(0.0, until - time.monotonic())
        cut = min(_CUT_SECONDS, left / 2)
        self._executor.drain(left - cut)
        self._is_ended = True
        self._executor.drain(cut)
        self._executor.close()

    def _run(self) -> None:
        """Publish. While the server does not answer, retry until the job ends."""
        stash, config = self._stash, self._stash.config
        name = f"catch-up-{stash.standing.origin}-{config.namespace}"
        if self._is_ended or (claim := stash.downloads.claim(name)) is None:
            return
        from graphstash._artifacts.catch_up import CatchUp

        spent_bytes, spent_seconds = _amounts(claim.text)

        def spend(size_bytes: int, seconds: float) -> None:
            nonlocal spent_bytes, spent_seconds
            spent_bytes += size_bytes
            spent_seconds += seconds
            claim.keep(f"{spent_bytes} {spent_seconds:.3f}")

        server = stash.server.with_own_connections()
        server.name_job(self._job())
        catch_up = CatchUp(
            stash,
            server,
            with_any=config.is_own_server,
            done=self._count,
            before_each=self._before_each,
            is_stopped=lambda: self._is_ended,
            limit_bytes=config.unsent_limit - spent_bytes,
            limit_seconds=_MAX_SECONDS - spent_seconds,
            spend=spend,
        )
        pause = _RETRY_SECONDS
        try:
            while True:
                try:
                    catch_up.publish(catch_up.find_publishable())
                except (TransportError, BusyError) as error:
                    _log.debug("not published later: %s", error)
                else:
                    return
                # Jitter: many hosts may wait for the server.
                seconds = pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
                with forkable():
                    self._is_ended = self._is_ending.wait(seconds)
                if self._is_ended:
                    return
                pause = min(2 * pause, _MAX_RETRY_SECONDS)
        except (CacheError, OSError) as error:
            _log.debug("not published later: %s", error)
            # Nothing else reports the token if this host's own copies serve all programs. A token
            # that may only read is no mistake.
            if isinstance(error, CacheError) and error.reason is Reason.UNAUTHENTICATED:
                self._failed(error)
        finally:
            claim.close()
            server.close()

    def _count(self, entry: "BundleEntry", outcome: "Outcome") -> None:
        from graphstash._artifacts.catch_up import Sent

        if outcome is Sent.PUBLISHED:
            self._published(entry.size_bytes)


def _amounts(text: str) -> tuple[int, float]:
    """Return the bytes and seconds that late uploads of this run have used so far."""
    size_bytes, _, seconds = text.partition(" ")
    try:
        return int(size_bytes), float(seconds)
    except ValueError:  # no process has uploaded yet
        return 0, 0.0
