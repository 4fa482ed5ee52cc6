"""LeaseService: one process of a team compiles a graph, the others wait for it.

Leases are advisory: an upload needs none, and an expired one only lets the next waiter compile.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncConnection

from graphstash_schema import (
    Digest,
    ErrorCode,
    LeaseReply,
    LeaseRequest,
    LeaseState,
    Namespace,
)
from graphstash_server.clock import Clock, jitter
from graphstash_server.counters import Counters
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.queries.artifacts import find_artifact
from graphstash_server.db.queries.leases import (
    LeaseRow,
    acquire_lease,
    count_held_leases,
    find_lease,
    has_room_for_lease,
    list_held_leases,
    release_lease,
    renew_lease,
)
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.wait_queue import Notification, Ticket, WaitQueue

__all__ = ["Acquisition", "HeldLease", "LeaseService"]

_LOOK_SECONDS = 0.4
_LOOK_SECONDS_INFORMED = 5.0
"""Mean time between two looks of a poller; the jitter is half of it, so that the servers of a fleet
do not poll in step. Waiters are served within half a second of a commit, whether they poll or are
notified."""


_MAX_HELD = 1024
"""Leases of one caller: each is a graph that compiles now, and a token may be that of a team."""

_MAX_ROWS = 8192
"""Leases of one caller, or of one namespace, that are held or remembered: a row is 500 bytes, and
counting them takes a millisecond."""


class Acquisition(NamedTuple):
    """A request for a lease, how long it waits, and who makes it."""

    key: StoredKey
    request: LeaseRequest
    wait_seconds: float
    caller: str


class HeldLease(NamedTuple):
    """One process compiles; `waiters` are the requests of this server process that wait for it."""

    key: StoredKey
    holder: str
    expires_at: datetime
    waiters: int


@dataclass(kw_only=True, eq=False)
class LeaseService:
    """Grants, renews and releases leases."""

    database: Database
    artifacts: ArtifactService
    wait_queue: WaitQueue
    counters: Counters
    clock: Clock
    new_token: Callable[[], str] = lambda: secrets.token_hex(16)

    def __post_init__(self) -> None:
        # A thousand callers may join at once: the upload that they wait for does not queue behind.
        self._turns = asyncio.Semaphore(self.database.shared_connections)

    async def acquire(self, wanted: Acquisition, *, gone: "asyncio.Future[None]") -> LeaseReply:
        """Takes the lease, or waits until it can be taken or the artifact is there.

        `gone` is done when the caller hung up; a lease that it gets then is released again.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wanted.wait_seconds
        with self.wait_queue.joined(wanted.key) as ticket:

            def wake(_: object) -> None:
                ticket.set()

            gone.add_done_callback(wake)
            try:
                while True:
                    ticket.clear()
                    async with self._turns:
                        if ticket.digest is not None:
                            return _ready(ticket.digest)
                        reply, digest = await self._try(wanted)
                    if digest is not None:
                        self.wait_queue.wake(Notification.ready(wanted.key, digest))
                    if gone.done() and reply.token is not None:
                        await self.release(wanted.key, token=reply.token)
                    rest = deadline - loop.time()
                    is_over = rest <= 0 or gone.done() or self.wait_queue.is_closed
                    if reply.state is not LeaseState.HELD or is_over:
                        return reply
                    await self._pause(wanted.key, ticket, reply=reply, rest_seconds=rest)
            finally:
                gone.remove_done_callback(wake)

    async def renew(self, key: StoredKey, *, token: str, request: LeaseRequest) -> LeaseReply:
        """Moves the end of a lease.

        Raises:
            ServerError: 410 when the token no longer holds the lease.
        """
        now = self.clock()
        async with self.database.writing() as connection:
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
        now = self.clock()
        async with self.database.writing() as connection:
            is_ended = await release_lease(connection, key, token=token, now=now)
            if is_ended:
                await notify(connection, [Notification.free(key).payload])
            else:
                last = await find_lease(connection, key)
                is_ended = last is not None and last.token == token and last.released_at is not None
        if not is_ended:
            raise _lost(key)
        self.wait_queue.wake(Notification.free(key))

    async def count_held(self) -> int:
        """How many leases are held now, of all servers."""
        async with self.database.reading() as connection:
            return await count_held_leases(connection, now=self.clock())

    async def list_held(self, namespaces: Sequence[Namespace], *, limit: int) -> list[HeldLease]:
        """Leases of some namespaces that are held now, the last ones to end first."""
        async with self.database.reading() as connection:
            rows = await list_held_leases(connection, namespaces, now=self.clock(), limit=limit)
        return [HeldLease(*row, self.wait_queue.count_of(row.key)) for row in rows]

    async def _try(self, wanted: Acquisition) -> tuple[LeaseReply, Digest | None]:
        """Looks once; tries again when another process was faster between two statements.

        Returns:
            What to answer, and the digest of the artifact if it is there.
        """
        while True:
            row = await self.artifacts.find(wanted.key)
            if row is not None:
                return _ready(row.digest), row.digest
            lease = await find_lease(self.database, wanted.key)
            if lease is not None and lease.is_held(self.clock()):
                return self._held(lease), None
            reply = await self._take(wanted)
            if reply is not None:
                if lease is not None and lease.released_at is None:
                    self.counters.count_expired_lease()
                return reply, None

    async def _take(self, wanted: Acquisition) -> LeaseReply | None:
        """Takes a free lease; None when it is no longer free, or no longer needed.

        The lease is taken before the artifact is looked for: an upload that commits meanwhile has
        either ended before, and is seen, or ends this lease.
        """
        now = self.clock()
        token = self.new_token()
        async with self.database.writing() as connection:
            await _check_number(connection, wanted, now)
            fencing = await acquire_lease(
                connection,
                wanted.key,
                token=token,
                holder=wanted.request.holder,
                caller=wanted.caller,
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
        if self.wait_queue.is_poller(key, ticket):
            mean = _LOOK_SECONDS_INFORMED if self.wait_queue.are_informed else _LOOK_SECONDS
            look = mean * (0.5 + jitter())
            seconds = min(seconds, look, reply.expires_in_seconds or 0.0)
        try:
            async with asyncio.timeout(seconds):
                await ticket.wait()
        except TimeoutError:
            return

    def _held(self, lease: LeaseRow) -> LeaseReply:
        rest = lease.expires_at - self.clock()
        return LeaseReply(
            state=LeaseState.HELD,
            holder=lease.holder,
            expires_in_seconds=max(rest.total_seconds(), 0.0),
        )


async def _check_number(connection: AsyncConnection, wanted: Acquisition, now: datetime) -> None:
    """Bounds what leases cost the database, and how many others one caller can make wait.

    Raises:
        ServerError: 409.
    """
    caller, namespace = wanted.caller, wanted.key.namespace
    held = await count_held_leases(connection, now=now, caller=caller)
    if held >= _MAX_HELD:
        raise _too_many(f"{caller} holds", _MAX_HELD)
    if not await has_room_for_lease(connection, "caller", caller, now=now, most=_MAX_ROWS):
        raise _too_many(f"{caller} has", _MAX_ROWS)
    if not await has_room_for_lease(connection, "namespace", namespace, now=now, most=_MAX_ROWS):
        raise _too_many(f"the namespace {namespace} has", _MAX_ROWS)


def _too_many(who: str, most: int) -> ServerError:
    return ServerError(
        ErrorCode.TOO_MANY_LEASES,
        f"{who} {most} leases, which is the limit: compile without one, or retry when some have "
        "ended",
        limit=most,
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
        f"this token does not hold the lease on {key.key}: it expired, was released, or was never "
        "granted; continue without it, or acquire it again",
    )
