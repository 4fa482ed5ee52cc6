"""RegionalLeases: a caller that gets the lease of this region asks the upstream for its lease.

So one process per region and key asks the upstream, and a graph is compiled once in all regions.
The other callers of the region wait here. The caller's token is the region's token, a dot, and the
upstream's token. If the upstream does not answer, the region's lease is enough.

A caller releases its lease when the region has the artifact, which may reach the upstream much
later. Until then the region renews the upstream's lease, unless the upstream does not take the
artifact.
"""

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Final

from graphstash_schema import (
    LeaseOutcome,
    LeaseReply,
    LeaseRequest,
    LeaseState,
    NamespacePolicy,
)
from graphstash_schema.protocol import API_PREFIX, HEADER_LEASE
from graphstash_server.db.queries.upstream import find_attempts
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.jobs.leases import Acquisition, LeaseService, lost
from graphstash_server.upstream.client import Answer, UpstreamClient, UpstreamError
from graphstash_server.upstream.fetches import Fetches

__all__ = ["RegionalLeases"]

_LOGGER = logging.getLogger(__name__)

_POLL_SECONDS: Final = 10.0
"""Longest wait of one call to the upstream. Then the region renews its own lease."""

_POLL_SHARE: Final = 1 / 3
"""Longest wait, as a part of the region's lease."""

_MIN_POLL_SECONDS: Final = 0.5
"""Shortest time between two calls. An upstream that has too many waiters replies at once."""

_QUEUED_SECONDS: Final = 5.0
"""Seconds between two renewals of the leases of queued artifacts."""

_MAX_ATTEMPTS: Final = 5
"""Attempts to send a queued artifact, within about a minute, after which its lease ends. Otherwise
other regions would wait for an artifact that this region cannot send."""

_QUEUED: Final = LeaseRequest(holder="the queue of a region")

_FETCH_SECONDS: Final = 20.0
"""Longest wait for the artifact that another region has published."""


@dataclass(kw_only=True, eq=False)
class RegionalLeases(LeaseService):
    """Leases of a region."""

    client: UpstreamClient
    fetches: Fetches

    def __post_init__(self) -> None:
        super().__post_init__()
        self._of_queued: dict[StoredKey, str] = {}
        """The upstream's leases that this process renews."""

    async def run(self) -> None:
        """Renew the upstream's leases of queued artifacts, until cancelled."""
        while True:
            await asyncio.sleep(_QUEUED_SECONDS)
            for key, token in list(self._of_queued.items()):
                try:
                    await self._renew_queued(key, token)
                except Exception:
                    _LOGGER.exception("could not renew the lease of %s, will retry", key.key)

    async def acquire(
        self, acquisition: Acquisition, *, gone: "asyncio.Future[None]"
    ) -> LeaseReply:
        """Grant the lease of this region and then of the upstream, see `LeaseService.acquire`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + acquisition.wait_seconds
        reply = await super().acquire(acquisition, gone=gone)
        if reply.state is not LeaseState.GRANTED:
            return reply
        try:
            with self.wait_queue.counted() as may_wait:
                until = deadline if may_wait else loop.time()
                answered = await self._acquire_upstream(acquisition, reply, until, gone)
        except UpstreamError:
            self.client.count("lease_alone")
            return reply
        except BaseException:
            await self._release_here(acquisition.key, reply)
            raise
        if answered.state is not LeaseState.GRANTED:
            await self._release_here(acquisition.key, reply)
        elif gone.done() and answered.token is not None:
            await self.release(acquisition.key, token=answered.token)
        return answered

    async def renew(self, key: StoredKey, *, token: str, request: LeaseRequest) -> LeaseReply:
        """Extend both leases. An upstream that does not answer ends neither."""
        here, _, there = token.partition(".")
        reply = await super().renew(key, token=here, request=request)
        if there:
            answer = await self._call("PUT", key, there, request=request)
            if answer is not None and answer.status == 410:
                raise lost(key)
        return reply.model_copy(update={"token": token})

    async def release(self, key: StoredKey, *, token: str) -> None:
        """End both leases. The upstream ends its lease itself when it gets a queued artifact."""
        here, _, there = token.partition(".")
        try:
            await super().release(key, token=here)
        finally:
            if there and await self._attempts(key) is not None:
                self._of_queued[key] = there
            elif there:
                await self._call("DELETE", key, there)

    async def _renew_queued(self, key: StoredKey, token: str) -> None:
        attempts = await self._attempts(key)
        if attempts is not None and attempts < _MAX_ATTEMPTS:
            answer = await self._call("PUT", key, token, request=_QUEUED)
            if answer is None or answer.status != 410:
                return
        elif attempts is not None:
            await self._call("DELETE", key, token)
        self._of_queued.pop(key, None)

    async def _acquire_upstream(
        self,
        acquisition: Acquisition,
        reply: LeaseReply,
        deadline: float,
        gone: "asyncio.Future[None]",
    ) -> LeaseReply:
        key, request = acquisition.key, acquisition.request
        loop = asyncio.get_running_loop()
        while True:
            longest = min(_POLL_SECONDS, request.ttl_seconds * _POLL_SHARE)
            wait_seconds = math.floor(max(0.0, min(deadline - loop.time(), longest)))
            asked_at = loop.time()
            answer = await self.client.call(
                "POST",
                _path(key),
                body=request,
                headers={"Prefer": f"wait={wait_seconds}"},
                poll_seconds=wait_seconds,
            )
            if answer.status not in (200, 201, 202):
                raise UpstreamError(f"it refuses a lease with {answer.status}")
            answered = answer.parse(LeaseReply)
            match answered.state:
                case LeaseState.GRANTED:
                    token = f"{reply.token}.{answered.token}"
                    return reply.model_copy(update={"token": token})
                case LeaseState.READY:
                    await self._fetch(key, seconds=min(_FETCH_SECONDS, deadline - loop.time()))
                    return answered
                case LeaseState.HELD:
                    is_over = deadline - loop.time() < 1 or gone.done() or self.wait_queue.is_closed
                    if is_over:
                        return answered
            await asyncio.sleep(asked_at + _MIN_POLL_SECONDS - loop.time())
            try:
                await super().renew(key, token=reply.token or "", request=request)
            except ServerError:  # another caller here has it now, or published
                return answered

    async def _fetch(self, key: StoredKey, *, seconds: float) -> None:
        """Get the artifact of another region. Raise `UpstreamError` if that is impossible."""
        try:
            is_here = await self.fetches.fetch(
                key, NamespacePolicy(), patience_seconds=max(0.0, seconds)
            )
        except ServerError:
            return  # still downloading: the caller's read waits for it
        if not is_here:
            raise UpstreamError("it has the artifact, but does not deliver it")

    async def _release_here(self, key: StoredKey, reply: LeaseReply) -> None:
        try:
            await super().release(key, token=reply.token or "")
        except ServerError:
            return  # expires

    async def _attempts(self, key: StoredKey) -> int | None:
        async with self.database.reading() as connection:
            return await find_attempts(connection, key)

    async def _call(
        self, method: str, key: StoredKey, token: str, *, request: LeaseRequest | None = None
    ) -> Answer | None:
        query = "" if method == "PUT" else f"?outcome={LeaseOutcome.FAILED}"
        try:
            return await self.client.call(
                method, _path(key) + query, body=request, headers={HEADER_LEASE: token}
            )
        except UpstreamError:
            return None


def _path(key: StoredKey) -> str:
    words = key.kind.value, key.device_type, key.fingerprint
    return f"{API_PREFIX}/{key.namespace}/leases/{'/'.join(words)}"
