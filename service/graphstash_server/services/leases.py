"""LeaseService: one process of a team compiles a graph, the others wait for it.

Leases are advice: an upload needs none, and an expired one only lets the next waiter compile.
"""

import asyncio
import random
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from graphstash_schema import Digest, ErrorCode, LeaseReply, LeaseRequest, LeaseState
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import find_artifact
from graphstash_server.db.queries.leases import (
    LeaseRow,
    acquire_lease,
    count_held_leases,
    find_lease,
    release_lease,
    renew_lease,
)
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.waiting import Ticket, Waiters, Wake

__all__ = ["Acquisition", "LeaseService"]

_LOOK_SECONDS = 0.4
_LOOK_SECONDS_INFORMED = 5.0
"""Mean time between two looks of a lookout; half of it to one and a half of it, so that the
servers of a fleet do not ask in step. Waiters are served within half a second of a commit, be it
because they look or because they are told."""


class Acquisition(NamedTuple):
    """Who asks for a lease, and for how long."""

    key: StoredKey
    request: LeaseRequest
    wait_seconds: float


class LeaseService:
    """Used from the event loop only."""

    def __init__(
        self,
        *,
        database: Database,
        artifacts: ArtifactService,
        waiters: Waiters,
        clock: Clock,
        new_token: Callable[[], str] = lambda: secrets.token_hex(16),
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._database = database
        self._artifacts = artifacts
        self._waiters = waiters
        self._clock = clock
        self._new_token = new_token
        self._jitter = jitter

    async def acquire(self, wanted: Acquisition, *, gone: "asyncio.Future[None]") -> LeaseReply:
        """Takes the lease, or waits until it can be taken or the artifact is there.

        Args:
            wanted: what is asked for.
            gone: done when the caller hung up; it gets nothing then that others would miss.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wanted.wait_seconds
        with self._waiters.joined(wanted.key) as ticket:

            def wake(_: object) -> None:
                ticket.set()

            gone.add_done_callback(wake)
            try:
                while True:
                    ticket.clear()
                    if ticket.digest is not None:
                        return _ready(ticket.digest)
                    reply, digest = await self._try(wanted)
                    if digest is not None:
                        self._waiters.wake(Wake.ready(wanted.key, digest))
                    if gone.done() and reply.token is not None:
                        await self.release(wanted.key, token=reply.token)
                    rest = deadline - loop.time()
                    is_over = rest <= 0 or gone.done() or self._waiters.is_closed
                    if reply.state is not LeaseState.HELD or is_over:
                        return reply
                    await self._pause(wanted.key, ticket, reply=reply, rest_seconds=rest)
            finally:
                gone.remove_done_callback(wake)

    async def renew(self, key: StoredKey, *, token: str, request: LeaseRequest) -> LeaseReply:
        """Moves the end of a lease.

        Raises:
            ServerError: 410 when the token does not hold the lease any more.
        """
        now = self._clock()
        async with self._database.writing() as connection:
            fencing = await renew_lease(
                connection,
                key,
                token=token,
                holder=request.holder,
                now=now,
                expires_at=now + timedelta(seconds=request.ttl_seconds),
            )
        if fencing is None:
            raise _lost(key)
        return _granted(token=token, fencing=fencing, ttl_seconds=request.ttl_seconds)

    async def release(self, key: StoredKey, *, token: str) -> None:
        """Ends a lease, and wakes one waiter; if there is an artifact, that one wakes the others.

        Ending it again, or after publishing ended it, changes nothing.

        Raises:
            ServerError: 410 when the token never held the lease, or lost it.
        """
        now = self._clock()
        async with self._database.writing() as connection:
            is_ended = await release_lease(connection, key, token=token, now=now)
            if is_ended:
                await notify(connection, [Wake.free(key).payload])
            else:
                last = await find_lease(connection, key)
                is_ended = last is not None and last.token == token and last.released_at is not None
        if not is_ended:
            raise _lost(key)
        self._waiters.wake(Wake.free(key))

    async def count_held(self) -> int:
        """How many leases are held now, of all servers."""
        async with self._database.reading() as connection:
            return await count_held_leases(connection, now=self._clock())

    async def _try(self, wanted: Acquisition) -> tuple[LeaseReply, Digest | None]:
        """Looks once; goes round when somebody was faster between two statements.

        Returns:
            What to answer, and the digest of the artifact if it is there.
        """
        while True:
            row = await self._artifacts.find(wanted.key)
            if row is not None:
                return _ready(row.digest), row.digest
            async with self._database.reading() as connection:
                lease = await find_lease(connection, wanted.key)
            if lease is not None and lease.is_held(self._clock()):
                return self._held(lease), None
            reply = await self._take(wanted)
            if reply is not None:
                return reply, None

    async def _take(self, wanted: Acquisition) -> LeaseReply | None:
        """Takes a free lease; None when it is not free, or not needed, any more.

        The lease is taken before the artifact is looked for: an upload that commits meanwhile has
        either ended before, and is seen, or ends this lease.
        """
        now = self._clock()
        token = self._new_token()
        async with self._database.writing() as connection:
            fencing = await acquire_lease(
                connection,
                wanted.key,
                token=token,
                holder=wanted.request.holder,
                now=now,
                expires_at=now + timedelta(seconds=wanted.request.ttl_seconds),
            )
            if fencing is None:
                return None
            if await find_artifact(connection, wanted.key) is not None:
                await release_lease(connection, wanted.key, token=token, now=now)
                return None
        return _granted(token=token, fencing=fencing, ttl_seconds=wanted.request.ttl_seconds)

    async def _pause(
        self, key: StoredKey, ticket: Ticket, *, reply: LeaseReply, rest_seconds: float
    ) -> None:
        """Sleeps until it is worth looking again."""
        seconds = rest_seconds
        if self._waiters.is_lookout(key, ticket):
            mean = _LOOK_SECONDS_INFORMED if self._waiters.are_informed else _LOOK_SECONDS
            look = mean * (0.5 + self._jitter())
            seconds = min(seconds, look, reply.expires_in_seconds or 0.0)
        try:
            async with asyncio.timeout(seconds):
                await ticket.wait()
        except TimeoutError:
            return

    def _held(self, lease: LeaseRow) -> LeaseReply:
        rest = lease.expires_at - self._clock()
        return LeaseReply(
            state=LeaseState.HELD,
            holder=lease.holder,
            expires_in_seconds=max(rest.total_seconds(), 0.0),
        )


def _ready(digest: Digest) -> LeaseReply:
    return LeaseReply(state=LeaseState.READY, digest=str(digest), size_bytes=digest.size_bytes)


def _granted(*, token: str, fencing: int, ttl_seconds: float) -> LeaseReply:
    return LeaseReply(
        state=LeaseState.GRANTED, token=token, fencing=fencing, ttl_seconds=ttl_seconds
    )


def _lost(key: StoredKey) -> ServerError:
    return ServerError(
        ErrorCode.LEASE_LOST,
        f"the token does not hold the lease on {key.key}: it expired, was released, or was never "
        "granted; go on without it, or ask for the lease again",
    )
